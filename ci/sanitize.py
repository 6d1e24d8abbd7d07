"""compute-sanitizer over every kernel: memcheck, racecheck, initcheck (and synccheck if asked).

    python -m ci.sanitize [--tool memcheck ...] [--spec NAME ...] [-n N]

Every kernel case that is small enough for the simulator is launched once on the GPU under each
tool, and its outputs are compared. Tensors have no guard bands there, and memcheck pads every
allocation, so that a read behind a tensor is an error; outputs and scratch are not initialised, so
that initcheck sees who reads them first. Processes share the GPU: a tool slows the host, not it.

Writes report/sanitize.json, which `kdtr gate --receipt` notes in the rows of these cases, and with
--receipt notes it itself. Exit 1 if a tool reports an error or a case does not pass, 2 if
compute-sanitizer (CUDA toolkit) is not there.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck")
OPTIONS = {"memcheck": ["--padding", "1024"]}  # bytes between allocations, which may not be read
FOUND = 86  # exit status of a tool that found something
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def small_cases(names: list[str]) -> list[str]:
    """Ids of the kernel cases that run under the tools; `names` are specs."""
    from harness.spec import discover, load

    specs = [load(path) for path in discover()]
    return [
        spec.case_id(case)
        for spec in specs
        if spec.stage == "kernel" and (not names or spec.stem in names)
        for case in spec.cases.values()
        if case.sim and case.gpus == 1 and not case.unsupported
    ]


# -- under the tool ------------------------------------------------------------------------------


def run_cases(ids: list[str]) -> None:
    """In a process under the tool: launch and compare each case, a JSON line each on stdout."""
    from harness.spec import load

    for case_id in ids:
        file, _, name = case_id.partition("::")
        spec = load(Path(file).absolute())
        started = time.monotonic()
        print(
            json.dumps({"id": case_id}), file=sys.stderr, flush=True
        )  # where the tool's lines are
        status, message = judge(spec, spec.cases[name])
        seconds = round(time.monotonic() - started, 2)
        row = {"id": case_id, "status": status, "message": message, "seconds": seconds}
        print(json.dumps(row), flush=True)


def judge(spec: Any, case: Any) -> tuple[str, str]:
    """Status and message of one launch, with nothing around the tensors and nothing in them."""
    from harness import golden, launch
    from harness.compare import Actual, compare
    from harness.report import Fault

    try:
        made = golden.make(spec, case)
        launcher = launch.load_launcher(spec)
        prepared = launch.Prepared(spec, case, made, guard=0)
        launcher(**prepared.arguments(launcher, second=False, poisoned=False))
        results = compare(spec, case, made, Actual(prepared.outputs(), prepared.device))
        prepared.free()
    except Fault as fault:
        return fault.status.value, fault.message
    except Exception as error:  # what the tool makes of a launch: the others must still run
        return "CRASHED", f"{type(error).__name__}: {error}"
    bad = [r for r in results if not r.status.ok]
    return (bad[0].status.value, f"{bad[0].output}: {bad[0].message}") if bad else ("PASSED", "")


# -- around it -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one tool said of its cases."""

    cases: list[str] = field(default_factory=list)  # that it saw and that passed
    failed: dict[str, str] = field(default_factory=dict)  # case -> why
    errors: int = 0  # that the tool counted
    seconds: float = 0.0  # of all its processes together
    text: list[str] = field(default_factory=list)  # its reports, where it found something

    @property
    def clean(self) -> bool:
        return not self.errors and not self.failed and bool(self.cases)


def under(sanitizer: str, tool: str, ids: list[str], outcome: Outcome) -> str:
    """Run `ids` in one process under `tool` and add what came of it to `outcome`; a line on it."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        command = [
            sanitizer, "--tool", tool, *OPTIONS.get(tool, []), "--log-file", log.name,
            "--error-exitcode", str(FOUND), sys.executable, "-m", "ci.sanitize", "--child", *ids,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        text = Path(log.name).read_text(errors="replace")
    rows = {r["id"]: r for line in done.stdout.splitlines() if (r := _row(line))}
    counts = [int(a or b) for a, b in ERRORS.findall(text)]
    errors = sum(counts)
    outcome.seconds += time.monotonic() - started
    outcome.errors += errors
    for case_id in ids:
        row = rows.get(case_id)
        if row is None:
            tail = " | ".join(done.stderr.splitlines()[-3:])
            outcome.failed[case_id] = f"no verdict, exit {done.returncode}: {tail}"[:500]
        elif row["status"] != "PASSED":
            outcome.failed[case_id] = f"{row['status']} {row['message']}".strip()
        else:
            outcome.cases.append(case_id)
    if errors or not counts or done.returncode:
        outcome.text.append(f"{tool} on {', '.join(ids)}: exit {done.returncode}\n{text[:6000]}")
        if not errors and rows.keys() == set(ids):
            outcome.failed[ids[0]] = f"{tool} ended with {done.returncode} without a summary"
    seconds = time.monotonic() - started
    return f"  {tool}: {len(rows)} of {len(ids)} cases ran, {errors} errors, {seconds:.0f} s"


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "status" in row else None


def chunks(ids: list[str], size: int) -> list[list[str]]:
    """At most `size` cases a process; those of one spec stay together, for they share kernels."""
    by_spec: dict[str, list[str]] = defaultdict(list)
    for case_id in ids:
        by_spec[case_id.partition("::")[0]].append(case_id)
    parts = [g[i : i + size] for g in by_spec.values() for i in range(0, len(g), size)]
    merged: list[list[str]] = []
    for part in sorted(parts, key=len, reverse=True):
        small = next((m for m in merged if len(m) + len(part) <= size), None)
        small.extend(part) if small else merged.append(list(part))
    return merged


def run_tools(sanitizer: str, tools: list[str], ids: list[str], workers: int) -> dict[str, Outcome]:
    """Every tool over every case, `workers` processes at a time. The slowest tool goes first.

    A process takes seconds of a core to start, as long as many cases: one a worker is enough.
    """
    size = -(-len(ids) * len(tools) // workers)
    found = {tool: Outcome() for tool in tools}
    order = sorted(tools, key=lambda t: t != "racecheck")
    with ThreadPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(under, sanitizer, tool, part, found[tool])
            for tool in order
            for part in chunks(ids, size)
        ]
        for job in as_completed(jobs):
            print(job.result(), flush=True)
    return found


def as_json(found: dict[str, Outcome], version: str, seconds: float) -> dict[str, Any]:
    """What report/sanitize.json holds: tools with counts, and the digest of each clean case."""
    from harness import sources
    from harness.devices import survey
    from harness.spec import discover, load

    gpu = next(iter(survey().gpus), None)
    digests = {
        f"{spec.id}::{name}": digest
        for spec in map(load, discover())
        for name, digest in sources.case_digests(spec).items()
    }
    clean: dict[str, dict[str, Any]] = {}
    for tool, outcome in found.items():
        for case_id in outcome.cases if outcome.clean else []:
            row = clean.setdefault(case_id, {"digest": digests[case_id], "tools": []})
            row["tools"].append(tool)
    return {
        "gpu": gpu.slug if gpu else "",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version,
        "seconds": round(seconds, 1),
        "tools": {
            tool: {
                "clean": o.clean, "cases": len(o.cases), "errors": o.errors, "failed": o.failed,
                "process_seconds": round(o.seconds, 1),
            }
            for tool, o in found.items()
        },
        "clean": clean,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", action="append", choices=(*TOOLS, "synccheck"))
    parser.add_argument("--spec", action="append", default=[], help="Only this spec. Repeatable.")
    parser.add_argument("-n", type=int, metavar="N", help="Processes (default: one a core)")
    parser.add_argument("--receipt", action="store_true", help="Note it in ci/receipts/GPU.json")
    parser.add_argument("--child", nargs="+", metavar="ID", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        run_cases(asked.child)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    from harness import receipts
    from harness.report import replace_file

    report = receipts.SANITIZED
    ids = small_cases(asked.spec)
    if not ids:
        print(f"no small kernel case in {', '.join(asked.spec)}", file=sys.stderr)
        return 2
    tools, workers = asked.tool or list(TOOLS), asked.n or os.cpu_count() or 1
    print(f"{len(ids)} cases under {', '.join(tools)}, {workers} processes", flush=True)
    started = time.monotonic()
    found = run_tools(sanitizer, tools, ids, workers)
    seconds = time.monotonic() - started
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    version = (re.findall(r"Version (\S+)", version) or [""])[0]
    written = as_json(found, version, seconds)
    replace_file(report, (json.dumps(written, indent=1) + "\n").encode())
    for tool, outcome in found.items():
        for text in outcome.text:
            print(text)
        for case_id, why in outcome.failed.items():
            print(f"{tool}: {case_id} {why}")
    for tool, outcome in found.items():
        state = "clean" if outcome.clean else f"{outcome.errors} errors"
        failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
        print(f"{tool}: {state}, {len(outcome.cases)} cases passed{failed}")
    print(f"{seconds:.0f} s; {report}")
    if asked.receipt:
        print(f"receipt: {receipts.note_sanitizer(Path.cwd(), written)} rows noted")
    return int(not all(outcome.clean for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
