"""What the loop of the engine refuses, in the simulator. Specs of stage decode say what it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREAMBLE = """
from engine.cache import CacheFull
from engine.decode import Decoder, decode
from engine.draft import Ngram
from goldens import bundles

weights, config = bundles.tensors("micro-fp32"), bundles.config("micro-fp32")
prompts = [prompt[:4] for prompt in bundles.prompts("micro-fp32")[:2]]

def run(drafter, **settings):
    settings = {"budget": 2, "max_new": 4, "eos": (), "page_size": 4, **settings}
    return decode(weights, config, prompts, drafter, **settings)
"""


def simulated(script: str) -> str:
    environ = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


REFUSED = {
    'run(Ngram(2), mode="beam")': "ValueError",
    "run(Ngram(2), budget=-1)": "ValueError",
    "run(Ngram(2), budget=300)": "NotImplementedError",
    "run(Ngram(2), context=4)": "ValueError",
    "full()": "CacheFull",
}


@pytest.fixture(scope="module")
def raised():
    """What each call of REFUSED raises, in one process."""
    return simulated(
        f"""
def full():
    decoder = Decoder(weights, config, Ngram(2), requests=2, budget=2, context=8, page_size=4)
    decoder.start([3, 4], [8, 800])

for call in {list(REFUSED)}:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("not refused")
"""
    ).splitlines()


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_be_is_refused_before_anything_runs(raised, call):
    assert dict(zip(REFUSED, raised, strict=True))[call] == REFUSED[call]


def test_prompts_of_many_lengths_share_a_graph_and_keep_their_bits():
    simulated(
        """
import numpy as np
from engine.device import to_host
from engine.model import Tree

decoder = Decoder(weights, config, Ngram(2), requests=2, budget=2, context=11, page_size=4)
model, text = decoder.model, [7, 3, 9, 4, 8, 1]
before = len(model._plans)
padded = [decoder.prefill(request, text[:count]) for request, count in ((1, 6), (0, 5), (1, 5))]
assert len(model._plans) == before + 1
for (token, logits), count in zip(padded, (6, 5, 5)):
    model.release(0)
    plan = model.forward([Tree.chain(text[:count])])
    plan.check()
    assert len(to_host(plan.logits)) == count
    assert np.array_equal(to_host(plan.logits)[-1], logits)
    assert to_host(plan.token)[-1] == token
"""
    )
