"""y[m, n] = sum_k x[m, k] W[n, k] with W = RN_bf16(q s): packed INT4 weights, bf16 activations."""

import numpy as np

from goldens import bundles
from goldens.numerics import BF16, Stream, dequantise, pack_int4, round_to, widen


def int4(rng: Stream, shape: tuple[int, ...], *, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Packed words and scales of random weights [..., n, k]; every code equally likely.

    exact: scales are 2^-3 .. 2^3. Otherwise a group's scale is anything within 2^-9 .. 2^-3, so
    that a neighbour's scale is wrong by a factor and not by a few percent.
    """
    words = rng.raw((*shape[:-1], shape[-1] // 16)).view(np.int32)  # 16 codes a number drawn
    groups = (*shape[:-1], shape[-1] // 32)
    exponent = rng.integers(-3, 4, groups) if exact else rng.integers(-9, -3, groups)
    mantissa = 1.0 if exact else 1.5 + 0.5 * rng.uniform(groups)
    return words, round_to(mantissa * 2.0**exponent, BF16)


def inputs(
    rng: Stream, *, m: int, n: int, k: int, pattern: str, exact: bool = False
) -> dict[str, np.ndarray]:
    """exact: integers x in [-2, 2]; with power-of-two scales every partial sum is representable.

    pattern "random"; "all_codes": every code at every place of a word, x a unit vector a row;
    "nan_neighbours": all rows but every third are NaN; "checkpoint": packed words and scales as
    they are in the pinned checkpoint's file, of the up projection of an expert; "zero_scales",
    "negative_scales" (in half of the groups), "far_scales" (2^-100 to 2^13).
    """
    qw, sc = int4(rng, (n, k), exact=exact)
    x = rng.integers(-2, 3, (m, k)).astype(np.float64) if exact else rng.bell((m, k))
    if pattern == "all_codes":
        row, column = np.indices((n, k))
        qw = pack_int4((row + column) % 16 - 8)
        x = np.eye(m, k)
    elif pattern == "nan_neighbours":
        x[np.arange(m) % 3 != 1] = np.nan
    elif pattern == "checkpoint":
        sample, name = bundles.tensors("k26_sample"), "model.layers.2.mlp.experts.5.up_proj"
        qw, sc = sample[name + ".qw"], sample[name + ".sc"]
    elif pattern in ("zero_scales", "negative_scales"):
        factor = 0.0 if pattern == "zero_scales" else -1.0
        sc = round_to(sc.astype(np.float64) * rng.choice([1.0, factor], sc.shape), BF16)
    elif pattern == "far_scales":
        sc = round_to(2.0 ** rng.choice([-100, -50, 0, 13], sc.shape), BF16)
    elif pattern != "random":
        raise ValueError(f"pattern {pattern!r}")
    return {"x": round_to(x, BF16), "qw": qw, "sc": sc}


def derived(*, m: int, k: int, pattern: str, exact: bool) -> dict[str, int | bool]:
    """Sizes of words, scales and the permuted x: rows in tiles of 8, 16, 32 or 64, whole quarters
    of an even number of blocks of 128 columns."""
    tile = next((8 * c for c in (1, 2, 4) if m <= 8 * c), 64)
    return {
        "words": k // 8,
        "groups": k // 32,
        "tokens": -(-m // tile) * tile,
        "width": -(-k // 1024) * 1024,
        "exact": exact and pattern != "far_scales",
    }


def reference(
    *, x: np.ndarray, qw: np.ndarray, sc: np.ndarray, resident: int = 0
) -> dict[str, np.ndarray]:
    """resident is how the engine divides the work: y does not depend on it."""
    a = x.astype(np.float64)  # [m, k]
    rough = np.abs(x.astype(np.float32))  # float32 has digits enough for a bound
    y, size = [], []
    for start in range(0, len(qw), 4096):
        w = dequantise(qw[start : start + 4096], sc[start : start + 4096])
        y.append(a @ widen(w).T)
        size.append(rough @ np.abs(widen(w, np.float32)).T)
    magnitude = np.concatenate(size, axis=1).astype(np.float64) * (1 + 2.0**-10)
    return {"y": np.concatenate(y, axis=1), "y.magnitude": magnitude}


def work(*, x: np.ndarray, qw: np.ndarray, sc: np.ndarray) -> dict[str, int]:
    """Bytes of x, the packed weights, the scales and y once, and 2 m n k operations; M, N, K."""
    (rows, k), n = x.shape, len(qw)
    moved = x.nbytes + qw.nbytes + sc.nbytes + 2 * rows * n
    return {"bytes": moved, "flops": 2 * rows * n * k, "M": rows, "N": n, "K": k}
