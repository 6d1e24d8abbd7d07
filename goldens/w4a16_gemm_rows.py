"""Does a row of the W4A16 GEMM get the same bits in any company? The oracle.

Each row of x has a twin in twin_x, elsewhere and between rows of NaN. differs[i] counts the
elements of row i of y whose bits are not those of its twin, of the row alone, of the row in a
shorter batch, or of the launcher for few rows.
"""

import numpy as np

from goldens import w4a16_gemm
from goldens.numerics import Stream


def inputs(rng: Stream, *, m: int, n: int, k: int) -> dict[str, np.ndarray]:
    made = w4a16_gemm.inputs(rng, m=m, n=n, k=k, pattern="random")
    twin_of = 2 * rng.permutation(m)
    twin_x = np.full((2 * m, k), np.nan, made["x"].dtype)
    twin_x[twin_of] = made["x"]
    return {**made, "twin_x": twin_x, "twin_of": twin_of.astype(np.int32)}


def derived(*, m: int, k: int) -> dict[str, int]:
    return {"twins": 2 * m, "words": k // 8, "groups": k // 32}


def reference(
    *, x: np.ndarray, qw: np.ndarray, sc: np.ndarray, twin_x: np.ndarray, twin_of: np.ndarray
) -> dict[str, np.ndarray]:
    """differs: 0 where a row is its twin's, the size of a row of y where it is not."""
    alike = (x == twin_x[twin_of]).all(-1)
    y = w4a16_gemm.reference(x=x, qw=qw, sc=sc)
    return {**y, "differs": np.where(alike, 0, len(qw))}
