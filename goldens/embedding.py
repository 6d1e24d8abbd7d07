"""Embedding gather with the status of each row."""

import numpy as np

from goldens.numerics import Stream, round_to

OUT_OF_VOCABULARY = 1


def inputs(
    rng: Stream, *, rows: int, vocabulary: int, hidden: int, pattern: str, dtype: str
) -> dict[str, np.ndarray]:
    """pattern "edges": first and last id, and ids just outside on both sides; else all valid."""
    tokens = rng.integers(0, vocabulary, rows)
    if pattern == "edges":
        hostile = [0, vocabulary - 1, -1, vocabulary, 2**31 - 1, -(2**31)]
        tokens = np.resize(np.array(hostile), rows)
    return {
        "tokens": tokens.astype(np.int32),
        "table": round_to(rng.bell((vocabulary, hidden)), np.dtype(dtype)),
    }


def reference(*, tokens: np.ndarray, table: np.ndarray) -> dict[str, np.ndarray]:
    known = (tokens >= 0) & (tokens < len(table))
    x = table[np.where(known, tokens, 0)].astype(np.float64)
    return {
        "x": np.where(known[:, None], x, 0.0),
        "status": np.where(known, 0, OUT_OF_VOCABULARY),
    }
