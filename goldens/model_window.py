"""Logits of a batch of tree windows behind prefixes of unlike length (goldens.forward)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream, round_to
from goldens.rounding import EXACT, Rounding, companions
from goldens.tree_paths import random_tree

CLEAR = 0.004  # smallest gap between biased scores that counts as decided, in bf16 models


def _windows(
    tokens: np.ndarray,
    parents: np.ndarray,
    row_start: np.ndarray,
    key_start: np.ndarray,
    prefix: np.ndarray,
) -> list[dict[str, Any]]:
    """What each request gives goldens.forward.forward."""
    return [
        {
            "tokens": tokens[row_start[r] : row_start[r + 1]],
            "parents": parents[row_start[r] : row_start[r + 1]],
            "prefix_cache": prefix[:, key_start[r] : key_start[r + 1]].astype(np.float64),
        }
        for r in range(len(row_start) - 1)
    ]


def inputs(
    rng: Stream,
    *,
    rows: int,
    bounds: int,
    keys: int,
    page_size: int,
    pattern: str,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Random tokens; prefixes are the latents of random prompts; the first request's is empty if
    there are several. Windows whose experts a rounding could decide are drawn again. Nothing may
    depend on page_size."""
    ready, requests = Weights.of(weights), bounds - 1
    row_start = np.linspace(0, rows, requests + 1).astype(np.int32)
    key_start = np.linspace(0, keys, requests + 1).astype(np.int32)
    if requests > 1:
        key_start[1] = 0
    layers, width = config["num_hidden_layers"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
    prefix = np.zeros((layers, keys, width))
    for r in range(requests):
        count = key_start[r + 1] - key_start[r]
        if count:
            prompt = rng.integers(0, config["vocab_size"], int(count))
            done = forward(ready, config, prompt, faithful=True)
            prefix[:, key_start[r] : key_start[r + 1]] = done["latents"]
    made = {"row_start": row_start, "key_start": key_start}
    made["prefix"] = round_to(prefix, ready.activations)
    made["tokens"], made["parents"] = np.zeros((2, rows), np.int32)
    clear = CLEAR if ready.activations != np.float32 else 1e-5
    for r in range(requests):
        part = slice(row_start[r], row_start[r + 1])
        while True:
            count = int(row_start[r + 1] - row_start[r])
            made["parents"][part] = random_tree(rng, count, pattern)
            made["tokens"][part] = rng.integers(0, config["vocab_size"], count)
            done = forward(ready, config, **_windows(**made)[r])
            if done["router_gap"].min(initial=1) > clear:
                break
    return made


def reference(
    *,
    tokens: np.ndarray,
    parents: np.ndarray,
    row_start: np.ndarray,
    key_start: np.ndarray,
    prefix: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """`token` is the argmax where it is decided: the engine's own largest logit is checked by the
    logits' bound, and where two of them lie within it the faithful model says which it is."""
    ready, logits, size, token = Weights.of(weights), [], [], []
    for window in _windows(tokens, parents, row_start, key_start, prefix):
        exact = forward(ready, config, **window)
        chosen = exact["router_index"]

        def floats(
            r: Rounding, window: dict = window, chosen: np.ndarray = chosen
        ) -> dict[str, np.ndarray]:
            done = forward(ready, config, **window, rounding=r, chosen=chosen)
            return {"logits": done["logits"]}

        logits.append(floats(EXACT)["logits"])
        size.append(companions(floats, ready.activations, Stream("model_window"))["logits"])
        token.append(forward(ready, config, **window, faithful=True)["logits"].argmax(-1))
    return {
        "logits": np.concatenate(logits),
        "logits.magnitude": np.concatenate(size),
        "token": np.concatenate(token),
    }
