"""Position and cache slot of every row of a batch of windows."""

import numpy as np

from goldens.numerics import Stream

NO_PAGE = 1


def inputs(
    rng: Stream,
    *,
    rows: int,
    bounds: int,
    requests: int,
    max_pages: int,
    page_size: int,
    pattern: str,
    behind: int,
) -> dict[str, np.ndarray]:
    """Windows of unlike length over shuffled pages, and `behind` rows that are in none.

    pattern: "random"; "edges": prefixes of 0 and around multiples of the page size; "far": page ids
    whose slots need 40 bits; "missing": a table that ends before some rows, and pages that are not
    mapped."""
    assert bounds == requests + 1, (bounds, requests)
    nodes = rows - behind
    cuts = np.sort(rng.permutation(nodes - 1)[: requests - 1] + 1)  # no window is empty
    row_start = np.concatenate([[0], cuts, [nodes]])
    capacity = max_pages * page_size
    longest = int(np.diff(row_start).max())
    if pattern != "missing":
        assert capacity >= longest, (capacity, longest)
    prefix_len = rng.integers(0, max(1, capacity - longest + 1), requests)
    if pattern == "edges":
        prefix_len = np.resize([0, page_size - 1, page_size, page_size + 1], requests)
        prefix_len = np.minimum(prefix_len, capacity - longest)
    elif pattern == "missing":
        prefix_len = np.full(requests, max(0, capacity - 2))
    first_page = 2**31 - 1 - requests * max_pages if pattern == "far" else 0
    page_table = first_page + rng.permutation(requests * max_pages).reshape(requests, max_pages)
    if pattern == "missing":
        page_table[::2, -1] = -1
    return {
        "row_start": row_start.astype(np.int32),
        "prefix_len": prefix_len.astype(np.int32),
        "depth": rng.integers(0, rows, rows).astype(np.int32),
        "page_table": page_table.astype(np.int32),
    }


def derived(
    *, rows: int, requests: int, max_pages: int, page_size: int, pattern: str, behind: int
) -> dict[str, int]:
    """No window is empty; `max_pages` is drawn as what is left when one request has all rows, and
    `rows` as those of the windows."""
    requests = min(requests, rows)
    pages = max_pages + (1 if pattern == "missing" else -(-rows // page_size))
    return {
        "requests": requests, "bounds": requests + 1, "max_pages": pages, "rows": rows + behind
    }  # fmt: skip


def reference(
    *,
    row_start: np.ndarray,
    prefix_len: np.ndarray,
    depth: np.ndarray,
    page_table: np.ndarray,
    page_size: int,
) -> dict[str, np.ndarray]:
    """One row at a time, by the definition; what is in no window stays at 0, -1, 0."""
    rows = len(depth)
    position, slot, status = (np.full(rows, nothing, np.int64) for nothing in (0, -1, 0))
    for request, prefix in enumerate(prefix_len.astype(int)):
        first, last = row_start[request], row_start[request + 1]
        for node, row in enumerate(range(first, last)):
            position[row] = prefix + depth[row]
            index, offset = divmod(prefix + node, page_size)
            page = page_table[request, index] if index < page_table.shape[1] else -1
            slot[row] = int(page) * page_size + offset if page >= 0 else -1
            status[row] = 0 if page >= 0 else NO_PAGE
    return {"position": position, "slot": slot, "status": status}
