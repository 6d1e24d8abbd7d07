"""Launcher of specs/tree_verify_mla_ranks.toml: attention of all heads, and of some at a time."""

import numpy as np

from engine.device import copy_to_device, empty, to_device, to_host
from engine.kernels.tree_verify_mla import tree_verify_mla_heads
from engine.splits import MAX_SPLITS
from tests.strict.ranks import unlike


def tree_verify_mla_ranks(
    q, cache, page_table, row_start, prefix_len, ancestors, *, scale: float, page_size: int,
    ranks: int, o, differs, stream=None,
) -> None:  # fmt: skip
    """o of all heads; differs [rows] int32: elements that another number of heads a launch
    changes."""
    rows, heads, rank = o.shape

    def attend(some, into) -> None:
        count = some.shape[1]
        tree_verify_mla_heads(
            some, cache, page_table, row_start, prefix_len, ancestors, scale=scale,
            page_size=page_size, of_heads=heads, o=into,
            partial=empty((rows, MAX_SPLITS, count, rank), "float32"),
            stats=empty((rows, MAX_SPLITS, count, 2), "float32"), stream=stream,
        )  # fmt: skip

    attend(q, o)
    whole, queries, share = to_host(o), to_host(q), heads // ranks
    other = np.zeros(rows, np.int64)
    for first in range(0, heads, share):
        part = slice(first, first + share)
        some = empty((rows, share, rank), o.dtype)
        attend(to_device(queries[:, part]), some)
        other += unlike(to_host(some), whole[:, part])
    copy_to_device(other.astype(np.int32), differs)
