"""Columns of several ranks side by side."""

import numpy as np

from goldens.numerics import BF16, Stream, round_to


def inputs(rng: Stream, *, ranks: int, rows: int, width: int, dtype: str) -> dict[str, np.ndarray]:
    to = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    return {"parts": round_to(rng.bell((ranks, rows, width)), to)}


def derived(*, ranks: int, width: int) -> dict[str, int]:
    return {"columns": ranks * width}


def reference(*, parts: np.ndarray) -> dict[str, np.ndarray]:
    """whole [rows, ranks * width]."""
    return {"whole": np.concatenate(list(parts.astype(np.float64)), axis=1)}
