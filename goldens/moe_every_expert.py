"""A MoE block as the model computes it, and by brute force."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens.model import Weights, moe
from goldens.numerics import BF16, Stream, round_to, unit_roundoff
from goldens.rounding import EXACT, Rounding, companions


def inputs(rng: Stream, *, tokens: int, hidden: int) -> dict[str, np.ndarray]:
    return {"h": round_to(rng.bell((tokens, hidden)), BF16)}


def reference(
    *, h: np.ndarray, layer: int, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    ready, x = Weights(weights), h.astype(np.float64)
    chosen = moe(x, ready, layer, config)[1].index

    def run(r: Rounding) -> dict[str, np.ndarray]:
        y, routing = moe(x, ready, layer, config, r, chosen)
        return {"y": y, "router_weight": routing.weight}

    size = companions(run, np.dtype(np.float32), Stream("moe_every_expert"))
    scale = unit_roundoff(np.float64) / unit_roundoff(np.float32)
    exact = run(EXACT) | {"router_index": chosen}
    return exact | {f"{name}.magnitude": value * scale for name, value in size.items()}


def witness(
    *, h: np.ndarray, layer: int, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    ready, name = Weights(weights), f"model.layers.{layer}.mlp"
    bias = ready(f"{name}.gate.e_score_correction_bias")
    rows = []
    for x in h.astype(np.float64):
        scores = [1 / (1 + math.exp(-float(w @ x))) for w in ready(f"{name}.gate")]
        ranked = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))
        chosen = sorted(ranked[: config["num_experts_per_tok"]])
        total = math.fsum(scores[e] for e in chosen) / config["routed_scaling_factor"]
        y = _expert(x, ready, f"{name}.shared_experts")
        for expert in range(config["n_routed_experts"]):
            weight = scores[expert] / total if expert in chosen else 0.0
            y = y + weight * _expert(x, ready, f"{name}.experts.{expert}")
        rows.append((y, chosen, [scores[e] / total for e in chosen]))
    y, index, weight = (np.array(column) for column in zip(*rows, strict=True))
    return {"y": y, "router_index": index, "router_weight": weight}


def _expert(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    gate, up = weights(f"{name}.gate_proj") @ x, weights(f"{name}.up_proj") @ x
    return weights(f"{name}.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
