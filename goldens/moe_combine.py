"""Weighted sum of what a row's experts made of it; a choice outside [0, count) adds nothing."""

import numpy as np

from goldens import moe_route
from goldens.numerics import Stream, round_to


def inputs(
    rng: Stream,
    *,
    rows: int,
    top_k: int,
    count: int,
    slots: int,
    hidden: int,
    routing: str,
    exact: bool = False,
) -> dict[str, np.ndarray]:
    """exact: integers and weights that are powers of two. Parts of absent choices are NaN."""
    assert slots == rows * top_k, (slots, rows, top_k)
    experts = moe_route.choose(rng, rows=rows, top_k=top_k, count=count, routing=routing)
    if exact:
        parts = rng.integers(-8, 9, (slots, hidden)).astype(np.float64)
        weights = 2.0 ** rng.integers(-3, 3, (rows, top_k))
    else:
        parts, weights = rng.bell((slots, hidden)), np.abs(rng.bell((rows, top_k)))
    parts[experts.reshape(-1) >= count] = np.nan
    return {
        "parts": round_to(parts, np.float32),
        "experts": experts,
        "expert_weights": round_to(weights, np.float32),
    }


def derived(*, rows: int, top_k: int, count: int, routing: str) -> dict[str, int | str]:
    made = moe_route.derived(rows=rows, top_k=top_k, count=count, routing=routing)
    return {**made, "slots": rows * made["top_k"]}


def reference(
    *, parts: np.ndarray, experts: np.ndarray, expert_weights: np.ndarray, count: int
) -> dict[str, np.ndarray]:
    inside = (experts >= 0) & (experts < count)  # [rows, top_k]
    made = parts.astype(np.float64).reshape(*experts.shape, parts.shape[1])  # [rows, top_k, hidden]
    terms = np.where(inside[..., None], made * expert_weights.astype(np.float64)[..., None], 0.0)
    return {"y": terms.sum(1), "y.magnitude": np.abs(terms).sum(1)}


def work(*, experts: np.ndarray) -> dict[str, int]:
    """M: rows."""
    return {"M": len(experts)}
