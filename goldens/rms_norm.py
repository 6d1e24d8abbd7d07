"""RMSNorm (the maths is goldens.model.rms_norm)."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to


def inputs(
    rng: Stream, *, tokens: int, hidden: int, scale: float, x_dtype: str, dtype: str
) -> dict[str, np.ndarray]:
    """scale: size of x; 1e-4 makes eps count, 1e4 would overflow a sum of squares in 16 bits."""
    return {
        "x": round_to(rng.bell((tokens, hidden)) * scale, np.dtype(x_dtype)),
        "weight": round_to(1 + 0.25 * rng.uniform(hidden), np.dtype(dtype)),
    }


def reference(*, x: np.ndarray, weight: np.ndarray, eps: float) -> dict[str, np.ndarray]:
    y = model.rms_norm(x.astype(np.float64), weight.astype(np.float64), np.float32(eps))
    return {"y": y}


def work(*, x: np.ndarray) -> dict[str, int]:
    """T: rows."""
    return {"T": len(x)}
