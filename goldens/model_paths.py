"""Does a tree node get the bits of its path decoded one token at a time? The oracle, whole model.

logits as in goldens.model_window. differs[i]: elements of node i's logits and cache rows whose bits
change when its path is decoded token by token, when the tree's nodes stand in another order, or
when other requests share the pass. None may.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import model_window
from goldens.numerics import Stream


def inputs(
    rng: Stream,
    *,
    rows: int,
    keys: int,
    page_size: int,
    pattern: str,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """One request; see goldens.model_window."""
    made = model_window.inputs(
        rng, rows=rows, bounds=2, keys=keys, page_size=page_size, pattern=pattern,
        weights=weights, config=config,
    )  # fmt: skip
    return {name: made[name] for name in ("tokens", "parents", "prefix")}


def reference(
    *,
    tokens: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    made = model_window.reference(
        tokens=tokens,
        parents=parents,
        row_start=np.array([0, len(tokens)]),
        key_start=np.array([0, prefix.shape[1]]),
        prefix=prefix,
        weights=weights,
        config=config,
    )
    logits = {name: made[name] for name in ("logits", "logits.magnitude")}
    return {**logits, "differs": np.zeros(len(tokens), np.int64)}
