"""Weighted sum of what a row's experts made of it, each expert on one of several ranks."""

import numpy as np

from goldens import moe_combine
from goldens.numerics import Stream


def inputs(
    rng: Stream,
    *,
    ranks: int,
    rows: int,
    top_k: int,
    count: int,
    slots: int,
    hidden: int,
    routing: str,
    exact: bool = False,
) -> dict[str, np.ndarray]:
    """As in goldens.moe_combine; a slot is NaN on every rank that does not own its expert, and
    behind the last row."""
    used = rows * top_k
    made = moe_combine.inputs(
        rng, rows=rows, top_k=top_k, count=count, slots=used, hidden=hidden, routing=routing,
        exact=exact,
    )  # fmt: skip
    owner = made["experts"].reshape(-1) // (count // ranks)
    parts = np.full((ranks, slots, hidden), np.nan, np.float32)
    for slot in np.flatnonzero((owner >= 0) & (owner < ranks)):
        parts[owner[slot], slot] = made["parts"][slot]
    return {**made, "parts": parts}


def derived(
    *, ranks: int, rows: int, top_k: int, count: int, slots: int, routing: str
) -> dict[str, int | str]:
    """count is drawn as the experts of a rank, slots as those behind the last row."""
    made = moe_combine.derived(rows=rows, top_k=top_k, count=ranks * count, routing=routing)
    used = rows * min(top_k, ranks * count)
    return {**made, "count": ranks * count, "slots": used + slots}


def reference(
    *, parts: np.ndarray, experts: np.ndarray, expert_weights: np.ndarray, count: int
) -> dict[str, np.ndarray]:
    slots = np.arange(experts.size)
    owner = np.clip(experts.reshape(-1) // (count // len(parts)), 0, len(parts) - 1)
    return moe_combine.reference(
        parts=parts[owner, slots], experts=experts, expert_weights=expert_weights, count=count
    )


def work(
    *, parts: np.ndarray, experts: np.ndarray, expert_weights: np.ndarray, count: int
) -> dict[str, int]:
    """Of a choice's slots one is read, its expert's rank's. M: rows."""
    chosen = int(((experts >= 0) & (experts < count)).sum())
    rows, row_bytes = len(experts), parts[0, 0].nbytes
    read = chosen * row_bytes + experts.nbytes + expert_weights.nbytes
    return {"bytes": read + rows * row_bytes, "M": rows}
