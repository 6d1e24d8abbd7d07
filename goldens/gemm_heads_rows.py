"""Does a token get the same bits from each head's GEMM in any company? The oracle, as gemm_rows."""

import numpy as np

from goldens import gemm
from goldens.numerics import Stream


def inputs(
    rng: Stream, *, m: int, batch: int, n: int, k: int, x_width: int
) -> dict[str, np.ndarray]:
    """Every second column of y is 0, and what is computed the rounding of its sums alone: bf16
    would hide another order of the others."""
    made = gemm.inputs(rng, m=m, batch=batch, n=n, k=k, x_width=x_width, dtype="bfloat16")
    half = k // 2
    made["x"][..., half:k] = -made["x"][..., :half]
    made["w"][:, 1::2, half:] = made["w"][:, 1::2, :half]
    twin_of = 2 * rng.permutation(m)
    twin_x = np.full((2 * m, batch, x_width), np.nan, made["x"].dtype)
    twin_x[twin_of] = made["x"]
    return {**made, "twin_x": twin_x, "twin_of": twin_of.astype(np.int32)}


def derived(*, m: int, k: int, x_width: int) -> dict[str, int]:
    """x_width is drawn as the eights of columns beyond k."""
    return {"twins": 2 * m, "x_width": -(-k // 8) * 8 + 8 * x_width}


def reference(
    *, x: np.ndarray, w: np.ndarray, twin_x: np.ndarray, twin_of: np.ndarray
) -> dict[str, np.ndarray]:
    """differs: 0 where a token is its twin's, the size of its part of y where it is not."""
    batch, n, k = w.shape
    alike = (x == twin_x[twin_of])[..., :k].all((1, 2))
    return {**gemm.reference(x=x, w=w), "differs": np.where(alike, 0, batch * n)}
