"""Columns of a drafter's features that one tap layer fills."""

import numpy as np

from goldens.numerics import BF16, Stream, round_to


def inputs(rng: Stream, *, rows: int, hidden: int, width: int) -> dict[str, np.ndarray]:
    """Values of every size, and columns of other taps that must stay."""
    x = rng.bell((rows, hidden)) * 2.0 ** rng.integers(-20, 20, (rows, hidden))
    return {"x": round_to(x, np.float32), "taps": round_to(rng.bell((rows, width)), BF16)}


def derived(*, hidden: int, tap: int, width: int) -> dict[str, int]:
    """width is drawn as the number of taps behind this one."""
    return {"width": hidden * (tap + 1 + width)}


def reference(*, x: np.ndarray, taps: np.ndarray, tap: int) -> dict[str, np.ndarray]:
    out, hidden = taps.copy(), x.shape[1]
    out[:, tap * hidden : (tap + 1) * hidden] = round_to(x.astype(np.float64), BF16)
    return {"taps": out}


def work(*, x: np.ndarray) -> dict[str, int]:
    """Bytes: the stream once, and as many values in bf16."""
    return {"bytes": x.nbytes + x.size * BF16.itemsize}
