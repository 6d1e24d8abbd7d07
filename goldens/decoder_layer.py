"""One decoder layer over a tree window (the maths is goldens.model.decoder_layer)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to
from goldens.rounding import EXACT, Rounding, companions
from goldens.tree_paths import random_tree

OUTPUTS = ("y", "latent", "attention", "mlp")
CLEAR = 0.02  # a gap between biased scores that bf16 activations do not close


def inputs(
    rng: Stream,
    *,
    rows: int,
    keys: int,
    layer: int,
    page_size: int,
    pattern: str,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """A window of `rows` nodes behind `keys` cached rows; pattern: see goldens.tree_paths. Nothing
    may depend on page_size.

    Rows whose experts lie too close to call are drawn again: which one is chosen would be decided
    by a rounding, and the two results have nothing to do with each other.
    """
    ready = model.Weights.of(weights)
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    made = {
        "x": round_to(rng.bell((rows, config["hidden_size"])), np.float32),
        "parents": random_tree(rng, rows, pattern),
        "prefix": round_to(rng.bell((keys, width)), ready.activations),
    }
    unclear = np.arange(rows)
    while not model.is_dense(layer, config):
        routing = _run(ready, config, layer, made, EXACT).routing
        assert routing is not None  # the layer is not dense
        gap = routing.gap
        unclear = np.flatnonzero(gap < CLEAR)
        if not unclear.size:
            break
        # A row's own gap hangs on its ancestors too, so that all are looked at again.
        fresh = round_to(rng.bell((unclear.size, config["hidden_size"])), np.float32)
        made["x"][unclear] = fresh
    return made


def _run(
    weights: model.Weights,
    config: Mapping[str, Any],
    layer: int,
    given: Mapping[str, np.ndarray],
    r: Rounding,
    chosen: np.ndarray | None = None,
) -> model.Layer:
    window = model.Window.of(given["parents"], len(given["prefix"]))
    cache = given["prefix"].astype(np.float64)
    x = given["x"].astype(np.float64)
    return model.decoder_layer(x, cache, weights, layer, config, window, r, chosen)


def reference(
    *,
    x: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    layer: int,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    ready = model.Weights.of(weights)
    given = {"x": x, "parents": parents, "prefix": prefix}
    exact = _run(ready, config, layer, given, EXACT)
    chosen = exact.routing.index if exact.routing else None

    def floats(r: Rounding) -> dict[str, np.ndarray]:
        done = _run(ready, config, layer, given, r, chosen)
        return {"y": done.x, "latent": done.latent, "attention": done.attention, "mlp": done.mlp}

    size = companions(floats, ready.activations, Stream("decoder_layer"))
    return floats(EXACT) | {f"{name}.magnitude": size[name] for name in OUTPUTS}
