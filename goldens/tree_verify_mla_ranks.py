"""Tree attention of some heads at a time: what all heads together give, and no bit differs."""

import numpy as np

from goldens import tree_verify_mla
from goldens.tree_verify_mla import inputs

__all__ = ["derived", "inputs", "reference"]


def derived(
    *, prefixes: str, nodes: str, rows: int, words: int, max_pages: int, rank: int, page_size: int,
    values: str, ranks: int, heads: int,
) -> dict[str, int | str | bool]:  # fmt: skip
    """heads is drawn as those of a rank."""
    made = tree_verify_mla.derived(
        prefixes=prefixes, nodes=nodes, rows=rows, words=words, max_pages=max_pages, rank=rank,
        page_size=page_size, values=values,
    )  # fmt: skip
    return {**made, "heads": ranks * heads}


def reference(
    *,
    q: np.ndarray,
    cache: np.ndarray,
    page_table: np.ndarray,
    row_start: np.ndarray,
    prefix_len: np.ndarray,
    ancestors: np.ndarray,
    scale: float,
    page_size: int,
    ranks: int,
) -> dict[str, np.ndarray]:
    """o of goldens.tree_verify_mla; differs [rows]. Nothing depends on ranks."""
    made = tree_verify_mla.reference(
        q=q, cache=cache, page_table=page_table, row_start=row_start, prefix_len=prefix_len,
        ancestors=ancestors, scale=scale, page_size=page_size,
    )  # fmt: skip
    return {**made, "differs": np.zeros(len(q), np.int64)}
