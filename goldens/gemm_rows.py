"""Does a row of a GEMM get the same bits in any company? The oracle.

Each row of x has a twin in twin_x, elsewhere and between rows of NaN. differs[i] counts
the elements of row i of y whose bits are not those of its twin, of the row alone, or of the row in
a shorter batch.
"""

import numpy as np

from goldens import gemm_parts
from goldens.numerics import Stream


def inputs(rng: Stream, *, m: int, n: int, k: int, dtype: str) -> dict[str, np.ndarray]:
    made = gemm_parts.inputs(rng, m=m, n=n, k=k, dtype=dtype)
    twin_of = 2 * rng.permutation(m)
    twin_x = np.full((2 * m, k), np.nan, made["x"].dtype)
    twin_x[twin_of] = made["x"]
    return {**made, "twin_x": twin_x, "twin_of": twin_of.astype(np.int32)}


derived = gemm_parts.derived


def reference(
    *, x: np.ndarray, w: np.ndarray, twin_x: np.ndarray, twin_of: np.ndarray, parts: int
) -> dict[str, np.ndarray]:
    """differs: 0 where a row is its twin's, the size of a row of y where it is not."""
    y = gemm_parts.reference(x=x, w=w, parts=parts)
    alike = (x == twin_x[twin_of]).all(-1)
    return {**y, "differs": np.where(alike, 0, parts * len(w))}
