"""Routed experts on several ranks: what one GPU makes of them, and no bit of it differs."""

import numpy as np

from goldens import moe_w4a16
from goldens.moe_w4a16 import inputs

__all__ = ["inputs", "reference"]


def reference(
    *,
    x: np.ndarray,
    experts: np.ndarray,
    expert_weights: np.ndarray,
    gate_up_qw: np.ndarray,
    gate_up_sc: np.ndarray,
    down_qw: np.ndarray,
    down_sc: np.ndarray,
    ranks: int,
    nccl: bool,
) -> dict[str, np.ndarray]:
    """y of goldens.moe_w4a16; differs [rows]. Nothing depends on ranks or nccl."""
    made = moe_w4a16.reference(
        x=x, experts=experts, expert_weights=expert_weights, gate_up_qw=gate_up_qw,
        gate_up_sc=gate_up_sc, down_qw=down_qw, down_sc=down_sc,
    )  # fmt: skip
    return {**made, "differs": np.zeros(len(x), np.int64)}
