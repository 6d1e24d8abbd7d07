"""Launcher of specs/decode_rounds.toml: a decoding run through trees, and one token at a time."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cuda

from engine import graph
from engine.decode import Decoder, decode
from engine.device import SIMULATED, copy_to_device, empty, to_host
from engine.dflash import DFlash
from engine.draft import Ngram, Replay
from engine.prepared import prepare
from goldens.decode_rounds import DRAFTERS
from goldens.drafters import replay_table
from goldens.numerics import Stream

ACCURACY = (0.6, 0.2)  # of the guesses at rank 0 and 1


def decode_rounds(
    text, prompt_start, limits, drafting, *, temperature: float, seed: int, weights, config, tokens,
    differs, stale, waits, memory, stream=None,
) -> None:  # fmt: skip
    """text [tokens] int32, request r from prompt_start[r], to generate limits[r]; drafting [5]: see
    goldens.decode_rounds. Written, int32: tokens [requests, new], as they came one by one; differs,
    stale [requests]: elements of tokens, logits and cache whose bits decoding one token at a time
    changes, and of the cache that a fresh prefill of the text changes; waits, memory [1]: for the
    device, beyond one a round; calls for memory since start-up. Bytes in use say nothing here:
    other workers take and give back memory of the same GPU (tests/scale/bench_round.py counts them
    alone)."""
    given, starts = to_host(text), to_host(prompt_start).tolist()
    prompts = [given[a:b].tolist() for a, b in pairwise(starts)]
    which, chain, budget, length, slope = to_host(drafting).tolist()
    ready = prepare(weights, config)
    fixed: dict[str, Any] = {
        "max_new": to_host(limits).tolist(), "eos": (), "temperature": temperature, "seed": seed,
        "page_size": 4,
    }  # fmt: skip
    alone = decode(ready, config, prompts, None, budget=0, mode="ar", **fixed)
    vocabulary = config["vocab_size"]
    k = max(1, min(budget, vocabulary - 1))
    tables = [
        replay_table(run.tokens, vocabulary, k, ACCURACY, Stream("rounds", number))
        for number, run in enumerate(alone)
    ]
    lengths = [len(prompt) for prompt in prompts]
    drafter: Any = Replay([t[0] for t in tables], [t[1] for t in tables], lengths, length)
    if which == DRAFTERS.index("ngram"):
        drafter = Ngram(length)
    elif which == DRAFTERS.index("dflash"):
        drafter = DFlash(weights, config)
    if slope:
        fixed["costs"] = 1 + slope / 1000 * np.arange(budget + 1)
    streamed: list[list[int]] = [[] for _ in prompts]
    with counted() as calls:
        runs = decode(
            ready, config, prompts, drafter, budget=budget, mode="chain" if chain else "tree",
            on_token=lambda request, token: streamed[request].append(token), **fixed,
        )  # fmt: skip
    rounds = max(len(run.rounds) for run in runs)
    # Logits of each accepted node and the cache at the end come back because they are asked for.
    asked = 1 + sum(len(done.accepted) for run in runs for done in run.rounds)
    waited = calls["wait"] - rounds - (0 if SIMULATED else asked)
    fresh = decode(
        ready, config, [run.text[:-1] for run in runs], None, budget=0, mode="ar", max_new=1,
        eos=(), page_size=4,
    )  # fmt: skip
    unlike, old = np.zeros(len(runs), np.int32), np.zeros(len(runs), np.int32)
    for r, (one, other) in enumerate(zip(alone, runs, strict=True)):
        unlike[r] = sum(
            unequal(getattr(one, name), getattr(other, name))
            for name in ("tokens", "logits", "cache")
        )
        old[r] = unequal(fresh[r].cache, other.cache)
    copy_to_device(np.array(streamed, np.int32), tokens)
    copy_to_device(unlike, differs)
    copy_to_device(old, stale)
    copy_to_device(np.array([waited], np.int32), waits)
    copy_to_device(np.array([calls["memory"]], np.int32), memory)


def unequal(one: Any, other: Any) -> int:
    """Elements whose bits differ; all of them if the shapes do."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return max(one.size, other.size, 1)
    width = f"u{one.dtype.itemsize}"
    return int(np.count_nonzero(one.view(width) != other.view(width)))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts since a decoder started: what waits for a device, and what takes memory on it."""
    calls: Counter[str] = Counter()

    def counting(kind: str, function: Callable) -> Callable:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[kind] += 1
            return function(*arguments, **keywords)

        return call

    def starting(_: str, function: Callable) -> Callable:
        def call(*arguments: Any, **keywords: Any) -> None:
            function(*arguments, **keywords)
            calls.clear()

        return call

    array = type(empty((1,), "int32"))
    watched = [
        (Decoder, "start", starting, ""),
        (graph.Staged, "wait", counting, "wait"),
        (cuda, "synchronize", counting, "wait"),
        (cuda, "device_array", counting, "memory"),
        (cuda, "pinned_array", counting, "memory"),
    ]
    if not SIMULATED:  # where the graph's own copies are calls like any other
        watched += [
            (array, "copy_to_host", counting, "wait"),
            (array, "copy_to_device", counting, "wait"),
        ]
    before = [getattr(owner, name) for owner, name, *_ in watched]
    for (owner, name, wrapped, kind), function in zip(watched, before, strict=True):
        setattr(owner, name, wrapped(kind, function))
    try:
        yield calls
    finally:
        for (owner, name, *_), function in zip(watched, before, strict=True):
            setattr(owner, name, function)
