"""The engine's decode loop in the simulator, where runs of the harness do not reach: what ends in
the middle of a batch, sampling, the end of the context, and what is refused. Bits, not bounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREAMBLE = """
import numpy as np
from engine.cache import CacheFull
from engine.decode import Decoder, decode
from engine.draft import Ngram, Replay
from goldens import bundles
from goldens.drafters import replay_table
from goldens.numerics import Stream

weights, config = bundles.tensors("micro-fp32"), bundles.config("micro-fp32")
prompts = [prompt[:4] for prompt in bundles.prompts("micro-fp32")[:2]]

def run(drafter, **settings):
    settings = {"budget": 2, "max_new": 4, "eos": (), "page_size": 4, **settings}
    return decode(weights, config, prompts, drafter, **settings)

def guesses(runs, *accuracy):
    tables = [
        replay_table(run.tokens, config["vocab_size"], 2, accuracy, Stream("engine", number))
        for number, run in enumerate(runs)
    ]
    return Replay([t[0] for t in tables], [t[1] for t in tables], [4, 4], 2)

def strict(alone, runs):
    for one, other in zip(alone, runs, strict=True):
        count = len(other.tokens)
        assert one.tokens[:count] == other.tokens
        assert np.array_equal(one.logits[:count], other.logits)
        assert np.array_equal(one.cache[:, : other.cache.shape[1]], other.cache)
        assert other.cache.shape[1] == len(other.text) - 1
"""


def simulated(script: str) -> None:
    environ = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_request_that_ends_in_the_middle_leaves_the_other_its_bits():
    simulated(
        """
alone = run(None, mode="ar")
runs = run(guesses(alone, 0.5, 0.5), max_new=[2, 4])
assert [len(r.tokens) for r in runs] == [2, 4]
assert any((np.diff(d.accepted) > 1).any() or d.accepted[-1] > 1 for r in runs for d in r.rounds)
strict(alone, runs)
"""
    )


def test_sampling_and_the_end_of_the_context_have_the_bits_of_one_at_a_time():
    simulated(
        """
alone = run(None, mode="ar", temperature=0.9, seed=4)
runs = run(guesses(alone, 1.0), temperature=0.9, seed=4, context=7)
assert [r.ended for r in runs] == ["context", "context"]
strict(alone, runs)
"""
    )


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('run(Ngram(2), mode="beam")', "ValueError"),
        ("run(Ngram(2), budget=-1)", "ValueError"),
        ("run(Ngram(2), budget=300)", "NotImplementedError"),
        ("run(Ngram(2), context=4)", "ValueError"),
        ("full()", "CacheFull"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(call, error):
    simulated(
        f"""
def full():
    decoder = Decoder(weights, config, Ngram(2), requests=2, budget=2, context=8, page_size=4)
    decoder.start([3, 4], [8, 800])
try:
    {call}
except {error}:
    pass
else:
    raise AssertionError("not refused")
"""
    )
