"""Does a run through trees have the bits of decoding one token at a time? The oracle.

tokens are the numpy loop's, one at a time. differs: elements of tokens, logits and cache whose bits
the two ways tell apart; stale: of the cache and a fresh prefill of the same text; waits: for the
device beyond one a round; memory: calls since start-up. All of them are zero.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from goldens import bundles
from goldens.decode import decode
from goldens.model import Weights
from goldens.numerics import Stream

DRAFTERS = ("replay", "ngram", "dflash")


def inputs(
    rng: Stream,
    *,
    requests: int,
    new: int,
    bundle: str,
    drafter: str,
    chain: bool,
    budget: int,
    length: int,
    slope: int,
) -> dict[str, np.ndarray]:
    """The golden prompts, how many tokens each may generate, and how the engine drafts: the place
    of `drafter` in DRAFTERS, chain, budget, length, and what a node costs in thousandths of a round
    without nodes, 0 for a fixed budget."""
    prompts = bundles.prompts(bundle)[:requests]
    drafting = [DRAFTERS.index(drafter), chain, budget, length, slope]
    return {
        "text": np.concatenate(prompts).astype(np.int32),
        "prompt_start": np.cumsum([0, *map(len, prompts)]).astype(np.int32),
        "limits": np.full(requests, new, np.int32),
        "drafting": np.array(drafting, np.int32),
    }


def reference(
    *,
    text: np.ndarray,
    prompt_start: np.ndarray,
    limits: np.ndarray,
    drafting: np.ndarray,
    temperature: float,
    seed: int,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """ValueError for no way to draft; the others change no token."""
    drafter, chain, budget, length, slope = drafting.tolist()
    if not (drafter < len(DRAFTERS) and chain in (0, 1) and min(budget, length - 1, slope) >= 0):
        raise ValueError(f"decode_rounds: drafting {drafting}")
    prompts = [text[a:b] for a, b in pairwise(prompt_start)]
    runs = decode(
        Weights.of(weights), config, prompts, None, budget=0, max_new=limits.tolist(), mode="ar",
        eos=(), temperature=temperature, seed=seed,
    )  # fmt: skip
    none = np.zeros(1, np.int32)
    return {
        "tokens": np.array([run.tokens for run in runs], np.int32),
        "differs": np.zeros(len(runs), np.int32),
        "stale": np.zeros(len(runs), np.int32),
        "waits": none,
        "memory": none,
    }
