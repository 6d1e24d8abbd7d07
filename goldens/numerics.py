"""Numbers: seeded streams, correct rounding, units in the last place, INT4, masked softmax.

Everything here gives the same bits on every CPU and numpy: a stream is the raw output of a bit
generator (numpy guarantees it, NEP 19) scaled by powers of two, never a `Generator` distribution
(no guarantee), and the roundings are integer arithmetic or single IEEE operations.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
GROUP = 32  # input columns that share an INT4 scale
BLOCK = 1 << 14  # elements at a time in passes over large arrays: 128 KB of float64
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # bits
_LOWEST = {"bfloat16": -133, "float16": -24, "float32": -149, "float64": -1074}  # log2 subnormal

Shape = int | Sequence[int]


class Stream:
    """Random numbers named by a key: Stream("rms_norm", "odd_tail", 0) is one fixed sequence.

    Keys are strings and integers; streams with different keys are unrelated (SHA-256). Each call
    takes the next numbers, in C order of the shape.
    """

    def __init__(self, *key: str | int):
        text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
        self._key = text
        self._bits = np.random.PCG64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16]))

    def __repr__(self) -> str:
        return f"Stream({self._key!r})"

    def fork(self, *key: str | int) -> "Stream":
        """The stream of this key extended by `key`; does not depend on what was drawn so far."""
        return Stream(self._key, *key)

    def raw(self, shape: Shape) -> np.ndarray:
        """uint64, all 64 bits random."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(shape, dtype=np.int64))
        return self._bits.random_raw(count).reshape(shape)

    def integers(self, lo: int, hi: int, shape: Shape = ()) -> np.ndarray:
        """int64 in [lo, hi). hi - lo at most 2^32; the bias of each value is below 2^-32."""
        if not 0 < hi - lo <= 2**32:
            raise ValueError(f"integers: hi - lo must be in [1, 2^32], got [{lo}, {hi})")

        def scaled(raw: np.ndarray) -> np.ndarray:
            return ((raw >> np.uint64(32)) * np.uint64(hi - lo) >> np.uint64(32)).view(
                np.int64
            ) + lo

        return self._drawn(shape, np.int64, scaled)

    def uniform(self, shape: Shape = ()) -> np.ndarray:
        """float64 in [-1, 1), multiples of 2^-24 (so exact in float32 too)."""
        return self._drawn(
            shape,
            np.float64,
            lambda raw: ((raw >> np.uint64(39)).view(np.int64) - 2**24) * 2.0**-24,
        )

    def bell(self, shape: Shape = ()) -> np.ndarray:
        """float64 in (-4, 4), bell shaped, multiples of 2^-15; mean 0, sd 1.1547 (2 / sqrt 3).

        The sum of the four 16-bit pieces of one word. The third moment is 0, the kurtosis 2.7.
        """

        def summed(raw: np.ndarray) -> np.ndarray:
            even = np.uint64(0x0000FFFF0000FFFF)
            pairs = (raw & even) + (raw >> np.uint64(16) & even)  # two sums, 32 bits apart
            total = ((pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))).view(np.int64)
            return (2 * total - 4 * 0xFFFF) * 2.0**-16

        return self._drawn(shape, np.float64, summed)

    def signs(self, shape: Shape = ()) -> np.ndarray:
        """float64, -1 or 1."""
        return self._drawn(
            shape, np.float64, lambda raw: 1.0 - 2.0 * (raw >> np.uint64(63)).astype(np.float64)
        )

    def _drawn(
        self, shape: Shape, dtype: type, make: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """`make` of the next words, in blocks that stay in a core's cache."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        out: np.ndarray = np.empty(int(np.prod(shape, dtype=np.int64)), dtype)
        for start in range(0, out.size, BLOCK):
            part = out[start : start + BLOCK]
            part[:] = make(self._bits.random_raw(part.size))
        return out.reshape(shape)

    def permutation(self, n: int) -> np.ndarray:
        """int64 [n], a permutation of 0..n-1."""
        return np.argsort(self.raw(n), kind="stable").astype(np.int64)

    def choice(self, values: Sequence | np.ndarray, shape: Shape = ()) -> np.ndarray:
        """Entries of `values`, drawn with replacement."""
        values = np.asarray(values)
        return values[self.integers(0, len(values), shape)]


class Gathered:
    """pool[index] without its memory: an array whose rows are those of a small pool, repeated.

    The weights of 384 experts or the head of a real model are gigabytes, of which an oracle can
    make, and look at, only a part. The device gets all of them. Indexing takes the first axis;
    np.asarray makes the whole array.
    """

    def __init__(self, pool: np.ndarray, index: np.ndarray):
        self.pool, self.index = np.ascontiguousarray(pool), np.asarray(index, np.int64)
        if self.index.ndim != 1 or self.index.min() < 0 or self.index.max() >= len(pool):
            raise ValueError(f"Gathered: indices must be a row of numbers below {len(pool)}")
        self.shape, self.dtype = (len(self.index), *self.pool.shape[1:]), self.pool.dtype
        self.ndim, self.size = self.pool.ndim, math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key) -> np.ndarray:
        return self.pool[self.index[key]]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        whole = self.pool[self.index]
        return whole if dtype is None else whole.astype(dtype, copy=False)


def round_to(x: np.ndarray, dtype) -> np.ndarray:
    """`x` in `dtype`, rounded once to nearest even.

    Floats: overflow gives infinity, NaN stays NaN, subnormals are kept. bfloat16 from float64 does
    not round to float32 in between (ml_dtypes' own cast does: 1 + 2^-8 + 2^-40 comes out as 1).
    Integer and bool targets must hold `x` exactly: ValueError otherwise.
    """
    x = np.asarray(x)
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype.kind in "iub":
        with np.errstate(invalid="ignore"):
            cast = x.astype(dtype)
        if not np.array_equal(cast.astype(x.dtype), x):
            raise ValueError(f"round_to: values of {x.dtype} do not fit {dtype} exactly")
        return cast
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == BF16:
            flat, out = x.reshape(-1), np.empty(x.size, BF16)
            for start in range(0, x.size, BLOCK):
                part = flat[start : start + BLOCK].astype(np.float64)
                out[start : start + BLOCK] = _to_bf16(part)
            return out.reshape(x.shape)
        return x.astype(dtype)


def widen(x: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """`x` in a wider float dtype, exactly. ml_dtypes' own cast of bfloat16 is slow."""
    if x.dtype != BF16:
        return x.astype(dtype)
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint16)
    out: np.ndarray = np.empty(x.size, dtype)
    for start in range(0, x.size, BLOCK):
        bits = flat[start : start + BLOCK].astype(np.uint32) << np.uint32(16)
        with np.errstate(invalid="ignore"):  # signalling NaN
            out[start : start + BLOCK] = bits.view(np.float32)
    return out.reshape(x.shape)


def _to_bf16(x: np.ndarray) -> np.ndarray:
    """Through float32 rounded to odd: its 16 spare bits then say on which side of a tie x lies."""
    single = x.astype(np.float32)
    bits = single.view(np.uint32)
    inexact = single != x  # NaN too, dealt with below
    too_far = np.abs(single) > np.abs(x)
    bits = np.where(inexact, (bits - too_far) | 1, bits).astype(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    return rounded.view(BF16)


def unit_roundoff(dtype) -> float:
    """Largest relative error of one rounding to nearest in the normal range: 2^-8 for bfloat16."""
    return 2.0 ** -_PRECISION[np.dtype(dtype).name]


def ulp(x: np.ndarray, dtype) -> np.ndarray:
    """float64: distance between the neighbours of |x| in `dtype`, in the binade that holds |x|."""
    name = np.dtype(dtype).name
    x = np.asarray(x, np.float64)
    exponent = np.where(x == 0, _LOWEST[name], np.frexp(x)[1])  # |x| in [2^(e-1), 2^e)
    return np.ldexp(1.0, np.maximum(exponent - _PRECISION[name], _LOWEST[name]))


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """uint64: how many representable numbers lie between a and b, which share a float dtype.

    The two zeros are one number, the infinities follow the largest finite ones, NaN is 0 from NaN
    and 2^64 - 1 from everything else.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.dtype.name not in _PRECISION:
        raise ValueError(f"ulp_distance: need one float dtype, got {a.dtype} and {b.dtype}")
    unsigned = _BITS[a.dtype.itemsize]
    top = np.uint64(1) << np.uint64(8 * a.dtype.itemsize - 1)

    def place(x: np.ndarray) -> np.ndarray:
        """The number line as unsigned integers, both zeros at `top`."""
        bits = np.ascontiguousarray(x).view(unsigned).astype(np.uint64).reshape(x.shape)
        return np.where(bits >= top, top - (bits - top), top + bits)

    pa, pb = place(a), place(b)
    distance = np.where(pa > pb, pa - pb, pb - pa)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns about signalling NaN
        na, nb = np.isnan(a), np.isnan(b)
    return np.where(na | nb, np.where(na & nb, np.uint64(0), np.uint64(2**64 - 1)), distance)


def quantise(
    weight: np.ndarray, *, group: int = GROUP, divisor: float = 7.5
) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric INT4 along the input axis: weight [out, in] -> q int8 [out, in], s bf16 [.., in/g].

    s = RN_bf16(amax / divisor), q = clamp(round_even(weight / s), -8, 7) with the quotient by the
    rounded scale in float64. amax / 7.5 is what the public quantiser of this format takes
    (compressed-tensors, minmax observer): all 16 codes occur, -8 for a group whose extreme is
    negative, and the positive extreme clips by half a step, no more than any rounding. A group of
    zeros gets scale 1.
    """
    weight = np.asarray(weight, np.float64)
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"quantise: input axis {columns} is not a multiple of group {group}")
    grouped = weight.reshape(rows, columns // group, group)
    scale = round_to(np.abs(grouped).max(-1) / divisor, BF16)
    scale = np.where(scale == 0, np.ones_like(scale), scale)
    q = np.clip(np.rint(grouped / scale.astype(np.float64)[..., None]), -8, 7)
    return q.astype(np.int8).reshape(rows, columns), scale


def pack_int4(q: np.ndarray) -> np.ndarray:
    """q [..., in] in [-8, 7] -> int32 [..., in/8]; element 8j+i of a row in bits 4i..4i+3, as q+8.

    The layout of `pack-quantized` checkpoints: [1..7, 0] packs to 0x8FEDCBA9.
    """
    q = np.asarray(q)
    if q.shape[-1] % 8 or q.min(initial=0) < -8 or q.max(initial=0) > 7:
        raise ValueError(f"pack_int4: need values in [-8, 7], 8 to a word, got shape {q.shape}")
    codes = (q.astype(np.int64) + 8).astype(np.uint32).reshape(*q.shape[:-1], -1, 8)
    shifted = codes << (4 * np.arange(8, dtype=np.uint32))
    return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """int32 [..., in/8] -> int8 [..., in] in [-8, 7]. The inverse of `pack_int4`."""
    words = np.ascontiguousarray(packed).view(np.uint32)[..., None]
    codes = words >> (4 * np.arange(8, dtype=np.uint32)) & np.uint32(15)
    return (codes.astype(np.int8) - np.int8(8)).reshape(*packed.shape[:-1], -1)


def dequantise(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """bf16 [out, in] = RN_bf16(q * s) from int32 [out, in/8] and bf16 [out, in/group].

    The product of 4 and 8 bits is exact, so it is rounded once.
    """
    rows, columns = packed.shape[0], 8 * packed.shape[1]
    if scale.shape[0] != rows or columns % scale.shape[1]:
        raise ValueError(f"dequantise: scales {scale.shape} do not divide weights {rows, columns}")
    out = np.empty((rows, columns), BF16)
    step = max(1, BLOCK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        q = unpack_int4(packed[part])
        grouped = q.reshape(len(q), scale.shape[1], -1).astype(np.float32)
        with np.errstate(over="ignore"):  # the product has 12 bits: exact in float32 too
            product = grouped * scale[part].astype(np.float32)[..., None]
        out[part] = product.astype(BF16).reshape(q.shape)
    return out


def softmax(scores: np.ndarray, visible: np.ndarray | None = None) -> np.ndarray:
    """float64 softmax over the last axis of `scores`, where `visible` (bool, broadcast) is True.

    A row that sees nothing is all zeros: a query without keys adds nothing to anything, and the
    0/0 = NaN of the formula would spread through 0 * NaN in the next product.
    """
    scores = np.asarray(scores, np.float64)
    if visible is None:
        visible = np.ones((), bool)
    masked = np.where(visible, scores, -np.inf)
    peak = masked.max(-1, keepdims=True)
    shifted = np.exp(masked - np.where(np.isneginf(peak), 0.0, peak))
    total = shifted.sum(-1, keepdims=True)
    return shifted / np.where(total == 0, 1.0, total)
