"""Whole runs on several ranks: what one GPU decodes, and no bit of it differs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens import decode_runs
from goldens.decode_runs import inputs

__all__ = ["inputs", "reference"]


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
        text=text, prompt_start=prompt_start, log_probs=log_probs, guesses=guesses, budget=budget,
        length=length, chain=False, ngram=False, weights=weights, config=config,
    )  # fmt: skip
    kept = {
        name: made[name] for name in ("tokens", "trees", "accepted", "logits", "logits.magnitude")
    }
    return {**kept, "differs": np.zeros(ranks, np.int32)}
