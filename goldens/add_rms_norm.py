"""Residual add in fp32, then RMSNorm (goldens.model.rms_norm) of what was stored."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to


def inputs(
    rng: Stream, *, parts: int, rows: int, hidden: int, dtype: str, pattern: str
) -> dict[str, np.ndarray]:
    """pattern: "bell"; "cancels" (every second row becomes zero), "zeros" (every second row is zero
    before and after), "spiked" (one element of a row has all of its norm)."""
    delta = rng.bell((parts, rows, hidden))
    weight, x = 1 + 0.25 * rng.uniform(hidden), rng.bell((rows, hidden))
    if pattern in ("cancels", "zeros"):
        delta[:, ::2], x[::2] = 0, 0 if pattern == "zeros" else x[::2]
        delta[-1, ::2] = -x[::2]
    elif pattern == "spiked":
        x[:, hidden // 2] = 3e4
    return {
        "delta": round_to(delta, np.float32),
        "weight": round_to(weight, np.dtype(dtype)),
        "x": round_to(x, np.float32),
    }


def reference(
    *, delta: np.ndarray, weight: np.ndarray, x: np.ndarray, eps: float
) -> dict[str, np.ndarray]:
    """The sum is made as the kernel makes it, fp32 additions in ascending order: x is exact."""
    total = delta[0]
    for part in delta[1:]:
        total = total + part
    x = x + total
    y = model.rms_norm(x.astype(np.float64), weight.astype(np.float64), np.float32(eps))
    return {"x": x.astype(np.float64), "y": y}


def work(*, delta: np.ndarray, weight: np.ndarray, x: np.ndarray) -> dict[str, int]:
    """Bytes: delta and the weights read, x read and written, y written in the weights' dtype."""
    written = x.size * weight.dtype.itemsize
    return {"bytes": delta.nbytes + weight.nbytes + 2 * x.nbytes + written, "T": len(x)}
