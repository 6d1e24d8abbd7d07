"""The dense layer at the real shape, in bf16 (the maths is goldens.model.decoder_layer)."""

import numpy as np

from goldens.k26_layer import (
    attention_inputs,
    attention_tensors,
    config_of,
    layer_outputs,
    matrix,
)
from goldens.numerics import Stream


def inputs(
    rng: Stream, *, rows: int, keys: int, hidden: int, pattern: str, page_size: int
) -> dict[str, np.ndarray]:
    """Nothing may depend on page_size."""
    config = config_of(hidden)
    inner = config["intermediate_size"]
    return attention_inputs(rng, rows, keys, config, pattern) | {
        "gate_up": matrix(rng, 2 * inner, hidden),
        "down": matrix(rng, hidden, inner),
    }


def reference(
    *,
    x: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    input_norm: np.ndarray,
    q_a: np.ndarray,
    q_a_norm: np.ndarray,
    q_b: np.ndarray,
    kv_a: np.ndarray,
    kv_a_norm: np.ndarray,
    kv_b: np.ndarray,
    o: np.ndarray,
    post_norm: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
) -> dict[str, np.ndarray]:
    given = dict(locals())
    config = {**config_of(x.shape[1]), "first_k_dense_replace": 1}
    gate, up = np.split(gate_up, 2)
    names = ("gate_proj", "up_proj", "down_proj")
    mlp = zip(names, (gate, up, down), strict=True)
    tensors = attention_tensors(given) | {f"model.layers.0.mlp.{n}.weight": w for n, w in mlp}
    return layer_outputs(given, tensors, config)
