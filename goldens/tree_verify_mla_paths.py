"""Does a tree node get the bits of its path decoded one token at a time? The oracle.

The tree rows are those of goldens.tree_verify_mla. Each has a twin: a request of one token whose
prefix is the node's path, its keys copied in path order to other pages. Twins stand in permuted
order and between rows of NaN. differs[i] counts the elements of row i's output whose bits are not
its twin's.
"""

import numpy as np

from goldens import tree_verify_mla
from goldens.numerics import Stream


def inputs(
    rng: Stream,
    *,
    rows: int,
    heads: int,
    width: int,
    slots: int,
    max_pages: int,
    words: int,
    page_size: int,
    dtype: str,
    prefix: int,
    tree: str,
    values: str,
) -> dict[str, np.ndarray]:
    """One request with `rows` nodes after `prefix` keys. Twin 2i of a permutation is a row's, twin
    2i + 1 is a NaN query over one key."""
    made = tree_verify_mla.inputs(
        rng, rows=rows, requests=1, heads=heads, width=width, slots=slots, max_pages=max_pages,
        words=words, page_size=page_size, dtype=dtype, prefixes=str(prefix), nodes=str(rows),
        tree=tree, values=values,
    )  # fmt: skip
    seen = tree_verify_mla.keys_of_rows(
        made["page_table"], made["row_start"], made["prefix_len"], made["ancestors"], page_size
    )
    q, cache = made["q"], made["cache"]
    used = np.unique(np.concatenate(seen)) // page_size
    free = np.setdiff1d(np.arange(slots // page_size), used)
    free = free[rng.permutation(len(free))]
    twin_of = 2 * rng.permutation(rows)
    twins = {
        "twin_q": np.full((2 * rows, heads, width), np.nan, q.dtype),
        "twin_page_table": np.full((2 * rows, max_pages), 2**31 - 1, np.int32),
        "twin_row_start": np.arange(2 * rows + 1, dtype=np.int32),
        "twin_prefix_len": np.zeros(2 * rows, np.int32),
        "twin_ancestors": np.ones((2 * rows, 1), np.uint32),
        "twin_of": twin_of.astype(np.int32),
    }
    twins["twin_page_table"][:, 0] = made["page_table"][0, 0]
    for row, twin in enumerate(twin_of):
        count = -(-len(seen[row]) // page_size)
        pages, free = free[:count], free[count:]
        if len(pages) < count:
            raise ValueError(f"{slots} slots are too few for the twins")
        places = np.arange(len(seen[row]))
        cache[pages[places // page_size] * page_size + places % page_size] = cache[seen[row]]
        twins["twin_q"][twin] = q[row]
        twins["twin_page_table"][twin, :count] = pages
        twins["twin_prefix_len"][twin] = len(places) - 1
    return {**made, **twins}


def derived(
    *, rows: int, prefix: int, max_pages: int, rank: int, page_size: int
) -> dict[str, int | str | bool]:
    """Pages for the tree, for each twin's whole path, and two of nobody's."""
    made = tree_verify_mla.derived(
        prefixes=str(prefix), nodes=str(rows), rows=0, words=0, max_pages=max_pages, rank=rank,
        page_size=page_size, values="plain",
    )  # fmt: skip
    pages = -(-(prefix + rows) // page_size)
    return {
        "twins": 2 * rows,
        "bounds": 2 * rows + 1,
        "words": made["words"],
        "width": made["width"],
        "max_pages": made["max_pages"],
        "slots": page_size * (pages * (rows + 1) + 2),
    }


def reference(
    *,
    q: np.ndarray,
    cache: np.ndarray,
    page_table: np.ndarray,
    row_start: np.ndarray,
    prefix_len: np.ndarray,
    ancestors: np.ndarray,
    twin_q: np.ndarray,
    twin_page_table: np.ndarray,
    twin_row_start: np.ndarray,
    twin_prefix_len: np.ndarray,
    twin_ancestors: np.ndarray,
    twin_of: np.ndarray,
    scale: float,
    page_size: int,
) -> dict[str, np.ndarray]:
    """o as in goldens.tree_verify_mla. differs: 0 where query and keys are the twin's, in order;
    the size of a row where they are not."""
    tree = (page_table, row_start, prefix_len, ancestors)
    twins = (twin_page_table, twin_row_start, twin_prefix_len, twin_ancestors)
    seen = tree_verify_mla.keys_of_rows(*tree, page_size)
    seen_by_twin = tree_verify_mla.keys_of_rows(*twins, page_size)
    o = tree_verify_mla.reference(
        q=q, cache=cache, page_table=page_table, row_start=row_start, prefix_len=prefix_len,
        ancestors=ancestors, scale=scale, page_size=page_size,
    )  # fmt: skip
    alike = [
        np.array_equal(q[row], twin_q[twin])
        and np.array_equal(cache[seen[row]], cache[seen_by_twin[twin]])
        for row, twin in enumerate(twin_of)
    ]
    return {**o, "differs": np.where(alike, 0, o["o"][0].size)}
