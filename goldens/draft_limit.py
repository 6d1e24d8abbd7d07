"""Proposals cut at the position behind which nothing can be emitted."""

import numpy as np

from goldens.numerics import Stream, round_to


def inputs(rng: Stream, *, requests: int, length: int, k: int) -> dict[str, np.ndarray]:
    """Reaches from below 0 (a request that has ended) to beyond the length, the first in the
    middle."""
    reaches = np.resize([length // 2, -1, length, 0, length + 3, length - 1, 1], requests)
    shape = (requests, length, k)
    return {
        "reaches": reaches.astype(np.int32),
        "log_probs": round_to(-np.abs(rng.bell(shape)), np.float32),
        "tokens": rng.integers(0, 1 << 18, shape).astype(np.int32),
    }


def reference(
    *, reaches: np.ndarray, log_probs: np.ndarray, tokens: np.ndarray
) -> dict[str, np.ndarray]:
    cut = (np.arange(log_probs.shape[1]) >= reaches[:, None])[..., None]
    return {
        "log_probs": np.where(cut, np.float32(-np.inf), log_probs),
        "tokens": np.where(cut, np.int32(-1), tokens),
    }
