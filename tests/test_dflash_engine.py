"""The drafter on the device, in the simulator: what it refuses and says, and that it has ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import numpy as np
import pytest
from engine.decode import Decoder
from engine.dflash import DFlash, DraftError
from goldens import bundles

name = "micro-fp32-dflash"
weights, config = bundles.tensors(name), bundles.config(name)

with pytest.raises(ValueError, match="no drafter"):
    DFlash(weights, bundles.config("micro-fp32"))

drafter = DFlash(weights, config)
decoder = Decoder(weights, config, drafter, requests=2, budget=1, context=8, page_size=4)
assert decoder.length == 3
decoder.prefill(1, [5, 6])
assert np.isfinite(drafter.context(1, 2).astype(np.float32)).all()
decoder.model.cache.reserve(0, 4)
assert np.isnan(drafter.context(0, 2).astype(np.float32)).all()  # only the prompt's own rows
with pytest.raises(DraftError, match="request 1, embedding, row 0: status 1"):
    drafter.draft([3, 10**6], [0, 2])
"""
RANKS = """
import numpy as np
from engine.decode import decode
from engine.dflash import DFlash
from engine.parallel import in_turns
from engine.ranks import decode_in_turns, decode_of_rank
from goldens import bundles

name = "micro-fp32-dflash"
weights, config = bundles.tensors(name), bundles.config(name)
settings = {"budget": 2, "max_new": 3, "eos": (), "page_size": 4}
(one,) = decode(weights, config, [[5, 6]], DFlash(weights, config), **settings)
(two,) = decode_in_turns(2, weights, config, [[5, 6]], "dflash", **settings)
assert one.tokens == two.tokens
assert np.array_equal(one.logits, two.logits)
for mine, its in zip(one.rounds, two.rounds, strict=True):
    assert np.array_equal(mine.tokens, its.tokens)  # the drafts are the same bits too

# as a process of its own does it: --tp 2
model, settings = (weights, config), settings | {"max_new": 1}
((runs, _, _),) = in_turns(1, lambda g: decode_of_rank(g, model, [[5, 6]], "dflash", settings))
assert runs[0].tokens == one.tokens[:1]
"""


@pytest.mark.parametrize("script", [SCRIPT, RANKS], ids=["refusals", "ranks"])
def test_the_device_drafter(script):
    environ = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
