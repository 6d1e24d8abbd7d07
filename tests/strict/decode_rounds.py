"""Launcher of specs/decode_rounds.toml: a decoding run through trees, and one token at a time."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cuda

from engine import graph
from engine.decode import decode
from engine.device import SIMULATED, copy_to_device, empty, to_host
from engine.dflash import DFlash
from engine.draft import Ngram, Replay
from engine.prepared import prepare
from goldens.drafters import replay_table
from goldens.numerics import Stream

ACCURACY = (0.6, 0.2)  # of the guesses at rank 0 and 1


def decode_rounds(
    text, prompt_start, limits, *, budget: int, length: int, ngram: bool, dflash: bool, chain: bool,
    temperature: float, seed: int, slope: float, weights, config, tokens, differs, stale, waits,
    allocations, stream=None,
) -> None:  # fmt: skip
    """text [tokens] int32, request r from prompt_start[r], to generate limits[r]. Written, int32:
    tokens [requests, new]; differs, stale [requests]: elements of tokens, logits and cache whose
    bits decoding one token at a time changes, and of the cache that a fresh prefill of the text
    changes; waits, allocations [1]: for the device, beyond one a round; of memory, calls and bytes,
    after the first round."""
    given, starts = to_host(text), to_host(prompt_start).tolist()
    prompts = [given[a:b].tolist() for a, b in pairwise(starts)]
    ready = prepare(weights, config)
    fixed: dict[str, Any] = {
        "max_new": to_host(limits).tolist(), "eos": (), "temperature": temperature, "seed": seed,
        "page_size": 4,
    }  # fmt: skip
    alone = decode(ready, config, prompts, None, budget=0, mode="ar", **fixed)
    k = max(1, min(budget, config["vocab_size"] - 1))
    tables = [
        replay_table(run.tokens, config["vocab_size"], k, ACCURACY, Stream("rounds", number))
        for number, run in enumerate(alone)
    ]

    def drafter() -> Any:
        if dflash:
            return DFlash(weights, config)
        if ngram:
            return Ngram(length)
        lengths = [len(prompt) for prompt in prompts]
        return Replay([t[0] for t in tables], [t[1] for t in tables], lengths, length)

    fixed |= {"budget": budget, "mode": "chain" if chain else "tree"}
    if slope:
        fixed["costs"] = 1 + slope * np.arange(budget + 1)
    runs = decode(ready, config, prompts, drafter(), **fixed)
    unlike, old = np.zeros(len(runs), np.int32), np.zeros(len(runs), np.int32)
    for r, (one, other) in enumerate(zip(alone, runs, strict=True)):
        unlike[r] = sum(
            unequal(getattr(one, name), getattr(other, name))
            for name in ("tokens", "logits", "cache")
        )
        fresh = decode(
            ready, config, [other.text[:-1]], None, budget=0, mode="ar", max_new=1, eos=(),
            page_size=4,
        )  # fmt: skip
        old[r] = unequal(fresh[0].cache, other.cache)

    with counted() as calls:
        since: Counter[str] = Counter()

        def first_round(*_: Any) -> None:
            if not since:
                since.update(calls, rounds=1, bytes=-used())

        again = decode(ready, config, prompts, drafter(), keep=False, on_round=first_round, **fixed)
        since["bytes"] += used()
    rounds = max(len(run.rounds) for run in again) - 1
    waited = calls["wait"] - since["wait"] + calls["copy"] - since["copy"] - rounds
    grown = calls["allocate"] - since["allocate"] + since["bytes"]
    copy_to_device(np.array([run.tokens for run in again], np.int32), tokens)
    copy_to_device(unlike, differs)
    copy_to_device(old, stale)
    copy_to_device(np.array([waited], np.int32), waits)
    copy_to_device(np.array([grown], np.int32), allocations)


def unequal(one: Any, other: Any) -> int:
    """Elements whose bits differ; all of them if the shapes do."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return max(one.size, other.size, 1)
    width = f"u{one.dtype.itemsize}"
    return int(np.count_nonzero(one.view(width) != other.view(width)))


def used() -> int:
    """Bytes of this GPU's memory that are in use, by whomever."""
    if SIMULATED:
        return 0
    free, total = cuda.current_context().get_memory_info()
    return total - free


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what waits for a device or takes memory on it: wait, copy, allocate."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return call

    array = type(empty((1,), "int32"))
    watched = [
        (graph.Staged, "wait", "wait"),
        (cuda, "synchronize", "wait"),
        (cuda, "device_array", "allocate"),
        (cuda, "pinned_array", "allocate"),
    ]
    if not SIMULATED:  # where the graph's own copies are calls like any other
        watched += [(array, "copy_to_host", "copy"), (array, "copy_to_device", "copy")]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
    for (owner, name, function), (_, _, kind) in zip(before, watched, strict=True):
        setattr(owner, name, counting(kind, function))
    try:
        yield calls
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
