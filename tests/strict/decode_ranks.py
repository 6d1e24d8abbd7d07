"""Launcher of specs/decode_ranks.toml: a whole run on ranks, and on one GPU."""

from itertools import pairwise
from typing import Any

import numpy as np

from engine.decode import decode
from engine.device import copy_to_device, to_host
from engine.draft import Replay
from engine.ranks import decode_of_rank, digest
from tests.strict.ranks import together


def decode_ranks(
    text, prompt_start, log_probs, guesses, *, budget: int, length: int, ranks: int, nccl: bool,
    weights, config, tokens, trees, accepted, logits, differs, stream=None,
) -> None:  # fmt: skip
    """As engine.passes.decode_runs. differs [ranks] int32: 1 for a rank that has another token, bit
    of a logit or bit of the cache than one GPU."""
    starts = to_host(prompt_start).tolist()
    prompts = [to_host(text)[a:b].tolist() for a, b in pairwise(starts)]
    drafter = Replay(
        list(to_host(log_probs)), list(to_host(guesses)), [len(p) for p in prompts], length
    )
    settings: dict[str, Any] = {
        "budget": budget, "max_new": tokens.shape[1], "eos": (), "page_size": 4,
    }  # fmt: skip
    tensors = {name: to_host(array) for name, array in weights.items()}
    one = digest(decode(tensors, config, prompts, drafter, **settings))
    made = together(ranks, nccl, decode_of_rank, (tensors, config), prompts, drafter, settings)
    copy_to_device(np.array([said != one for _, said, _ in made], np.int32), differs)
    runs = made[0][0]
    copy_to_device(np.array([run.tokens for run in runs], np.int32), tokens)
    copy_to_device(np.array([run.logits for run in runs], np.float32), logits)
    for field, out in (("tokens", trees), ("accepted", accepted)):
        made_of = np.full(tuple(out.shape), -1, np.int32)
        for r, run in enumerate(runs):
            for i, done in enumerate(run.rounds):
                values = getattr(done, field)
                made_of[r, i, : len(values)] = values
        copy_to_device(made_of, out)
