"""A project of its own in a temporary folder: two small specs, an oracle, good and bad kernels.

The commands run in processes of their own, as a user would call them, and see nothing of the
session that tests them.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from harness import stages

ROOT = Path(__file__).resolve().parents[1]

SPEC = """
    stage = "{stage}"
    kernel = "mine.twice:twice"
    reference = "mine.oracle"
    [inputs]
    x = {{ shape = ["n"], dtype = "int32" }}
    [outputs]
    y = {{ shape = ["n"], dtype = "int32", match = "exact" }}
    [cases]
"""
CASES = """
    five = { n = 5, sim = true }
    odd = { n = 33, sim = true }
    big = { n = 1000000 }
"""
ORACLE = """
    def inputs(rng, *, n):
        return {"x": rng.integers(1, 1000, (n,)).astype("int32")}

    def reference(*, x):
        return {"y": x.astype("int64") * 2}
"""
# Launchers of one kernel. The bad ones are bad for n = 5 alone.
KERNELS = """
    import os, signal, time
    from pathlib import Path

    from numba import cuda

    @cuda.jit
    def _twice(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = 2 * x[i]

    def twice(x, *, y):
        _twice[(x.size + 31) // 32, 32](x, y)

    def wrong(x, *, y):
        _twice[2, 32](x, y)
        if x.size == 5:
            y[4] = 0

    def dies(x, *, y):
        if x.size == 5:
            os.abort()
        twice(x, y=y)

    def hangs(x, *, y):
        if x.size == 5:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(60)
        twice(x, y=y)

    def refuses(x, *, y):
        if x.size == 5:
            raise NotImplementedError("n = 5 is not supported")
        twice(x, y=y)

    def tells(x, *, y):
        with Path("told").open("a") as file:
            print(os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), x.size, file=file)
        if Path("die").exists():
            time.sleep(0.2)  # so that a replacement finds work left
            dies(x, y=y)
        twice(x, y=y)
"""
SHORT = """
    from harness import seat
    seat.GRACE_S = 0.5
"""


class Project:
    """A folder with specs; `gate` and `pytest` run there and return the finished process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.write("mine/__init__.py", "")
        self.write("mine/oracle.py", ORACLE)
        self.write("mine/twice.py", KERNELS)
        self.spec("twice")
        self.environ = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTEST_", "KDTR_", "NUMBA_", "CUDA_VISIBLE"))
        }
        self.environ |= {
            "PYTHONPATH": str(ROOT),
            "KDTR_LOCK_DIR": str(folder / "locks"),
            "OMP_NUM_THREADS": "1",
        }

    def write(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def spec(self, stem: str, *, stage: str = "kernel", cases: str = CASES) -> Path:
        return self.write(f"specs/{stem}.toml", SPEC.format(stage=stage) + cases)

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )

    def kdtr(self, *arguments: str) -> subprocess.CompletedProcess:
        return self.run("-m", "harness.cli", *arguments)

    def gate(self, *arguments: str, workers: int = 0) -> subprocess.CompletedProcess:
        return self.kdtr("gate", "-n", str(workers), *arguments)

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess:
        ours = ("-p", "no:hypothesispytest", *stages.plugin_arguments())  # that one is slow to end
        return self.run("-m", "pytest", *ours, *arguments)

    def report(self, folder: str = "report") -> dict:
        return json.loads((self.folder / folder / "report.json").read_text())

    def statuses(self, folder: str = "report") -> dict[str, str]:
        """Case name -> status; the spec's stem before it where there are several specs."""
        cases = self.report(folder)["cases"]
        several = len({c["spec"] for c in cases}) > 1
        return {f"{c['spec']}.{c['case']}" if several else c["case"]: c["status"] for c in cases}
