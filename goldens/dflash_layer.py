"""One layer of a drafter over a block, with its weights as inputs (goldens.dflash.layer)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import dflash
from goldens.k26_layer import matrix
from goldens.model import Weights
from goldens.numerics import BF16, Stream, round_to
from goldens.rounding import EXACT, Rounding, companions

SAMPLES = 3  # of the real shape, where a run costs seconds


def inputs(
    rng: Stream, *, slots: int, keys: int, hidden: int, entry: int, size: int, q_width: int,
    inner: int, page_size: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Noise of the size that a trained layer has. Nothing may depend on page_size."""
    groups = entry // 2

    def norm(columns: int) -> np.ndarray:
        return round_to(1 + 0.25 * rng.uniform(columns), BF16)

    return {
        "x": round_to(rng.bell((slots, hidden)), np.float32),
        "context": round_to(rng.bell((keys, entry)), BF16),
        "input_norm": norm(hidden),
        "q_proj": matrix(rng, q_width, hidden),
        "k_proj": matrix(rng, groups, hidden),
        "v_proj": matrix(rng, groups, hidden),
        "q_norm": norm(size),
        "k_norm": norm(size),
        "o_proj": matrix(rng, hidden, q_width),
        "post_norm": norm(hidden),
        "gate_proj": matrix(rng, inner, hidden),
        "up_proj": matrix(rng, inner, hidden),
        "down_proj": matrix(rng, hidden, inner),
    }


def reference(
    *,
    x: np.ndarray,
    context: np.ndarray,
    input_norm: np.ndarray,
    q_proj: np.ndarray,
    k_proj: np.ndarray,
    v_proj: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    o_proj: np.ndarray,
    post_norm: np.ndarray,
    gate_proj: np.ndarray,
    up_proj: np.ndarray,
    down_proj: np.ndarray,
    eps: float,
    rope_theta: float,
) -> dict[str, np.ndarray]:
    given: Mapping[str, Any] = dict(locals())
    name = "drafter.layers.0."
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    places = dict.fromkeys(attention, "self_attn.")
    places |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp.")
    tensors = {f"{name}{part}{which}.weight": given[which] for which, part in places.items()}
    tensors[f"{name}input_layernorm.weight"] = input_norm
    tensors[f"{name}post_attention_layernorm.weight"] = post_norm
    weights = Weights(tensors)
    drafter = {"head_dim": len(q_norm), "rms_norm_eps": eps, "rope_theta": rope_theta}
    positions = len(context) + np.arange(len(x))

    def run(r: Rounding) -> dict[str, np.ndarray]:
        done = dflash.layer(
            x.astype(np.float64), context.astype(np.float64), weights, 0, drafter, positions, r
        )
        return {"y": done}

    samples = SAMPLES if x.shape[1] > 1024 else 8
    size = companions(run, BF16, Stream("dflash_layer"), samples=samples)
    return {**run(EXACT), "y.magnitude": size["y"]}
