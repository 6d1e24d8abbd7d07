"""A soak of tree decoding: any budget, any drafter, and the text and the cache of plain decoding.

    python -m tests.scale.soak_decode [--rounds 100] [BUNDLE ...]

Each run draws three prompts, a budget and a drafter, decodes with trees and one token at a time,
and compares tokens, logits and latent cache bit for bit, and the cache with that of a fresh prefill
of the same text. Exits 1 at the first difference. Meant for a GPU; in the simulator use micro-fp32.
"""

import argparse
import sys

import numpy as np

from engine.decode import decode
from engine.draft import Ngram, Replay
from goldens import bundles
from goldens.drafters import replay_table
from goldens.numerics import Stream

BUNDLES = ("tiny-fp32", "tiny-int4", "tiny2-fp32", "tiny2-int4")
HORIZON = 7  # tokens that a drafter looks ahead
LARGEST = 64  # budget; three requests of 65 nodes are 195 rows of the 256 that a pass takes


def differences(name: str, stream: Stream, new_tokens: int) -> tuple[list[str], int]:
    """What differs in one run of three random prompts, and how many rounds it took."""
    weights, config = bundles.tensors(name), bundles.config(name)
    vocabulary = config["vocab_size"]
    prompts = [stream.integers(2, vocabulary, n).astype(np.int32) for n in (3, 9, 14)]
    temperature = float(stream.choice([0.0, 0.7]))
    budget = int(stream.integers(1, LARGEST + 1))
    fixed = {"max_new": new_tokens, "eos": (), "temperature": temperature, "seed": 3}
    plain = decode(weights, config, prompts, None, budget=0, mode="ar", **fixed)
    if stream.integers(0, 2):
        drafter = Ngram(HORIZON)
    else:
        tables = [
            replay_table(r.tokens, vocabulary, budget, (0.6, 0.2), stream.fork("replay", i))
            for i, r in enumerate(plain)
        ]
        lengths = [len(p) for p in prompts]
        drafter = Replay([t[0] for t in tables], [t[1] for t in tables], lengths, HORIZON)
    trees = decode(weights, config, prompts, drafter, budget=budget, **fixed)
    found: list[str] = []
    for i, (one, other) in enumerate(zip(plain, trees, strict=True)):
        found += [
            f"{what} of request {i}"
            for what in ("tokens", "logits", "cache")
            if not np.array_equal(getattr(one, what), getattr(other, what))
        ]
        text = [other.text[:-1]]
        fresh = decode(weights, config, text, None, budget=0, mode="ar", max_new=1, eos=())
        if not np.array_equal(fresh[0].cache, other.cache):
            found.append(f"cache of request {i} from that of a fresh prefill")
    rounds = max(len(r.rounds) for r in trees)
    print(
        f"{name} budget {budget} {type(drafter).__name__} temperature {temperature}: "
        f"{rounds} rounds, {'differs: ' + ', '.join(found) if found else 'same bits'}",
        flush=True,
    )
    return found, rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundles", nargs="*", default=BUNDLES)
    parser.add_argument("--rounds", type=int, default=100, help="stop after so many")
    parser.add_argument("--new", type=int, default=64, help="tokens a request")
    options = parser.parse_args()
    done, run = 0, 0
    while done < options.rounds:
        name = options.bundles[run % len(options.bundles)]
        found, rounds = differences(name, Stream("soak", run), options.new)
        if found:
            return 1
        done, run = done + rounds, run + 1
    print(f"{done} rounds in {run} runs, every bit the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
