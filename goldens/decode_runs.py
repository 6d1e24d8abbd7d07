"""Whole decoding runs: every tree, path and token, the cache at the end, each token's logits.

Trees hang on tokens alone (both drafters read nothing else), and the golden prompts decode without
near-ties, so integers are compared exactly. Floats are the faithful model's, within what rounding
errors do to a fresh pass over the whole text (goldens.rounding.companions).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from goldens import bundles
from goldens.decode import CONTEXT, EOS, MAX_NEW, decode
from goldens.drafters import Ngram, Replay, replay_table
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream
from goldens.rounding import Rounding, companions


class _Model:
    """A bundle's weights with what cases have in common: the text that one token at a time gives,
    and the size of rounding errors along a text. Most cases decode the same texts."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]):
        self.tensors, self.weights, self.config = weights, Weights.of(weights), config
        self._plain: dict[tuple, list] = {}
        self._errors: dict[tuple, dict[str, np.ndarray]] = {}

    def plain(self, prompts: list[np.ndarray], new: int, temperature: float, seed: int) -> list:
        key = (*(tuple(p.tolist()) for p in prompts), new, temperature, seed)
        if key not in self._plain:
            self._plain[key] = decode(
                self.weights, self.config, prompts, None, budget=0, max_new=new, mode="ar", eos=(),
                temperature=temperature, seed=seed,
            )  # fmt: skip
        return self._plain[key]

    def errors(self, text: list[int], new: int, number: int) -> dict[str, np.ndarray]:
        """Magnitudes of cache [layers, t, R + rope] and logits [new, vocab], text [t + 1]."""
        key = (tuple(text), new, number)
        if key not in self._errors:
            chosen = forward(self.weights, self.config, text[:-1])["router_index"]

            def floats(rounding: Rounding) -> dict[str, np.ndarray]:
                done = forward(
                    self.weights, self.config, text[:-1], rounding=rounding, chosen=chosen
                )
                return {"cache": done["latents"], "logits": done["logits"][-new:]}

            self._errors[key] = companions(
                floats, self.weights.activations, Stream("decode_runs", number)
            )
        return self._errors[key]


_models: list[_Model] = []


def _model(weights: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> _Model:
    """The one made earlier for these very weights, if there is one."""
    for model in _models:
        if model.tensors is weights:
            return model
    _models.append(_Model(weights, config))
    return _models[-1]


def inputs(
    rng: Stream,
    *,
    requests: int,
    new: int,
    k: int,
    length: int,
    first: int,
    second: int,
    bundle: str,
    ends: str,
    temperature: float,
    seed: int,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """The golden prompts, and their continuations as a drafter would guess them that is right
    first / 100 of the time at rank 0 and second / 100 at rank 1. ends: "together"; "staggered" (the
    middle request may generate half as much); "eos" (a token that the middle one alone says, amid a
    path if all is accepted, ends it)."""
    prompts = bundles.prompts(bundle)[:requests]
    runs = _model(weights, config).plain(prompts, new, temperature, seed)
    accuracy = (first / 100, second / 100)
    tables = [
        replay_table(run.tokens, config["vocab_size"], k, accuracy, rng.fork(number))
        for number, run in enumerate(runs)
    ]
    limits, eos, middle = np.full(requests, new), -1, (requests - 1) // 2
    if ends == "staggered":
        limits[middle] = new // 2
    elif ends == "eos":
        said = {token for r, run in enumerate(runs) if r != middle for token in run.tokens}
        own = runs[middle].tokens
        eos = next(
            token
            for i, token in enumerate(own)
            if i > new // 4 and i % (length + 1) and token not in said and token not in own[:i]
        )
    lengths = [len(prompt) for prompt in prompts]
    return {
        "text": np.concatenate(prompts).astype(np.int32),
        "prompt_start": np.cumsum([0, *lengths]).astype(np.int32),
        "limits": limits.astype(np.int32),
        "eos": np.array([eos], np.int32),
        "log_probs": np.stack([table[0] for table in tables]),
        "guesses": np.stack([table[1] for table in tables]),
    }


def reference(
    *,
    text: np.ndarray,
    prompt_start: np.ndarray,
    limits: np.ndarray,
    eos: np.ndarray,
    log_probs: np.ndarray,
    guesses: np.ndarray,
    budget: int,
    length: int,
    chain: bool,
    ngram: bool,
    context: int,
    temperature: float,
    seed: int,
    slope: float,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Unused entries are -1, or 0 in floats. ngram: that drafter, in place of the tables. context:
    0 means what the model allows. slope: what a node costs, as a share of a round without nodes; 0:
    the budget is fixed. ended: 0 by eos, 1 by its limit, 2 by the context's end."""
    requests, new = log_probs.shape[:2]
    model, nodes = _model(weights, config), budget + 1
    prompts = [text[a:b] for a, b in pairwise(prompt_start)]
    drafter: Any = Replay(list(log_probs), list(guesses), [len(p) for p in prompts], length)
    if ngram:
        drafter = Ngram(length)
    mode = "chain" if chain else "tree"
    runs = decode(
        model.weights, config, prompts, drafter, budget=budget, max_new=limits.tolist(), mode=mode,
        eos=[token for token in eos.tolist() if token >= 0], context=context or None,
        temperature=temperature, seed=seed,
        costs=1 + slope * np.arange(budget + 1) if slope else None,
    )  # fmt: skip
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    rows = max(len(p) for p in prompts) + new - 1
    cache = np.zeros((requests, config["num_hidden_layers"], rows, width))
    logits = np.zeros((requests, new, config["vocab_size"]))
    out = {
        "tokens": np.full((requests, new), -1, np.int32),
        "ended": np.array([(EOS, MAX_NEW, CONTEXT).index(run.ended) for run in runs]),
        "trees": np.full((requests, new, nodes), -1, np.int32),
        "parents": np.full((requests, new, nodes), -1, np.int32),
        "accepted": np.full((requests, new, length + 1), -1, np.int32),
        "cache": cache,
        "cache.magnitude": np.zeros_like(cache),
        "logits": logits,
        "logits.magnitude": np.zeros_like(logits),
    }
    for r, run in enumerate(runs):
        count = len(run.tokens)
        out["tokens"][r, :count] = run.tokens
        for i, done in enumerate(run.rounds):
            out["trees"][r, i, : len(done.tokens)] = done.tokens
            out["parents"][r, i, : len(done.tokens)] = done.parents
            out["accepted"][r, i, : len(done.accepted)] = done.accepted
        own = run.cache.shape[1]
        size = model.errors(run.text, count, r)
        out["cache"][r, :, :own], out["logits"][r, :count] = run.cache, run.logits
        out["cache.magnitude"][r, :, :own] = size["cache"]
        out["logits.magnitude"][r, :count] = size["logits"]
    return out
