"""One token drawn from softmax(logits / temperature), decided by integers: the same everywhere.

The weight of a token is e^(x - max x), x = fp32(logit / temperature), as an integer in units of
2^-44, by the arithmetic of goldens.draft_top_k. A 64-bit random number u picks the first token
whose cumulated weight exceeds floor(u * total / 2^64). Sums of integers have no order, so equal
logits give equal tokens, however they were computed.

u is a hash of (seed, request, position of the row's token) and of nothing else: decoding through a
tree draws the very numbers that decoding one token at a time does.
"""

import numpy as np

from goldens.draft_top_k import UNIT, exponential
from goldens.numerics import Stream

NOT_A_NUMBER, ALL_MINUS_INFINITY = 1, 2
_MASK = (1 << 64) - 1


def inputs(
    rng: Stream, *, rows: int, vocabulary: int, requests: int, pattern: str
) -> dict[str, np.ndarray]:
    """pattern: "normal"; "flat" (all equal); "sparse" (most are -inf); "certain" (a token a row);
    "steep" (the division overflows in some rows); "bad" (NaN, +inf, and a row of -inf); "denormal"
    (all below 2^-126)."""
    x = rng.bell((rows, vocabulary)) * 3.0
    if pattern == "flat":
        x[:] = 0.5
    elif pattern == "sparse":
        x = np.where(rng.integers(0, vocabulary, x.shape) < 4, x, -np.inf)
        x[:, vocabulary // 2] = 0.0
    elif pattern == "certain":
        x[np.arange(rows), np.arange(rows) * 7 % vocabulary] = 500.0
    elif pattern == "steep":
        x[::2] *= 3e37
    elif pattern == "bad":
        x[0, vocabulary - 1], x[-1, :] = np.nan, -np.inf
        x[min(1, rows - 1), 0] = np.inf
    elif pattern == "denormal":
        x *= 2.0**-140
    request = np.sort(rng.integers(0, requests, rows))
    return {
        "logits": x.astype(np.float32),
        "request": request.astype(np.int32),
        "position": rng.integers(0, 1 << 18, rows).astype(np.int32),
    }


def reference(
    *,
    logits: np.ndarray,
    request: np.ndarray,
    position: np.ndarray,
    temperature: float,
    seed: int,
) -> dict[str, np.ndarray]:
    """token and status int32 [rows]; status 1: a NaN or +inf after the division, 2: all of it -inf;
    token -1 then."""
    token, status = np.full(len(logits), -1, np.int32), np.zeros(len(logits), np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = logits.astype(np.float32) / np.float32(temperature)
    for row, x in enumerate(scaled):
        if not (x < np.inf).all():
            status[row] = NOT_A_NUMBER
        elif x.max() == -np.inf:
            status[row] = ALL_MINUS_INFINITY
        else:
            token[row] = draw(x, random(seed, int(request[row]), int(position[row])))
    return {"token": token, "status": status}


def draw(x: np.ndarray, u: int) -> int:
    """x [vocabulary] float32 with a finite entry and without NaN or +inf, u in [0, 2^64)."""
    mantissa, shift = exponential(x, x.max())
    cumulated = np.cumsum(mantissa << np.uint64(UNIT - 23) >> shift)
    threshold = u * int(cumulated[-1]) >> 64
    return int(np.searchsorted(cumulated, np.uint64(threshold), side="right"))


def random(seed: int, request: int, position: int) -> int:
    """64 random bits: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over each
    part of the key in turn."""
    state = seed & _MASK
    for part in (request, position):
        state = _mixed(_mixed(state) ^ part)
    return _mixed(state)


def _mixed(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def work(*, logits: np.ndarray) -> dict[str, int]:
    """T rows of V logits."""
    return {"T": logits.shape[0], "V": logits.shape[1]}
