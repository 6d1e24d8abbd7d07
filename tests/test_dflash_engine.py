"""The drafter on the device, in the simulator: what it refuses, and what it says of a fault."""

import os
import subprocess
import sys
from pathlib import Path

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

class Group:
    world, rank, captured = 1, 0, False

drafter = DFlash(weights, config)
class Split:
    model, requests = type("Model", (), {"group": Group()}), 1
with pytest.raises(NotImplementedError, match="split over ranks"):
    drafter.attach(Split())

decoder = Decoder(weights, config, drafter, requests=2, budget=1, context=8, page_size=4)
assert decoder.length == 3
decoder.prefill(1, [5, 6])
assert np.isfinite(drafter.context(1, 2).astype(np.float32)).all()
decoder.model.cache.reserve(0, 4)
assert np.isnan(drafter.context(0, 2).astype(np.float32)).all()  # only the prompt's own rows
with pytest.raises(DraftError, match="request 1, embedding, row 0: status 1"):
    drafter.draft([3, 10**6], [0, 2])
"""


def test_what_the_device_drafter_refuses_and_says():
    environ = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
