"""Accepted rows of a window move to its front, in all layers of a paged latent cache."""

import numpy as np

from goldens.numerics import Stream, round_to

BAD_COUNT, NOT_ASCENDING, NO_PAGE = 1, 2, 3
ENTRY = 16  # a status is code + ENTRY * j


def inputs(
    rng: Stream, *, requests: int, layers: int, slots: int, width: int, max_pages: int, room: int,
    page_size: int, pattern: str, dtype: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Pages are scattered over the cache, prefixes end anywhere, windows have twice the room.

    pattern: "random" paths; "overlap" (0, 2, 3, ..: each row but the first is source and target);
    "in_place" (0, 1, 2, .. but for the last request); "far" (0, then the end of the window);
    "padding" (counts 0 and short ones, hostile entries past them); "full" (the window ends with the
    last page); "bad_count", "descending", "not_from_root", "no_page", "page_outside",
    "table_ends", "negative_prefix" (in the first request)."""
    pages = slots // page_size
    window, capacity = 2 * room, max_pages * page_size
    table = rng.permutation(pages)[: requests * max_pages].reshape(requests, max_pages)
    if table.size < requests * max_pages or window > capacity:
        raise ValueError("the cache has too few slots for this case")
    prefix = rng.integers(0, capacity - window + 1, requests)
    accepted = np.stack([np.sort(rng.permutation(window - 1)[:room]) for _ in range(requests)])
    accepted = accepted + 1
    accepted[:, 0] = 0
    counts = np.full(requests, room)
    if pattern == "overlap":
        accepted[:, 1:] = np.arange(2, room + 1)
    elif pattern == "in_place":
        accepted[:-1] = np.arange(room)
    elif pattern == "far":
        accepted[:, 1:] = np.arange(window - room + 1, window)
    elif pattern == "padding":
        counts = rng.integers(0, room + 1, requests)
        counts[0], counts[-1] = 0, room
        past = np.arange(room) >= counts[:, None]
        accepted = np.where(past, rng.choice([-1, 0, 1 << 30], accepted.shape), accepted)
    elif pattern == "full":
        prefix[:] = capacity - window
        accepted[:, -1] = window - 1
    elif pattern == "bad_count":
        counts[0] = room + 1
    elif pattern == "descending":
        accepted[0, -1] = accepted[0, -2]
    elif pattern == "not_from_root":
        accepted[0] += 1
    elif pattern == "negative_prefix":
        prefix[0] = -1
    elif pattern in ("no_page", "page_outside"):
        table[0, (prefix[0] + accepted[0, -1]) // page_size] = -1 if pattern == "no_page" else pages
    elif pattern == "table_ends":
        prefix[0] = capacity - room
        accepted[0, -1] = window - 1
    cache = rng.uniform((layers, slots, width))
    return {
        "page_table": table.astype(np.int32),
        "prefix_len": prefix.astype(np.int32),
        "accepted": accepted.astype(np.int32),
        "accepted_counts": counts.astype(np.int32),
        "cache": round_to(cache, np.dtype(dtype)),
    }


def derived(
    *, requests: int, max_pages: int, room: int, page_size: int, pattern: str
) -> dict[str, int | str]:
    """Room for two windows a request, `max_pages` pages beyond that, and two pages of nobody's."""
    pages = -(-2 * room // page_size) + max_pages
    slots = page_size * (requests * pages + 2)
    return {
        "max_pages": pages,
        "slots": slots,
        "pattern": "random" if room < 2 and pattern == "descending" else pattern,
    }


def reference(
    *,
    page_table: np.ndarray,
    prefix_len: np.ndarray,
    accepted: np.ndarray,
    accepted_counts: np.ndarray,
    cache: np.ndarray,
    page_size: int,
) -> dict[str, np.ndarray]:
    """All rows of a request are read before one is written."""
    cache, before = cache.copy(), cache
    requests, slots = len(prefix_len), cache.shape[1]
    status = np.zeros(requests, np.int32)
    new = prefix_len.copy()

    def slot(request: int, position: int) -> int:
        page = position // page_size
        if page >= page_table.shape[1] or page_table[request, page] < 0:
            return slots
        return int(page_table[request, page]) * page_size + position % page_size

    for r in range(requests):
        prefix, count = int(prefix_len[r]), int(accepted_counts[r])
        if not 0 <= count <= accepted.shape[1] or prefix < 0:
            status[r] = BAD_COUNT
            continue
        source = [slot(r, prefix + int(n)) if n >= 0 else slots for n in accepted[r, :count]]
        target = [slot(r, prefix + j) for j in range(count)]
        for j in range(count):
            ascends = accepted[r, j] > accepted[r, j - 1] if j else accepted[r, 0] == 0
            if not ascends or max(source[j], target[j]) >= slots:
                status[r] = (NO_PAGE if ascends else NOT_ASCENDING) + ENTRY * j
                break
        else:
            cache[:, target] = before[:, source]
            new[r] = prefix + count
    return {"cache": cache, "new_prefix_len": new, "status": status}


def work(*, accepted_counts: np.ndarray, cache: np.ndarray) -> dict[str, int]:
    """Bytes: each accepted row is read once and written once, in every layer."""
    layers, _, width = cache.shape
    return {"bytes": 2 * int(accepted_counts.sum()) * layers * width * cache.dtype.itemsize}
