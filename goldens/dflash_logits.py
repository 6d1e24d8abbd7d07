"""A drafter behind its target: logits of a block, and the context, from the text alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import bundles, dflash
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import BF16, Stream
from goldens.rounding import EXACT, Rounding, companions


def inputs(
    rng: Stream, *, length: int, bundle: str, page_size: int, weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:  # fmt: skip
    """The start of a golden prompt and its continuation, of which no rounding flips an expert.
    Nothing may depend on page_size."""
    prompt = bundles.prompts(bundle)[0]
    ready = Weights.of(weights)
    text = list(prompt)
    while len(text) < length:
        text.append(int(forward(ready, config, text)["logits"][-1].argmax()))
    return {"text": np.array(text[:length], np.int32)}


def reference(
    *, text: np.ndarray, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The last token is the root: the target has not seen it."""
    return drafted(text, Weights.of(weights), config, Stream("dflash_logits"))


def drafted(
    text: np.ndarray, weights: Weights, config: Mapping[str, Any], stream: Stream
) -> dict[str, np.ndarray]:
    """logits [b - 1, vocab] and context [layers, P, 2 G D] of a text, with their magnitudes: how
    far the roundings of target and drafter carry them, experts held fixed."""
    chosen = forward(weights, config, text[:-1])["router_index"]

    def run(r: Rounding) -> dict[str, np.ndarray]:
        done = forward(weights, config, text[:-1], rounding=r, chosen=chosen)
        own = r
        if r.activations is not None:  # the drafter's activations are bf16 in any model
            own = Rounding(BF16, r.noise)
        logits, context = dflash.text_logits(done["hidden"], int(text[-1]), weights, config, own)
        return {"logits": logits, "context": context}

    size = companions(run, weights.activations, stream)
    return {**run(EXACT), **{f"{name}.magnitude": value for name, value in size.items()}}
