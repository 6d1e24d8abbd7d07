"""Whole decoding runs with the drafter: the text exactly, and what the drafter knows at the end.

Trees are not compared: best-first trees branch on the last bit of float log-probabilities, and
numpy and an engine may differ there. What does not hang on the trees is compared: every token, its
logits and the target's cache; the drafter's context, row by row, and its logits behind the whole
text, which are functions of the text alone however the rounds cut it (goldens.dflash_logits).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from goldens import bundles
from goldens.decode import decode
from goldens.dflash_logits import drafted
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream
from goldens.rounding import Rounding, companions


def inputs(
    rng: Stream, *, requests: int, new: int, bundle: str, first: int
) -> dict[str, np.ndarray]:
    """Golden prompts. The second request ends after two tokens, in the middle of the batch; in the
    simulator only the first `first` tokens of each prompt (0: all of it)."""
    prompts = [prompt[: first or None] for prompt in bundles.prompts(bundle)[:requests]]
    limits = np.full(requests, new)
    limits[1:2] = 2
    return {
        "text": np.concatenate(prompts).astype(np.int32),
        "prompt_start": np.cumsum([0, *map(len, prompts)]).astype(np.int32),
        "limits": limits.astype(np.int32),
    }


def reference(
    *,
    text: np.ndarray,
    prompt_start: np.ndarray,
    limits: np.ndarray,
    budget: int,
    chain: bool,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Unused entries are -1, or 0 in floats. The text is that of one token at a time."""
    ready, drafter = Weights.of(weights), config["drafter"]
    prompts = [text[a:b] for a, b in pairwise(prompt_start)]
    requests, new = len(prompts), int(limits.max())
    runs = decode(
        ready, config, prompts, None, budget=0, max_new=limits.tolist(), mode="ar", eos=()
    )
    longest = max(len(prompt) + int(limit) for prompt, limit in zip(prompts, limits, strict=True))
    rows, width = longest - 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]
    entry = 2 * drafter["num_key_value_heads"] * drafter["head_dim"]
    vocabulary = config["vocab_size"]
    shapes = {
        "cache": (config["num_hidden_layers"], rows, width),
        "logits": (new, vocabulary),
        "context": (drafter["num_hidden_layers"], rows, entry),
        "drafts": (drafter["block_size"] - 1, vocabulary),
    }
    out: dict[str, np.ndarray] = {"tokens": np.full((requests, new), -1, np.int32)}
    for name, shape in shapes.items():
        out[name], out[f"{name}.magnitude"] = np.zeros((2, requests, *shape))
    for r, run in enumerate(runs):
        count, own = len(run.tokens), run.cache.shape[1]
        out["tokens"][r, :count] = run.tokens
        chosen = forward(ready, config, run.text[:-1])["router_index"]

        def floats(rounding: Rounding, run: Any = run, chosen: Any = chosen) -> dict:
            done = forward(ready, config, run.text[:-1], rounding=rounding, chosen=chosen)
            return {"cache": done["latents"], "logits": done["logits"][-len(run.tokens) :]}

        size = companions(floats, ready.activations, Stream("dflash_runs", r))
        out["cache"][r, :, :own], out["logits"][r, :count] = run.cache, run.logits
        out["cache.magnitude"][r, :, :own] = size["cache"]
        out["logits.magnitude"][r, :count] = size["logits"]
        made = drafted(np.array(run.text), ready, config, Stream("dflash_runs", "drafts", r))
        for suffix in ("", ".magnitude"):
            out[f"drafts{suffix}"][r] = made[f"logits{suffix}"]
            out[f"context{suffix}"][r, :, :own] = made[f"context{suffix}"]
    return out
