"""Routed experts of FP32 models."""

import numpy as np

from goldens import moe_route, moe_w4a16
from goldens.numerics import Stream, round_to

DRIFT = moe_w4a16.DRIFT


def inputs(
    rng: Stream,
    *,
    rows: int,
    top_k: int,
    count: int,
    hidden: int,
    inner: int,
    routing: str,
    exact: bool = False,
) -> dict[str, np.ndarray]:
    """exact: gates are 32, 64, .. 256 or far below zero, as in goldens.moe_w4a16, and the rest is
    integers times powers of two."""
    experts = moe_route.choose(rng, rows=rows, top_k=top_k, count=count, routing=routing)
    if exact:
        gate = 2.0 ** rng.integers(0, 4, (count, inner, 1)) * np.ones((1, 1, hidden))
        gate[rng.integers(0, 4, (count, inner)) == 0] = -8
        up = rng.integers(-8, 9, (count, inner, hidden)).astype(np.float64)
        down = rng.integers(-8, 9, (count, hidden, inner)).astype(np.float64)
        x = np.zeros((rows, hidden))
        for row in x:  # eight entries that add up to 32
            row[rng.permutation(hidden)[:8]] = np.array([2, 2, 4, 4, 4, 4, 6, 6])
        weights = 2.0 ** rng.integers(-2, 2, (rows, top_k))
    else:
        gate, up = (rng.bell((count, inner, hidden)) / np.sqrt(hidden) for _ in range(2))
        down = rng.bell((count, hidden, inner)) / np.sqrt(inner)
        x, weights = rng.bell((rows, hidden)), np.abs(rng.bell((rows, top_k)))
    return {
        "x": round_to(x, np.float32),
        "experts": experts,
        "expert_weights": round_to(weights, np.float32),
        "gate_up": round_to(np.concatenate([gate, up], axis=1), np.float32),
        "down": round_to(down, np.float32),
    }


def derived(*, rows: int, top_k: int, count: int, inner: int, routing: str) -> dict[str, int | str]:
    made = moe_route.derived(rows=rows, top_k=top_k, count=count, routing=routing)
    return {**made, "slots": rows * made["top_k"], "gate_up_rows": 2 * inner}


def reference(
    *,
    x: np.ndarray,
    experts: np.ndarray,
    expert_weights: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
) -> dict[str, np.ndarray]:
    groups = [
        ((gate_up[e].astype(np.float64), down[e].astype(np.float64)), experts == e)
        for e in np.unique(experts[experts < len(down)])
    ]
    return moe_w4a16.combine(x, experts, expert_weights, groups, act=np.dtype(np.float32))
