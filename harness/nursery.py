"""Cases judged in processes of their own, with one module's source replaced.

A job names a spec, cases in order, and optionally a module and the file to import in its place. It
ends at the first case that does not pass. In the simulator one process keeps Numba loaded and forks
a child a job, because a fresh interpreter would cost more than most cases; nothing of engine,
goldens or the project under judgement is ever imported before the fork. On a GPU every job is a new
interpreter: a context does not survive a fork.

    python -m harness.nursery         # jobs as JSON lines on stdin, results on stdout
    python -m harness.nursery --once  # one job, in this process
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from harness.mutants import REACHED
from harness.report import Fault, Status, told

MEMORY = 16 << 30  # bytes of address space of a job in the simulator

# What a compiler would have refused: no verdict on a kernel that runs.
_DO_NOT_COMPILE = (NameError, AttributeError, TypeError, SyntaxError, ImportError)


class _Overlay(importlib.abc.MetaPathFinder):
    """Imports one module from another file."""

    def __init__(self, module: str, file: str):
        self.module, self.file = module, file

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """{"runs": one entry a case that was judged, "flaw": why the module is no program, or ""}."""
    from harness import spec as specs

    sys.dont_write_bytecode = True
    reached: set[int] = set()
    if job["cover"]:
        setattr(builtins, REACHED, reached.add)
    found: dict[str, Any] = {"runs": [], "flaw": ""}
    if module := job["module"]:
        if module in sys.modules:
            return {"runs": [], "flaw": f"INVALID: {module} was imported before it was replaced"}
        sys.meta_path.insert(0, _Overlay(module, job["file"]))
        try:
            importlib.import_module(module)
        except Exception as error:
            found["flaw"] = f"INVALID: it cannot be imported: {told(error)}"
            return found
    spec = specs.load(job["spec"])
    for name in job["cases"]:
        start = time.process_time()
        entry = _judge(spec, spec.cases[name], job["limits"].get(name), once=job["cover"])
        found["flaw"] = entry.pop("flaw")
        entry["seconds"] = round(time.process_time() - start, 3)
        entry["reached"] = sorted(reached)
        found["runs"].append(entry)
        if not entry["ok"]:
            break
    return found


def _judge(spec: Any, case: Any, limit_s: float | None, *, once: bool = False) -> dict[str, Any]:
    """once: one run is enough, because it is the gate that judges the kernel as it is."""
    from harness import compare, golden, memory, run

    flaw, headroom, excess, message = "", None, None, ""
    if not memory.simulated() and limit_s:
        case = replace(case, timeout_s=limit_s)
    try:
        made = None if spec.stage == "golden" else golden.make(spec, case)
        with _processor_time(limit_s):
            if made is None:
                made = golden.build(spec, case)
                actual = run.witness(spec, case, made)
            else:
                enough = (lambda _: True) if once else partial(_wrong, spec, case, made)
                actual = run.execute(spec, case, made, enough=enough)
            verdict = run.judged(_blank(spec, case), compare.compare(spec, case, made, actual))
            status, headroom = verdict.status, verdict.headroom
            wrong = [r.output for r in verdict.outputs if r.status is Status.WRONG]
            if wrong and all(spec.outputs[name].match.kind != "exact" for name in wrong):
                excess = _excess(spec, case, made, actual)  # else no bound judged what killed it
            said = [r.message for r in verdict.outputs if not r.status.ok]
            message = said[0] if said else ""
    except Fault as fault:
        status, message, cause = fault.status, fault.message, fault.__cause__
        if isinstance(cause, _DO_NOT_COMPILE) or _of_numba(cause):
            flaw = f"INVALID: {told(cause)}" if cause else ""
    return {
        "case": case.name,
        "ok": status.ok,
        "status": status.value,
        "headroom": None if headroom is None else str(headroom),
        "excess": None if excess is None else str(excess),
        "message": message[:300],
        "flaw": flaw,
    }


def _wrong(spec: Any, case: Any, made: Any, actual: Any) -> bool:
    """A mutant that one run shows is dead: the second would cost as much and add nothing."""
    from harness import compare

    return any(not r.status.ok for r in compare.compare(spec, case, made, actual))


def _excess(spec: Any, case: Any, made: Any, actual: Any) -> float | None:
    """The worst error over the bound of the outputs that are wrong; infinite where equality is
    asked. Where the case is exact, the bound is the one that it would have had, for its sizes and
    magnitudes."""
    from harness import compare, golden

    if case.exact:
        case = replace(case, exact=False)
        wanted = [o.name for o in spec.outputs.values() if golden.needs_magnitude(o, case)]
        returned = golden.reference(spec, case, made)
        if any(f"{name}.magnitude" not in returned for name in wanted):
            return None
        made = replace(made, magnitudes={n: returned[f"{n}.magnitude"] for n in wanted})
    results = compare.compare(spec, case, made, actual)
    if any(r.headroom is None and not r.status.ok for r in results):
        return float("inf")
    return max((r.headroom for r in results if r.headroom is not None), default=None)


def _of_numba(error: BaseException | None) -> bool:
    kind = type(error)
    return kind.__module__.startswith("numba") and kind.__name__ != "CudaAPIError"


def _blank(spec: Any, case: Any) -> Any:
    from harness.report import Verdict

    return Verdict(spec.case_id(case), spec.stage, spec.stem, case.name, Status.PASSED, "")


@contextlib.contextmanager
def _processor_time(limit_s: float | None) -> Iterator[None]:
    """Raise Fault(TIMEOUT) in a block that computes longer; a busy machine does not count."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Fault(Status.TIMEOUT, f"it was not done after {limit_s:g} s of processor time")

    if limit_s is None or not hasattr(signal, "SIGPROF"):
        yield
        return
    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# -- the process -----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Serve jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # what a mutant prints is no answer
    if "--once" in arguments:
        print(json.dumps(run_job(json.loads(sys.stdin.readline()))), file=answers, flush=True)
        return 0
    import ml_dtypes  # noqa: F401
    import numba.cuda  # noqa: F401
    import safetensors.numpy  # noqa: F401

    from harness import compare, golden, run  # noqa: F401

    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        for line in sys.stdin:
            print(json.dumps(_in_a_child(json.loads(line))), file=answers, flush=True)
    return 0


def _in_a_child(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, judge, and kill what hangs without computing."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(here)
            _limit_memory()
            answer = json.dumps(run_job(job)).encode()
            with os.fdopen(there, "wb") as file:
                file.write(answer)
            code = 0
        finally:
            os._exit(code)
    os.close(there)
    text, end = b"", time.monotonic() + 60 + 20 * sum(job["limits"].values())
    with os.fdopen(here, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
            part = file.read(1 << 16)
            if not part:
                break
            text += part
        else:
            os.kill(child, signal.SIGKILL)
    _, code = os.waitpid(child, 0)
    try:
        return json.loads(text)
    except ValueError:
        killed = os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGKILL
        status = Status.TIMEOUT if killed else Status.CRASHED
        message = f"its process ended with {os.waitstatus_to_exitcode(code)} and no verdict"
        return lost(job, status, message)


def lost(job: dict[str, Any], status: Status, message: str) -> dict[str, Any]:
    """The result of a job whose process is gone: charged to its first case."""
    run = {
        "case": job["cases"][0], "ok": False, "status": status.value, "headroom": None,
        "excess": None, "message": message, "seconds": 0.0, "reached": [],
    }  # fmt: skip
    return {"runs": [run], "flaw": ""}


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
