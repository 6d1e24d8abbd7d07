"""y[m, n] = sum_k x[m, k] w[n, k]: the oracle of every GEMM on unquantised weights.

x may have more columns than w, and y more than w has rows: x's are NaN here, y's must stay.
"""

from typing import Any

import numpy as np

from goldens.numerics import BF16, Gathered, Stream, round_to, widen

LARGE = 1 << 27  # elements of w


def inputs(
    rng: Stream,
    *,
    m: int,
    n: int,
    k: int,
    x_width: int,
    dtype: str,
    exact: bool = False,
    y_width: int = 0,
    batch: int = 0,
    pattern: str = "bell",
) -> dict[str, Any]:
    """exact: integers in [-4, 4], every partial sum below 2^24 and thus the same in any order.

    Otherwise log-normal-like weights (a power of two for every row), so that one row's error
    cannot hide behind another's size. pattern "cancels": later products are the negated earlier
    ones, and y is what the last one or two give.
    """
    many = (batch,) if batch else ()
    w_shape, x_shape = (*many, n, k), (m, *many, x_width)
    if n * k > LARGE:  # the head of a real model: its rows repeat, in another order and sign
        made = inputs(rng, m=m, n=4096, k=k, x_width=x_width, dtype=dtype, exact=exact)
        pick, signs = rng.integers(0, 4096, n), rng.signs(n)
        both = np.concatenate([made["w"], -made["w"]])
        return {**made, "w": Gathered(both, np.where(signs < 0, pick + 4096, pick))}
    if exact:
        w, x = rng.integers(-4, 5, w_shape), rng.integers(-4, 5, x_shape).astype(np.float64)
    else:
        w = rng.bell(w_shape) * 2.0 ** rng.integers(-3, 4, (*many, n, 1))
        x = rng.bell(x_shape)
    if pattern == "cancels":
        half = (k - 1) // 2
        w[..., half : 2 * half], x[..., half : 2 * half] = w[..., :half], -x[..., :half]
    x[..., k:] = np.nan
    made = {"x": round_to(x, np.dtype(dtype)), "w": round_to(w, np.dtype(dtype))}
    if y_width:
        made["y"] = round_to(rng.bell((m, *many, y_width)), np.dtype(dtype))
    return made


def derived(*, n: int, k: int, x_width: int = 0, y_width: int = 0) -> dict[str, int]:
    """x_width is drawn as the eights of columns beyond k, y_width as columns beyond n."""
    return {"x_width": -(-k // 8) * 8 + 8 * x_width, "y_width": n + y_width}


def reference(
    *, x: np.ndarray, w: np.ndarray, y: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """`y`, where given, is what the output holds before: columns past n keep it."""
    if isinstance(w, Gathered):
        return {key: some[:, w.index] for key, some in reference(x=x, w=w.pool).items()}
    a = widen(x[..., : w.shape[-1]]).swapaxes(0, -2)  # [(batch,) m, k]
    b = widen(w).swapaxes(-1, -2)  # [(batch,) k, n]
    product = a @ b
    if w.size > 1 << 20 and w.dtype == BF16:  # float32 has digits enough for a bound
        rough = np.abs(a, dtype=np.float32) @ np.abs(b, dtype=np.float32)
        size = rough.astype(np.float64) * (1 + 2.0**-10)
    else:
        size = np.abs(a) @ np.abs(b)
    if x.ndim == 3:
        product, size = product.swapaxes(0, 1), size.swapaxes(0, 1)
    if y is None:
        return {"y": product, "y.magnitude": size}
    out, magnitude = y.astype(np.float64), np.abs(y.astype(np.float64))
    out[..., : w.shape[-2]], magnitude[..., : w.shape[-2]] = product, size
    return {"y": out, "y.magnitude": magnitude}


def work(*, x: np.ndarray, w: np.ndarray) -> dict[str, int]:
    """Bytes of x, w and y once, as 16-bit values, and 2 m n k operations a matrix; M, N, K."""
    batch, n, k = (1, *w.shape) if w.ndim == 2 else w.shape
    rows = len(x)
    return {
        "bytes": 2 * batch * (rows * k + n * k + rows * n),
        "flops": 2 * batch * rows * n * k,
        "M": rows,
        "N": n,
        "K": k,
    }
