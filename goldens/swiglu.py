"""SwiGLU over gate and up side by side, given in parts."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to, unit_roundoff


def inputs(
    rng: Stream, *, parts: int, rows: int, inner: int, both: int, scale: float, pattern: str
) -> dict[str, np.ndarray]:
    """scale 64 reaches gates where exp overflows float32 on one side and underflows on the other.
    pattern "cancels": the parts of every second row add up to zero or nearly so; else "bell"."""
    assert both == 2 * inner, (both, inner)
    gate_up = round_to(rng.bell((parts, rows, both)) * scale, np.float32)
    if pattern == "cancels":
        gate_up[-1, ::2] = -gate_up[:-1, ::2].sum(0)
    return {"gate_up": gate_up}


def derived(*, inner: int) -> dict[str, int]:
    return {"both": 2 * inner}


def reference(*, gate_up: np.ndarray) -> dict[str, np.ndarray]:
    total = gate_up[0]
    for part in gate_up[1:]:
        total = total + part  # fp32, in ascending order, as the kernel adds them
    gate, up = np.split(total.astype(np.float64), 2, axis=-1)
    y = model.silu(gate) * up
    # exp within 2 ulp, one rounding each of product, sum, quotient and product: 8 u of |y|; and
    # where exp is subnormal, its last bit times the rest.
    subnormal = 2.0**-147 * (1 + np.abs(gate)) * np.abs(up)
    return {"y": y, "y.magnitude": 8 * unit_roundoff(np.float32) * np.abs(y) + subnormal}
