"""Slots grouped by expert, and activations in the order in which the INT4 kernels read them."""

import numpy as np

from goldens import moe_route
from goldens.numerics import BF16, Stream, round_to

derived = moe_route.derived
PAIRS = [0, 4, 1, 5, 2, 6, 3, 7]


def inputs(
    rng: Stream, *, rows: int, top_k: int, count: int, hidden: int, routing: str
) -> dict[str, np.ndarray]:
    experts = moe_route.choose(rng, rows=rows, top_k=top_k, count=count, routing=routing)
    return {"experts": experts, "x": round_to(rng.bell((rows, hidden)), BF16)}


def permuted(x: np.ndarray) -> np.ndarray:
    """[rows, hidden] -> [rows, hidden up to 128]: [block][word 0..3][group 0..3][pairs k, k+4]."""
    rows, hidden = x.shape
    whole = np.zeros((rows, -(-hidden // 128) * 128), x.dtype)
    whole[:, :hidden] = x
    pieces = whole.reshape(rows, -1, 4, 4, 8)[..., PAIRS]  # [row, block, group, word, pair]
    return pieces.swapaxes(2, 3).reshape(rows, -1)


def reference(
    *, experts: np.ndarray, x: np.ndarray, count: int, width: int
) -> dict[str, np.ndarray]:
    made = moe_route.reference(experts=experts, count=count, width=width)
    return {**made, "x_permuted": permuted(x)}


def work(*, experts: np.ndarray) -> dict[str, int]:
    """M: rows."""
    return {"M": len(experts)}
