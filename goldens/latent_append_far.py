"""goldens.latent_append at the end of a cache whose elements 32 bits cannot count."""

import numpy as np

from goldens import latent_append
from goldens.numerics import BF16, Stream, round_to


def inputs(
    rng: Stream, *, parts: int, rows: int, width: int, q_rank: int, rank: int, pairs: int,
    slots: int, tail_slots: int, positions: int, wrap: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Rows go into the last `tail_slots` slots; `below` is what lies `wrap` elements before, where
    nothing may be written. One slot is just past the end."""
    entry = rank + 2 * pairs
    if not tail_slots * entry <= wrap <= (slots - tail_slots) * entry:
        raise ValueError("what lies below the tail must be in the cache and not overlap it")
    made = latent_append.inputs(
        rng, parts=parts, rows=rows, width=width, q_rank=q_rank, rank=rank, pairs=pairs,
        slots=tail_slots, positions=positions, pattern="random", dtype="bfloat16",
    )  # fmt: skip
    made["slot"] = made["slot"] + (slots - tail_slots)
    made["slot"][-1] = slots
    made["tail"] = made.pop("cache")
    return {**made, "below": round_to(rng.bell((tail_slots, entry)), BF16)}


def derived(*, q_rank: int, rank: int, pairs: int, tail_slots: int) -> dict[str, int]:
    entry = rank + 2 * pairs
    return {"entry": entry, "width": q_rank + entry, "wrap": 2 * tail_slots * entry}


def reference(
    *,
    qkv: np.ndarray,
    q_weight: np.ndarray,
    kv_weight: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    position: np.ndarray,
    slot: np.ndarray,
    tail: np.ndarray,
    below: np.ndarray,
    eps: float,
) -> dict[str, np.ndarray]:
    """The last slot is the number of slots, so the others follow from it."""
    told = latent_append.reference(
        qkv=qkv, q_weight=q_weight, kv_weight=kv_weight, cos=cos, sin=sin, position=position,
        slot=slot - slot[-1] + len(tail), cache=tail, eps=eps,
    )  # fmt: skip
    return {
        "tail_after": told.pop("cache"),
        "tail_after.magnitude": told.pop("cache.magnitude"),
        "below_after": below,
        **told,
    }
