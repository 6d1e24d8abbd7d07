"""The accepted nodes' features, positions and cache slots."""

import numpy as np

from goldens.numerics import BF16, Stream, round_to

NO_SUCH_NODE, NO_PAGE = 1, 2


def inputs(
    rng: Stream, *, requests: int, rows: int, room: int, max_pages: int, width: int,
    page_size: int, pattern: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Paths that ascend from the root and skip nodes; the second request has ended (count 0).
    pattern "edges": nodes outside the pass, positions on pages that are not there or behind the
    table. Pages are scattered; what is behind a count is hostile."""
    nodes = rows // requests
    accepted = rng.choice([-1, 2**31 - 1], (requests, room))
    counts = np.zeros(requests, np.int64)
    for r in range(requests):
        counts[r] = 0 if r == 1 else min(room, nodes) - int(rng.integers(0, 2)) * (nodes > 1)
        path = 1 + np.sort(rng.permutation(nodes - 1)[: max(counts[r] - 1, 0)])
        accepted[r, : counts[r]] = [0, *path][: counts[r]]
    longest = max_pages * page_size
    prefix = rng.integers(0, longest - room + 1, requests)
    pages = rng.permutation(requests * max_pages).reshape(requests, max_pages)
    if pattern == "edges":
        accepted[0, counts[0] - 1] = nodes
        accepted[2, 0] = -3
        prefix[3] = longest - counts[3] + 1
        pages[4] = -1
        counts[5:6] = -1
    return {
        "taps": round_to(rng.bell((rows, width)), BF16),
        "accepted": accepted.astype(np.int32),
        "accepted_counts": counts.astype(np.int32),
        "prefix_len": prefix.astype(np.int32),
        "page_table": pages.astype(np.int32),
    }


def derived(
    *, requests: int, rows: int, room: int, max_pages: int, page_size: int, pattern: str
) -> dict[str, int]:
    """rows are drawn as a request's, max_pages as what is beyond the room. "edges" is about the
    first six requests."""
    requests = max(requests, 6) if pattern == "edges" else requests
    pages = max_pages - (-room // page_size)
    return {"requests": requests, "rows": requests * rows, "max_pages": pages}


def reference(
    *,
    taps: np.ndarray,
    accepted: np.ndarray,
    accepted_counts: np.ndarray,
    prefix_len: np.ndarray,
    page_table: np.ndarray,
    page_size: int,
) -> dict[str, np.ndarray]:
    requests, room = accepted.shape
    nodes = len(taps) // requests
    features = np.zeros((requests, room, taps.shape[1]), taps.dtype)
    position, slot = np.full((2, requests, room), -1)
    status = np.zeros((requests, room), np.int64)
    for r in range(requests):
        for j in range(max(accepted_counts[r], 0)):
            node, place = accepted[r, j], prefix_len[r] + j
            page = place // page_size
            if not 0 <= node < nodes:
                status[r, j] = NO_SUCH_NODE
            elif page >= page_table.shape[1] or page_table[r, page] < 0:
                status[r, j] = NO_PAGE
            else:
                features[r, j] = taps[r * nodes + node]
                position[r, j] = place
                slot[r, j] = int(page_table[r, page]) * page_size + place % page_size
    return {"features": features, "position": position, "slot": slot, "status": status}


def work(*, taps: np.ndarray, accepted: np.ndarray) -> dict[str, int]:
    """Bytes: a row of taps read and written for each entry."""
    return {"bytes": 2 * accepted.size * taps.shape[1] * taps.itemsize}
