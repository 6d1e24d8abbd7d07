"""Greedy choice with the status of each row."""

import numpy as np

from goldens.numerics import Stream, round_to

NOT_A_NUMBER, ALL_MINUS_INFINITY = 1, 2


def inputs(rng: Stream, *, rows: int, vocabulary: int, pattern: str) -> dict[str, np.ndarray]:
    """pattern: "random"; "ties": a handful of values, the largest many times in a row;
    "hostile": by turns a NaN in the last place, only -inf, only +inf, -inf but for one id,
    and all the lowest finite number; "zeros": zeros of both signs and what is below them;
    "denormal": numbers below 2^-126."""
    if pattern == "ties":
        logits = rng.integers(-4, 5, (rows, vocabulary)).astype(np.float32)
    else:
        logits = round_to(rng.bell((rows, vocabulary)), np.float32)
    if pattern == "zeros":
        logits = np.minimum(logits, 0) * rng.integers(0, 2, logits.shape).astype(np.float32)
        logits = np.where(logits == 0, np.copysign(logits, rng.signs(logits.shape)), logits)
        logits = logits.astype(np.float32)
    elif pattern == "denormal":
        logits = round_to(logits.astype(np.float64) * 2.0**-140, np.float32)
    elif pattern == "hostile":
        for row in logits[0::5]:
            row[-1] = np.nan
        logits[1::5] = -np.inf
        logits[2::5] = np.inf
        logits[3::5] = -np.inf
        logits[3::5, vocabulary // 2] = -1e30
        logits[4::5] = np.finfo(np.float32).min
    return {"logits": logits}


def reference(*, logits: np.ndarray) -> dict[str, np.ndarray]:
    """np.argmax takes the first of equals."""
    bad, none = np.isnan(logits).any(-1), np.isneginf(logits).all(-1)
    status = np.where(bad, NOT_A_NUMBER, np.where(none, ALL_MINUS_INFINITY, 0))
    return {"token": np.where(status == 0, logits.argmax(-1), -1), "status": status}


def work(*, logits: np.ndarray) -> dict[str, int]:
    """T rows of V logits."""
    return {"T": logits.shape[0], "V": logits.shape[1]}
