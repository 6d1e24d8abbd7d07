"""GEMM whose ranges of K are summed apart: y[p] is the product over the p-th range."""

import math

import numpy as np

from goldens import gemm
from goldens.numerics import Stream

STAGE_K = 128  # a range is a whole number of stages; the last may be shorter


def inputs(
    rng: Stream, *, m: int, n: int, k: int, dtype: str, exact: bool = False, pattern: str = "bell"
) -> dict[str, np.ndarray]:
    return gemm.inputs(rng, m=m, n=n, k=k, x_width=k, dtype=dtype, exact=exact, pattern=pattern)


def derived(*, m: int, k: int, parts: int) -> dict[str, int]:
    """As many parts as drawn, but none without a stage of its own."""
    stages = -(-k // STAGE_K)
    parts = -(-stages // -(-stages // min(parts, stages)))
    return {"parts": parts, "ranges": parts, "twins": 2 * m}


def reference(*, x: np.ndarray, w: np.ndarray, parts: int) -> dict[str, np.ndarray]:
    stages = math.ceil(w.shape[1] / STAGE_K)
    width = math.ceil(stages / parts) * STAGE_K
    ranges = [slice(p * width, (p + 1) * width) for p in range(parts)]
    made = [gemm.reference(x=x[:, r], w=w[:, r]) for r in ranges]
    return {key: np.stack([one[key] for one in made]) for key in ("y", "y.magnitude")}
