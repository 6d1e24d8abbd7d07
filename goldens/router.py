"""Choice of experts and their weights from router logits (goldens.model.router)."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to
from goldens.rounding import Rounding

NOT_A_NUMBER = 1
CLEAR = 1e-5  # a gap between biased scores that fp32 cannot close: 80 ulp of a sum below 2


def inputs(
    rng: Stream, *, parts: int, rows: int, count: int, top_k: int, pattern: str
) -> dict[str, np.ndarray]:
    """pattern: "random"; "ties": logits from {-1, 0, 1} and no bias, so that nearly every choice
    is a tie; "large_bias": bias near 7 with a spread of 0.25, which bf16 cannot tell apart;
    "bias_decides": a bias that reverses the order of the scores; "nan": NaN in every second row."""
    bias = 0.05 * rng.bell(count)
    if pattern == "ties":
        bias = np.zeros(count)
    elif pattern == "large_bias":
        bias = 7 + 0.125 * rng.uniform(count)
    elif pattern == "bias_decides":
        bias = np.linspace(4, -4, count)
    bias = round_to(bias, np.float32)
    logits = rng.choice([-1, -1, -1, -1, 0, 0, 0, 1], (parts, rows, count)).astype(np.float32)
    if pattern == "ties":
        logits[1:] = 0
        return {"logits": logits, "bias": bias}
    again = np.arange(rows)  # rows whose choice fp32 might not settle
    while again.size:
        logits[:, again] = round_to(2 * rng.bell((parts, again.size, count)), np.float32)
        total = _total(logits[:, again])
        again = again[_route(total, bias, top_k).gap < CLEAR]
    if pattern == "bias_decides":
        logits[:] = np.linspace(-1, 1, count, dtype=np.float32)
    elif pattern == "nan":
        logits[0, ::2, count // 2] = np.nan
    return {"logits": logits, "bias": bias}


def derived(*, count: int, top_k: int) -> dict[str, int]:
    chosen = min(top_k, count)
    return {"top_k": chosen, "chosen": chosen}


def _total(logits: np.ndarray) -> np.ndarray:
    """fp32, parts in ascending order, as the kernel adds them."""
    total = logits[0]
    for part in logits[1:]:
        total = total + part
    return total


def _route(total: np.ndarray, bias: np.ndarray, top_k: int, scale: float = 1.0) -> model.Routing:
    """The model's router on logits: an identity takes the place of the gate's weights."""
    config = {"num_experts_per_tok": top_k, "routed_scaling_factor": scale}
    single = Rounding(np.dtype(np.float32))
    gate = np.eye(total.shape[1])
    return model.router(total.astype(np.float64), gate, bias.astype(np.float64), config, single)


def reference(
    *, logits: np.ndarray, bias: np.ndarray, top_k: int, scale: float
) -> dict[str, np.ndarray]:
    total = _total(logits)
    bad = np.isnan(total).any(-1)
    routing = _route(np.where(bad[:, None], 0, total), bias, top_k, scale)
    return {
        "experts": np.where(bad[:, None], np.arange(top_k), routing.index),
        "expert_weights": np.where(bad[:, None], np.nan, routing.weight),
        "status": np.where(bad, NOT_A_NUMBER, 0),
    }


def work(*, logits: np.ndarray) -> dict[str, int]:
    """T: rows."""
    return {"T": logits.shape[1]}
