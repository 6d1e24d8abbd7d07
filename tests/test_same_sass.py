"""What ci/same_sass.py says of kernels whose source changed."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ci.same_sass import compare, sections

ROOT = Path(__file__).parents[1]
KERNEL = """
from engine.device import cuda, f32, kernel, ptr, u32

@kernel(threads=32, registers=32)
def {name}({x}: ptr[f32]):
    {i} = u32(cuda.threadIdx.x)
    {x}[{i}] = {x}[{i}] * f32({factor})
"""
SOURCES = {
    "before": {"name": "scaled", "x": "x", "i": "i", "factor": 0.5},
    "other_names": {"name": "scaled", "x": "values", "i": "thread", "factor": 0.5},
    "other_entry": {"name": "halved", "x": "x", "i": "i", "factor": 0.5},
    "other_code": {"name": "scaled", "x": "x", "i": "i", "factor": 0.25},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(cubin, entry) of each source, compiled offline in a process of its own."""
    folder = tmp_path_factory.mktemp("kernels")
    for file, words in SOURCES.items():
        (folder / f"{file}.py").write_text(KERNEL.format(**words))
    code = (
        "import pickle; from pathlib import Path; from ci.same_sass import compiled;"
        "from engine.compile_gate import jobs;"
        f"rows = {{j.module: compiled(j)[1:] for j in jobs({list(SOURCES)}, ['sm_90a'])}};"
        "Path('made').write_bytes(pickle.dumps(rows))"
    )
    environment = {**os.environ, "KDTR_CACHE": str(folder), "PYTHONPATH": f"{ROOT}:{folder}"}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
    return pickle.loads((folder / "made").read_bytes())


def test_other_names_in_the_source_are_the_same_code(made):
    assert any(name.startswith(".text") for name in sections(*made["before"]))
    assert list(compare({"k": made["before"]}, {"k": made["other_names"]}, show=False)) == []


def test_a_kernel_that_is_called_otherwise_is_found_by_its_bytes(made):
    said = list(compare({"old": made["before"]}, {"new": made["other_entry"]}, show=False))
    assert said == ["new: the same code as old was"]


def test_another_constant_differs_and_is_shown(made):
    first, *shown = compare({"k": made["before"]}, {"k": made["other_code"]}, show=True)
    assert first.startswith("k: DIFFERS in .text.kernel; registers ")
    assert first.endswith("the same number of each instruction")
    changed = [line for line in shown if line.startswith("+") and "FMUL" in line]
    assert len(changed) == 1
    assert "0.25" in changed[0]


def test_a_kernel_that_came_or_went_is_no_match(made):
    both = {"k": made["before"], "gone": made["other_code"]}
    assert list(compare(both, {"k": made["before"]}, show=False)) == ["gone: GONE"]
    assert list(compare({"k": made["before"]}, both, show=False)) == ["gone: NEW"]
