"""Do the goldens come out the same elsewhere? Other numpys, BLAS threads, BLAS and CPU kernels.

    python -m ci.drift [--numpy 2.1 ...] [NAME ...]

Runs `kdtr golden verify --sim` (of the specs of these names) under each numpy, and there with one
BLAS thread and two, with OpenBLAS's kernels for another CPU, and without numpy's AVX-512 loops. A
run counts only if numpy says that it has that version and OpenBLAS that it has these threads and
kernels. Exit 1 if a golden moves by more than its declared drift, or a run does not count.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUMPYS = ("2.1", "2.3", "2.4")
AVX512 = "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
# What is set, and the end of what OpenBLAS then says of itself.
# What is set, and what numpy and OpenBLAS then say of themselves. None: as they come.
SETTINGS: dict[str, tuple[dict[str, str], str | None, str]] = {
    "one BLAS thread": ({"OPENBLAS_NUM_THREADS": "1"}, None, ", 1 thread"),
    "two BLAS threads": ({"OPENBLAS_NUM_THREADS": "2"}, None, ", 2 threads"),
    "another CPU's BLAS": (
        {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"},
        None,
        "OpenBLAS Haswell, 1 thread",
    ),
    "a CPU without AVX-512": (
        {
            "OPENBLAS_NUM_THREADS": "1",
            "OPENBLAS_CORETYPE": "Nehalem",
            "NPY_DISABLE_CPU_FEATURES": AVX512,
        },
        "without AVX-512",
        "OpenBLAS Nehalem, 1 thread",
    ),
}
ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.drift", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="stems of specs; none: all")
    parser.add_argument("--numpy", action="append", metavar="X.Y", help=f"default {NUMPYS}")
    options = parser.parse_args(argv)
    bad = []
    with tempfile.TemporaryDirectory(prefix="kdtr-drift-") as folder:
        for version in options.numpy or NUMPYS:
            place = Path(folder, version)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", place, f"numpy=={version}.*"], check=True)
            for name, (setting, features, expected) in SETTINGS.items():
                start = time.monotonic()
                environ = surroundings(place, setting)
                says = inside(["-W", "ignore", "-m", "ci.drift_says"], environ)
                said = says.stdout.strip() or says.stderr.strip()
                good = said.startswith(f"numpy {version}.") and said.endswith(expected)
                good = good and (features or "") in said
                done = inside(["-W", "ignore", "-m", "harness.cli", "golden", "verify", "--sim",
                               *options.names], environ)  # fmt: skip
                last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
                print(f"{said} ({name}): {last}, {time.monotonic() - start:.0f} s", flush=True)
                if done.returncode:
                    print(done.stdout, done.stderr, flush=True)
                if done.returncode or not good:
                    bad.append(f"numpy {version}, {name}")
    for each in bad:
        print(f"FAILED {each}")
    return 1 if bad else 0


def surroundings(place: Path, setting: dict[str, str]) -> dict[str, str]:
    """This environment, with the numpy in `place` before all others, and `setting`."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("OPENBLAS", "OMP_", "NPY_"))}
    return {**kept, **setting, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}


def inside(arguments: list, environ: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, text=True, capture_output=True
    )


if __name__ == "__main__":
    sys.exit(main())
