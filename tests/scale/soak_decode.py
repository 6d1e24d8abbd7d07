"""A soak of tree decoding: any budget, any drafter, and the text and the cache of plain decoding.

    python -m tests.scale.soak_decode [--rounds 100] [BUNDLE ...]

Each run draws prompts (one to three), a budget from 0 to 256, a drafter, a temperature and whether
the budget adapts, decodes with trees and one token at a time, and compares tokens, logits and
latent cache bit for bit, and the cache with that of a fresh prefill of the same text; of a DFlash
drafter the context too. Ends with a verdict: PASSED, or FAILED and exit code 1 at the first
difference. Meant for a GPU; in the simulator give `--largest 2 --longest 4 --new 4 --rounds 4
micro-fp32`.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

from engine.decode import decode
from engine.dflash import DFlash
from engine.draft import Ngram, Replay
from engine.prepared import prepare
from goldens import bundles
from goldens.drafters import replay_table
from goldens.numerics import Stream

BUNDLES = ("tiny-fp32", "tiny-int4", "tiny2-fp32", "tiny2-int4")
HORIZON = 7  # tokens that a drafter looks ahead
ACCURACY = (0.6, 0.2)  # of replay's guesses at rank 0 and 1


def differences(
    name: str, ready: Any, stream: Stream, largest: int, longest: int, new: int
) -> tuple[list[str], int]:
    """What differs in one run of random prompts, and how many rounds it took."""
    config = bundles.config(name + bundles.DRAFTED)
    vocabulary = config["vocab_size"]
    lengths = [int(stream.integers(1, longest + 1)) for _ in range(int(stream.integers(1, 4)))]
    prompts = [stream.integers(2, vocabulary, n).astype(np.int32) for n in lengths]
    budget = int(stream.choice([int(stream.integers(0, 17)), int(stream.integers(17, 257))]))
    budget = min(budget, largest)
    limits = [int(stream.integers(new // 2, new + 1)) for _ in prompts]
    fixed: dict[str, Any] = {
        "max_new": limits, "eos": (), "temperature": float(stream.choice([0.0, 0.7])),
        "seed": int(stream.integers(0, 1 << 30)),
        "page_size": int(stream.choice([1, 4, 16])),
    }  # fmt: skip
    plain = decode(ready, config, prompts, None, budget=0, mode="ar", **fixed)
    drafter: Any = Ngram(HORIZON)
    which = int(stream.integers(0, 3))
    tensors = bundles.tensors(name + bundles.DRAFTED)
    if which == 2:
        drafter = DFlash(tensors, config)
    elif which:
        k = max(1, min(budget, vocabulary - 1))
        tables = [
            replay_table(run.tokens, vocabulary, k, ACCURACY, stream.fork("replay", i))
            for i, run in enumerate(plain)
        ]
        drafter = Replay([t[0] for t in tables], [t[1] for t in tables], lengths, HORIZON)
    kind = str(stream.choice(["tree", "tree", "chain", "adaptive"]))
    more: dict[str, Any] = {"mode": "chain" if kind == "chain" else "tree"}
    if kind == "adaptive":
        more["costs"] = 1 + 0.03 * np.arange(budget + 1)
    trees = decode(ready, config, prompts, drafter, budget=budget, **more, **fixed)
    reader = DFlash(tensors, config)
    fresh = decode(
        ready, config, [run.text[:-1] for run in trees], reader, budget=1, max_new=1, eos=(),
        page_size=fixed["page_size"],
    )  # fmt: skip
    found: list[str] = []
    for i, (one, other, prefilled) in enumerate(zip(plain, trees, fresh, strict=True)):
        found += [
            f"{what} of request {i}"
            for what in ("tokens", "logits", "cache")
            if not np.array_equal(getattr(one, what), getattr(other, what))
        ]
        if not np.array_equal(prefilled.cache, other.cache):
            found.append(f"cache of request {i} from that of a fresh prefill")
        rows = other.cache.shape[1]
        if which == 2 and budget and different(reader, drafter, i, rows):
            found.append(f"the drafter's context of request {i} from that of a fresh prefill")
    rounds = max(len(run.rounds) for run in trees)
    accepted = np.mean([len(done.accepted) for run in trees for done in run.rounds] or [0])
    print(
        f"{name} prompts {lengths} {kind} budget {budget} {type(drafter).__name__} "
        f"temperature {fixed['temperature']} pages of {fixed['page_size']}: {rounds} rounds, "
        f"{accepted:.2f} a round, {'DIFFERS: ' + ', '.join(found) if found else 'same bits'}",
        flush=True,
    )
    return found, rounds


def different(one: DFlash, other: DFlash, request: int, rows: int) -> bool:
    """Whether any bit of two drafters' contexts differs."""
    a, b = (drafter.context(request, rows).view(np.uint16) for drafter in (one, other))
    return not np.array_equal(a, b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundles", nargs="*", default=BUNDLES)
    parser.add_argument("--rounds", type=int, default=100, help="stop after so many")
    parser.add_argument("--new", type=int, default=32, help="tokens a request, at most")
    parser.add_argument("--largest", type=int, default=256, help="budget")
    parser.add_argument("--longest", type=int, default=89, help="prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ready: dict[str, Any] = {}
    done, run, since = 0, 0, time.perf_counter()
    while done < options.rounds:
        name = options.bundles[run % len(options.bundles)]
        if name not in ready:
            ready[name] = prepare(bundles.tensors(name), bundles.config(name))
        stream = Stream("soak", options.seed, run)
        found, rounds = differences(
            name, ready[name], stream, options.largest, options.longest, options.new
        )
        done, run = done + rounds, run + 1
        if found:
            print(f"FAILED: run {run - 1} of seed {options.seed}")
            return 1
    print(
        f"PASSED: {done} rounds in {run} runs, {time.perf_counter() - since:.0f} s; tokens, logits "
        "and cache have the bits of one token at a time, the cache those of a fresh prefill"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
