"""compute-sanitizer over every kernel: memcheck, racecheck, initcheck (and synccheck if asked).

    python -m ci.sanitize [--tool memcheck ...] [--spec NAME ...]

The cases that are small enough for the simulator run once on the GPU under each tool, all of them
in one process a tool; outputs are still compared. Exit 1 if a tool reports an error or a case does
not pass, 2 if compute-sanitizer (CUDA toolkit) is not there.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND = 86  # exit status of a tool that found something


def run_cases(names: list[str]) -> int:
    """Under the tool: every small kernel case, one line each. Returns how many did not pass."""
    from harness.run import run_case
    from harness.spec import discover, load

    failed = 0
    for path in discover():
        spec = load(path)
        if spec.stage != "kernel" or (names and spec.stem not in names):
            continue
        for case in spec.cases.values():
            if case.sim and not case.unsupported:
                verdict = run_case(spec, case)
                failed += verdict.status != "PASSED"
                print(f"{verdict.id} {verdict.status} {verdict.message}".rstrip(), flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", action="append", choices=(*TOOLS, "synccheck"))
    parser.add_argument("--spec", action="append", default=[], help="Only this spec. Repeatable.")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return min(run_cases(asked.spec), 1)
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    results = {}
    for tool in asked.tool or TOOLS:
        specs = [word for name in asked.spec for word in ("--spec", name)]
        child = [sys.executable, "-m", "ci.sanitize", "--child", *specs]
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *child]
        print("$", " ".join(command), flush=True)
        results[tool] = subprocess.run(command, check=False).returncode
    for tool, status in results.items():
        print(f"{tool}: {'clean' if not status else f'exit {status}'}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
