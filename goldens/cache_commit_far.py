"""goldens.cache_commit at the end of a cache whose elements 32 bits cannot count."""

import numpy as np

from goldens import cache_commit
from goldens.numerics import BF16, Stream, round_to


def inputs(
    rng: Stream, *, requests: int, layers: int, slots: int, tail_slots: int, width: int,
    max_pages: int, room: int, page_size: int, wrap: int, pattern: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The windows lie in the last `tail_slots` slots; `below` is what lies `wrap` elements before
    those of the last layer, where nothing may be read or written."""
    size, end = tail_slots * width, layers * slots * width
    below = end - size - wrap
    apart = all(
        below + size <= (n + 1) * slots * width - size or below >= (n + 1) * slots * width
        for n in range(layers)
    )
    if below < 0 or not apart or (slots - tail_slots) % page_size:
        raise ValueError("what lies below the tails must not overlap them; pages must be whole")
    if requests * max_pages * page_size != tail_slots:
        raise ValueError("the requests must have all pages of the tail")
    made = cache_commit.inputs(
        rng, requests=requests, layers=layers, slots=tail_slots, width=width, max_pages=max_pages,
        room=room, page_size=page_size, pattern=pattern, dtype="bfloat16",
    )  # fmt: skip
    made["page_table"] += (slots - tail_slots) // page_size
    made["tail"] = made.pop("cache")
    return {**made, "below": round_to(rng.uniform((tail_slots, width)), BF16)}


def reference(
    *,
    page_table: np.ndarray,
    prefix_len: np.ndarray,
    accepted: np.ndarray,
    accepted_counts: np.ndarray,
    tail: np.ndarray,
    below: np.ndarray,
    page_size: int,
) -> dict[str, np.ndarray]:
    """The requests have all pages of the tail, so the lowest is its first."""
    told = cache_commit.reference(
        page_table=page_table - page_table.min(), prefix_len=prefix_len, accepted=accepted,
        accepted_counts=accepted_counts, cache=tail, page_size=page_size,
    )  # fmt: skip
    return {"tail_after": told.pop("cache"), "below_after": below, **told}
