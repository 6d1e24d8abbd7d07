"""Makes goldens in parallel while a bench runs: `python -m harness.bench_goldens < ids`.

They go through the cache, whose locks let the bench wait for one that is being made. Compiles
nothing and sees no GPU.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness import golden, spec
from harness.report import Fault


def make(case_id: str) -> None:
    """Into the cache; what is wrong with the oracle is said by whoever runs the case."""
    path, _, name = case_id.partition("::")
    try:
        judged = spec.load(Path(path))
        golden.make(judged, judged.cases[name])
    except (Fault, spec.SpecError):
        pass


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    ids = sys.stdin.read().split()
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        list(pool.map(make, ids))


if __name__ == "__main__":
    main()
