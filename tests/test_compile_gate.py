"""The compile gate must see each fault that it is there for."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engine import compile_gate

HEADER = """
from engine.device import cuda, f32, kernel, ptr, static_range, u32
"""

FAULTY = {
    "a bare literal next to a float32": (
        "64-bit floating point",
        """
        @kernel(threads=32)
        def planted(x: ptr[f32]):
            x[u32(cuda.threadIdx.x)] = x[u32(cuda.threadIdx.x)] * 0.1 + 0.3
        """,
    ),
    "a local array with a run-time index": (
        "local-memory instructions",
        """
        @kernel(threads=32)
        def planted(x: ptr[f32], where: ptr[u32], n: u32):
            a = cuda.local.array(64, f32)
            for i in static_range(64):
                a[i] = f32(i)
            j = u32(0)
            while j < n:
                a[u32(where[j] & u32(63))] = x[j]
                j = u32(j + u32(1))
            for i in static_range(64):
                x[u32(i)] = a[i]
        """,
    ),
    "too many registers": (
        "registers, ceiling 8",
        """
        @kernel(threads=32, registers=8)
        def planted(x: ptr[f32], y: ptr[f32]):
            i = u32(cuda.threadIdx.x)
            y[i] = x[i] + x[u32(i + u32(32))] + x[u32(i + u32(64))]
        """,
    ),
    "a claim that is not in the machine code": (
        "no HMMA",
        """
        @kernel(threads=32, sass=("HMMA",))
        def planted(x: ptr[f32]):
            x[u32(cuda.threadIdx.x)] = f32(1)
        """,
    ),
    "more shared memory than there is": (
        "232449 B of shared memory, a block may have 232448",
        """
        @kernel(threads=32, registers=32, dynamic_shared=227 * 1024 + 1)
        def planted(x: ptr[f32]):
            x[u32(cuda.threadIdx.x)] = cuda.shared.array(0, f32)[u32(cuda.threadIdx.x)]
        """,
    ),
    "source that Numba cannot compile": (
        "does not compile",
        """
        @kernel(threads=32)
        def planted(x: ptr[f32]):
            x[u32(0)] = undefined_name
        """,
    ),
}
SOUND = """
@kernel(threads=32, registers=32)
def planted(x: ptr[f32]):
    x[u32(cuda.threadIdx.x)] = x[u32(cuda.threadIdx.x)] * f32(0.1)
"""


def judge(tmp_path, source):
    """Rows of the gate for one planted kernel file, compiled in a fresh process."""
    (tmp_path / "planted_kernel.py").write_text(HEADER + textwrap.dedent(source))
    code = (
        "import json; from dataclasses import asdict; from engine.compile_gate import *;"
        "rows = map(inspect_job, jobs(['planted_kernel'], ['sm_90a']));"
        "print(json.dumps([asdict(r) for r in rows]))"
    )
    environment = {**os.environ, "KDTR_CACHE": str(tmp_path / "cache")}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    return row


@pytest.mark.parametrize("fault", FAULTY)
def test_planted_fault_is_named(tmp_path, fault):
    expected, source = FAULTY[fault]
    assert expected in "; ".join(judge(tmp_path, source)["faults"])


def test_sound_kernel_passes(tmp_path):
    row = judge(tmp_path, SOUND)
    assert row["faults"] == []
    assert row["registers"] > 0


AT_ONCE = """
import sys, time
from pathlib import Path
from engine.device import Kernel
from planted_kernel import planted

def slowly(self, arch, compile=Kernel._compile):
    with open(sys.argv[1], "a") as log:
        log.write("compiled\\n")
    time.sleep(1)
    return compile(self, arch)

Kernel._compile = slowly
code, name = planted.cubin("sm_90a")
print(name, len(code))
"""


def test_processes_that_want_one_kernel_compile_it_once(tmp_path):
    (tmp_path / "planted_kernel.py").write_text(HEADER + textwrap.dedent(SOUND))
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    environment = {**os.environ, "KDTR_CACHE": str(tmp_path / "cache")}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    command = [sys.executable, str(tmp_path / "at_once.py"), str(tmp_path / "log")]
    at_once = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate()[0] for process in at_once}
    assert [process.returncode for process in at_once] == [0, 0, 0]
    assert len(said) == 1
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_a_kernel_file_that_is_imported_counts_in_the_cache_key(tmp_path):
    from engine import device

    file = tmp_path / "mine.py"
    file.write_text("from engine.kernels.argmax import argmax\n")
    argmax = Path(device.__file__).parent / "kernels" / "argmax.py"
    assert set(device._with_imports(file)) >= {file.read_text(), argmax.read_text()}


def test_unknown_kernel_is_an_error(capsys, monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    assert compile_gate.main(["no_such_kernel"]) == 2
    assert "no_such_kernel" in capsys.readouterr().out


def test_simulator_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert compile_gate.main([]) == 2
    assert "simulator" in capsys.readouterr().out
