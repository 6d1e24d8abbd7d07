"""One decoder layer on several ranks: what one GPU makes of it, and no bit of it differs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import decoder_layer
from goldens.decoder_layer import inputs

__all__ = ["inputs", "reference"]


def reference(
    *,
    x: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    layer: int,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    ranks: int,
    nccl: bool,
) -> dict[str, np.ndarray]:
    """The outputs of goldens.decoder_layer; differs [rows]. Nothing depends on ranks or nccl."""
    made = decoder_layer.reference(
        x=x, parents=parents, prefix=prefix, layer=layer, weights=weights, config=config
    )
    return {**made, "differs": np.zeros(len(x), np.int64)}
