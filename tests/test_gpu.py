"""What only a GPU can show: lost contexts, hangs, foreign libraries. Each in its own process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import memory
from harness.report import Status

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(memory.simulated(), reason="needs a GPU, and this is the simulator")

SCRIPT = """
import dataclasses, json, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import numpy as np
from pathlib import Path
from broken.scale import SPEC, scale
from harness import report, run, spec

path = Path({folder!r}) / "specs" / "scale.toml"
path.parent.mkdir()
path.write_text(SPEC.replace("sim = true", "sim = true, timeout_s = 2"){changes})
loaded = spec.load(path)

{launcher}

for each in ({launchers}):
    verdict = run.run_case(loaded, loaded.cases["small"], kernel=each, cache_dir=path.parent)
    print(json.dumps([verdict.status, verdict.lost, report.failure_text(verdict)]), flush=True)
os._exit(0)  # a lost context cannot be taken down
"""


@pytest.fixture
def judge(tmp_path):
    """judge(source, launchers) runs the launchers in a new process; their [status, lost, text]."""

    def judge(launcher, launchers="f,", changes=""):
        script = SCRIPT.format(
            root=str(HERE.parent), tests=str(HERE), folder=str(tmp_path), launcher=launcher,
            launchers=launchers, changes=changes,
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return judge


KERNEL = """
from numba import cuda

@cuda.jit
def kernel(x, y):
    i = cuda.grid(1)
    {body}

def f(x, *, factor, y):
    kernel[1, 32](x.view(np.uint32).reshape(24), y.view(np.uint32).reshape(24))
"""


def test_a_hanging_kernel_is_timed_out_and_the_context_given_up(judge):
    """An atomic that never changes: a loop that the compiler cannot drop."""
    hang = "\n    ".join(["while cuda.atomic.add(y, 0, 0) != 1:", "    pass"])
    ((status, lost, text),) = judge(KERNEL.format(body=hang))
    assert (status, lost) == (Status.TIMEOUT, True), text


def test_an_illegal_address_is_a_crash_that_loses_the_context(judge):
    wild = "y[i + (1 << 40)] = x[0]"
    (status, lost, text), (after, still_lost, _) = judge(KERNEL.format(body=wild), "f, scale")
    assert (status, lost) == (Status.CRASHED, True), text
    assert (after, still_lost) == (Status.CRASHED, True)


def test_a_write_into_the_guard_band_costs_nothing_but_the_verdict(judge):
    stray = "y[i] = x[i] if i < 24 else 7"
    (status, lost, text), (after, *_) = judge(KERNEL.format(body=stray), "f, scale")
    assert (status, lost) == (Status.OUT_OF_BOUNDS, False), text
    assert "behind the end of y: 8 elements, first at end + 0" in text
    assert after == Status.PASSED


def test_a_missing_launch_is_seen(judge):
    ((status, _, _),) = judge("def f(x, *, factor, y): pass")
    assert status == Status.UNWRITTEN


def test_a_write_on_another_stream_is_waited_for(judge):
    other = """
from numba import cuda
def f(x, *, factor, y):
    stream = cuda.stream()
    y.copy_to_device(x.copy_to_host() * np.float32(factor), stream=stream)
"""
    ((status, _, text),) = judge(other)
    assert status == Status.PASSED, text


def test_a_torch_launcher_gets_the_same_arrays(judge):
    pytest.importorskip("torch", reason="no torch here")
    foreign = """
import torch
def f(x, *, factor, y):
    x, y = torch.as_tensor(x, device="cuda"), torch.as_tensor(y, device="cuda")
    y.copy_(x * factor)
"""
    ((status, _, text),) = judge(foreign)
    assert status == Status.PASSED, text


def test_bfloat16_reaches_torch_as_its_bits(judge):
    """The example of specs/README.md."""
    pytest.importorskip("torch", reason="no torch here")
    foreign = """
import torch
def f(x, *, factor, y):
    x = torch.as_tensor(x, device="cuda")
    y = torch.as_tensor(y.view("int16"), device="cuda").view(torch.bfloat16)
    y.copy_(x * factor)
"""
    bfloat16 = """.replace('dtype = "float32", match', 'dtype = "bfloat16", match')"""
    ((status, _, text),) = judge(foreign, changes=bfloat16)
    assert status == Status.PASSED, text
