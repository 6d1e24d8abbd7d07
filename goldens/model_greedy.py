"""The golden tokens that an engine must decode: goldens.greedy_tokens, rounding as it rounds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import greedy_tokens
from goldens.greedy_tokens import inputs

__all__ = ["inputs", "reference"]


def reference(
    *, prompt: np.ndarray, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    return greedy_tokens.reference(prompt=prompt, faithful=True, weights=weights, config=config)
