"""Routed experts on several ranks: what one GPU makes of them, and no bit of it differs."""

import numpy as np

from goldens import moe_w4a16
from goldens.moe_w4a16 import inputs

__all__ = ["derived", "inputs", "reference"]


def derived(
    *, ranks: int, rows: int, top_k: int, count: int, hidden: int, inner: int, routing: str
) -> dict[str, int | str]:
    """count is drawn as the experts of a rank."""
    made = moe_w4a16.derived(
        rows=rows, top_k=top_k, count=ranks * count, hidden=hidden, inner=inner, routing=routing
    )
    return {**made, "count": ranks * count}


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
