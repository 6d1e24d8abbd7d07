"""RMSNorm (the maths is goldens.model.rms_norm)."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to


def inputs(
    rng: Stream, *, tokens: int, hidden: int, scale: float, x_dtype: str, dtype: str, pattern: str
) -> dict[str, np.ndarray]:
    """scale: size of x; 1e-4 makes eps count, 1e4 would overflow a sum of squares in 16 bits.
    pattern: "bell"; "spiked" (one element of a row has all of its norm); "zeros" and "nan_row"
    (every second row is zero, or holds one NaN)."""
    x = rng.bell((tokens, hidden)) * scale
    if pattern == "spiked":
        x[:, hidden // 2] = 2e3 * scale
    elif pattern == "zeros":
        x[::2] = 0
    elif pattern == "nan_row":
        x[::2, hidden // 3] = np.nan
    return {
        "x": round_to(x, np.dtype(x_dtype)),
        "weight": round_to(1 + 0.25 * rng.uniform(hidden), np.dtype(dtype)),
    }


def reference(*, x: np.ndarray, weight: np.ndarray, eps: float) -> dict[str, np.ndarray]:
    y = model.rms_norm(x.astype(np.float64), weight.astype(np.float64), np.float32(eps))
    return {"y": y}


def work(*, x: np.ndarray) -> dict[str, int]:
    """T: rows."""
    return {"T": len(x)}
