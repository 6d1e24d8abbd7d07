"""The pinned sample's captured tree, through an engine with bf16 activations.

Expected are the logits that transformers captured in float32; the bound is that of an engine that
rounds where ours rounds, from goldens.forward on the same inputs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import model_window, sample_forward
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream, round_to


def inputs(
    rng: Stream,
    *,
    rows: int,
    page_size: int,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """The first `rows` nodes of the captured tree; its prefix is what the faithful model caches for
    the captured prompt. Nothing may depend on page_size."""
    given = sample_forward.inputs(rng, prefix_tokens=48)
    ready = Weights.of(weights)
    prefix = forward(ready, config, given["prefix"], faithful=True)["latents"]
    return {
        "tokens": given["tokens"][:rows],
        "parents": given["parents"][:rows],
        "row_start": np.array([0, rows], np.int32),
        "key_start": np.array([0, len(given["prefix"])], np.int32),
        "prefix": round_to(prefix, ready.activations),
    }


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
    """Only the captured tokens have captured logits; for others (a perturbed input) it is ours."""
    ours = model_window.reference(
        tokens=tokens,
        parents=parents,
        row_start=row_start,
        key_start=key_start,
        prefix=prefix,
        weights=weights,
        config=config,
    )
    captured = sample_forward.captured()
    rows = len(tokens)  # a node sees none that comes after it
    same = np.array_equal(tokens, captured["tree_tokens"][:rows])
    if same and np.array_equal(parents, captured["tree_parent"][:rows]):
        ours["logits"] = captured["float32/tree/logits"][0, :rows].astype(np.float64)
    return ours
