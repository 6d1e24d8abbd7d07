"""Greedy decoding with a cache, and without one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import bundles
from goldens.forward import forward, greedy
from goldens.model import Weights
from goldens.numerics import Stream
from goldens.sample_forward import captured

STEPS = bundles.STEPS


def inputs(rng: Stream, *, bundle: str, number: int) -> dict[str, np.ndarray]:
    """Prompt `number` of a bundle; of the sample there is one, the captured one."""
    if bundle == "k26_sample":
        return {"prompt": captured()["prompt"][0].astype(np.int32)}
    return {"prompt": bundles.prompts(bundle)[number]}


def reference(
    *,
    prompt: np.ndarray,
    faithful: bool,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    return {"tokens": greedy(weights, config, prompt, STEPS, faithful=faithful)[0]}


def witness(
    *,
    prompt: np.ndarray,
    faithful: bool,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    if not faithful:
        return {"tokens": captured()["float32/greedy"]}
    ready, text = Weights(weights), list(prompt)
    for _ in range(STEPS):
        logits = forward(ready, config, text, faithful=True)["logits"][-1]
        text.append(int(np.flatnonzero(logits == logits.max())[0]))
    return {"tokens": np.array(text[len(prompt) :], np.int32)}
