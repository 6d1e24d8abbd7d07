"""The K most probable tokens of each draft position; log-probabilities exact to the last bit.

A DDTree is built best first on these numbers, so two implementations that differ in the last bit
grow different trees. The log-probability is therefore defined operation by operation (fp32 with
one rounding each, and integers), here and in the kernel; tests/test_oracles_tree.py bounds its
distance from the float64 log-softmax.
"""

import numpy as np

from goldens.numerics import Stream, round_to

CHUNK = 4096  # tokens whose terms are scaled together
UNIT = 44  # terms are integers in units of 2^-44
LOG2_E = np.float32(1.44269502162933349609375)
# 2^f = 1 + f (c1 + f (c2 + ..)) on [-1/2, 1/2], relative error 2e-9 before rounding
POWER = np.array(
    [
        0.6931471824645996, 0.24022647738456726, 0.055503323674201965, 0.00961843691766262,
        0.0013398875016719103, 0.00015353361959569156,
    ],
    np.float32,
)  # fmt: skip
LN2_HIGH, LN2_LOW = np.float32(0.693145751953125), np.float32(1.42860676533018704503775e-06)
BAD_LOGIT, NO_TOKEN = 1, 2


def inputs(
    rng: Stream, *, requests: int, length: int, vocabulary: int, pattern: str, dtype: str
) -> dict[str, np.ndarray]:
    """pattern: "normal"; "ties" (few different values); "plateau" (nearly all equal); "sorted"
    (descending with the id, so that the best are neighbours); "rising" (the other way: the best
    come last); "minus_infinity" (most tokens masked); "all_masked" (one row wholly -inf); "nan",
    "infinity" (one in one row); "zeros" (0 and -0); "huge" (sums of differences overflow); "far"
    (one token has all the probability); "denormal" (all below 2^-126)."""
    shape = (requests, length, vocabulary)
    x = rng.bell(shape) * 3.0
    if pattern == "ties":
        x = np.floor(x * 2) / 2
    elif pattern == "plateau":
        x = np.where(rng.uniform(shape) < 1 - 2.0 / vocabulary, 1.5, x)
    elif pattern == "sorted":
        x = -np.sort(-x, axis=-1)
    elif pattern == "rising":
        x = np.sort(x, axis=-1)
    elif pattern in ("minus_infinity", "all_masked"):
        x = np.where(rng.integers(0, vocabulary, shape) < 5, x, -np.inf)
        x[..., vocabulary // 2] = 1.0
        if pattern == "all_masked":
            x[0, -1] = -np.inf
    elif pattern in ("nan", "infinity"):
        x[-1, 0, vocabulary - 1] = np.nan if pattern == "nan" else np.inf
        second = min(1, vocabulary - 1)
        x[0, -1, second] = -np.nan if pattern == "nan" else x[0, -1, second]
    elif pattern == "zeros":
        x = np.where(rng.uniform(shape) < 0.5, np.copysign(0.0, rng.uniform(shape)), -1.0)
    elif pattern == "huge":
        x = x * 1e38 / 6
    elif pattern == "denormal":
        x = x * 2.0**-140
    elif pattern == "far":
        x[..., vocabulary // 3] = 200.0
    return {"logits": round_to(x, np.dtype(dtype))}


def derived(*, vocabulary: int, top_k: int) -> dict[str, int]:
    chosen = min(top_k, vocabulary)
    words = 4 * -(-vocabulary // CHUNK) + -(-vocabulary // 32)
    return {"top_k": chosen, "chosen": chosen, "words": words}


def reference(*, logits: np.ndarray, top_k: int) -> dict[str, np.ndarray]:
    """log_probs float32 and tokens [requests, length, top_k], status [requests, length]."""
    requests, length, vocabulary = logits.shape
    log_probs = np.full((requests, length, top_k), -np.inf, np.float32)
    tokens = np.full((requests, length, top_k), -1, np.int32)
    status = np.zeros((requests, length), np.int32)
    for at in np.ndindex(requests, length):
        x = logits[at].astype(np.float32)
        if not (x < np.inf).all():
            status[at] = BAD_LOGIT
        elif x.max() == -np.inf:
            status[at] = NO_TOKEN
        else:
            tokens[at] = np.lexsort((np.arange(vocabulary), -x))[:top_k]
            with np.errstate(over="ignore"):
                difference = x[tokens[at]] - x.max()
            log_probs[at] = difference - log_sum(x)
    return {"log_probs": log_probs, "tokens": tokens, "status": status}


def log_sum(x: np.ndarray) -> np.float32:
    """ln of the sum of e^(x - max x) over float32 x [vocabulary], which has a finite entry."""
    top, total = x.max(), 0
    for start in range(0, len(x), CHUNK):
        part = x[start : start + CHUNK]
        if part.max() > -np.inf:
            mantissa, shift = exponential(part, part.max())
            terms = mantissa << np.uint64(UNIT - 23) >> shift
            (mantissa,), (shift,) = exponential(np.array([part.max()]), top)
            total += (int(terms.sum()) << 1) * (int(mantissa) << 40) >> 64 >> int(shift)
    return logarithm(total)


def exponential(x: np.ndarray, top: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """e^(x - top) = mantissa 2^-(23 + shift), both uint64; the mantissa has 24 bits."""
    with np.errstate(over="ignore"):
        d = np.maximum((x - top) * LOG2_E, np.float32(-60))
    whole = np.rint(d)
    fraction = d - whole
    p = np.full_like(d, POWER[-1])
    for coefficient in POWER[-2::-1]:
        p = fma(p, fraction, coefficient)
    bits = fma(p, fraction, np.float32(1)).view(np.uint32).astype(np.int64)
    shift = 127 - (bits >> 23) - whole.astype(np.int64)
    return (bits & 0x7FFFFF | 0x800000).astype(np.uint64), shift.astype(np.uint64)


def logarithm(total: int) -> np.float32:
    """ln of total 2^-44, total at least 2^44: atanh series in (x - 1) / (x + 1)."""
    exponent = total.bit_length() - 1 - UNIT
    x = np.float32(total >> exponent + UNIT - 23) * np.float32(2**-23)
    if x > np.float32(np.sqrt(2)):
        x, exponent = x * np.float32(0.5), exponent + 1
    one = np.float32(1)
    s = (x - one) / (x + one)
    s2 = s * s
    q = fma(s2, np.float32(1 / 9), np.float32(1 / 7))
    for coefficient in (1 / 5, 1 / 3, 0):
        q = fma(q, s2, np.float32(coefficient))
    e = np.float32(exponent)
    return np.float32(fma(e, LN2_HIGH, fma(e, LN2_LOW, fma(s + s, q, s + s))))


Floats = np.ndarray | np.floating


def fma(a: Floats, b: Floats, c: Floats) -> np.ndarray:
    """a b + c in float32, rounded once: the float64 sum is rounded to odd on the way."""
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)  # what the sum lost, exactly
    even = total.view(np.uint64) & np.uint64(1) == 0
    nudged = np.nextafter(total, np.copysign(np.inf, rest))
    return np.where((rest != 0) & even, nudged, total).astype(np.float32)


def work(*, logits: np.ndarray, top_k: int) -> dict[str, int]:
    """Bytes of the logits and of what is chosen; B chosen of V for R requests."""
    requests, length, vocabulary = logits.shape
    moved = logits.nbytes + requests * length * (8 * top_k + 4)
    return {"bytes": moved, "B": top_k, "V": vocabulary, "R": requests}
