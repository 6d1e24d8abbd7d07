"""report.json -> exit code: 0 only if every case that the specs on disk call for ran and passed.

`kdtr gate` says the same of its own run. This asks the question of a file that somebody hands
over, with what is on disk now: a case that was added since, or that vanished, is a failure.

    python ci/gate.py report/report.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# The judge from this checkout, and the project's own kernels and oracles, wherever this is run.
sys.path[:0] = [str(Path.cwd()), str(Path(__file__).resolve().parents[1])]

from harness import merge, receipts, stages  # noqa: E402


def judge(path: Path, root: Path) -> list[str]:
    """What stands against the report; nothing means that it is a pass."""
    try:
        report = merge.read(path)
        specs = stages.load_specs(root)
        missing = stages.unjudged(report, specs)
    except (merge.MergeError, LookupError) as error:
        return [str(error)]
    against = [f"{c['id']} {c['status']}" for c in report["cases"] if not c["ok"]]
    against += [f"{each} has no verdict" for each in missing]
    if report["context"].get("sources") != receipts.sources_digest(specs):
        against.append("the report was made from other sources than the ones here")
    if any(case["replaced"] for case in report["cases"]):
        against.append("the report judges other kernels than the specs name")
    if not report["totals"]["passed"]:
        against.append("no case ran and passed")
    return against


def main(arguments: list[str]) -> int:
    """Judge the one report that is named on the command line."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    against = judge(Path(arguments[0]), Path.cwd())
    for line in against:
        print(f"FAILED {line}")
    totals = merge.read(arguments[0])["totals"] if not against else None
    print(f"{totals['passed']} passed, 0 failed" if totals else f"{len(against)} reasons to fail")
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
