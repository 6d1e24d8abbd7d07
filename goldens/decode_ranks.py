"""Whole runs on several ranks: what one GPU decodes, and no bit of it differs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import decode_runs
from goldens.numerics import Stream


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
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Those of goldens.decode_runs; every request generates as much as it may."""
    made = decode_runs.inputs(
        rng, requests=requests, new=new, k=k, length=length, first=first, second=second,
        bundle=bundle, ends="together", temperature=0.0, seed=0, weights=weights, config=config,
    )  # fmt: skip
    return {name: made[name] for name in ("text", "prompt_start", "log_probs", "guesses")}


def reference(
    *,
    text: np.ndarray,
    prompt_start: np.ndarray,
    log_probs: np.ndarray,
    guesses: np.ndarray,
    budget: int,
    length: int,
    ranks: int,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    nccl: bool,
) -> dict[str, np.ndarray]:
    """tokens, trees, accepted and logits of goldens.decode_runs; differs [ranks]. Nothing
    depends on nccl."""
    made = decode_runs.reference(
        text=text, prompt_start=prompt_start, limits=np.full(*log_probs.shape[:2]),
        eos=np.array([-1]), log_probs=log_probs, guesses=guesses, budget=budget, length=length,
        chain=False, ngram=False, context=0, temperature=0.0, seed=0, slope=0.0, weights=weights,
        config=config,
    )  # fmt: skip
    kept = {
        name: made[name] for name in ("tokens", "trees", "accepted", "logits", "logits.magnitude")
    }
    return {**kept, "differs": np.zeros(ranks, np.int32)}
