"""The golden tokens that an engine must decode: goldens.greedy_tokens, rounding as it rounds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens.forward import greedy
from goldens.greedy_tokens import inputs

__all__ = ["inputs", "reference"]


def reference(
    *, prompt: np.ndarray, new: int, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    return {"tokens": greedy(weights, config, prompt, new, faithful=True)[0]}
