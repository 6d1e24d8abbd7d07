"""`kdtr fuzz`: cases drawn inside a spec's [fuzz] table, judged as the gate judges, made small.

Hypothesis draws and shrinks. Workers are processes that are given a spec at a time and say which
case they are about to judge, so that one that hangs, dies or loses its GPU costs that spec's search
and no other's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import devices
from harness.spec import Case, Range, Spec, load

EXAMPLES = 12  # of each spec, if neither a number nor a time is asked for
SHRINK_S = 30.0  # at most, for a failing case
CASE_S = {"sim": 300.0, "cuda": 60.0}  # limit of each launch
GRACE_S = 30.0  # a worker that takes so much longer than two launches may is ended
# A signal that comes just before a wait begins does not end the wait: so that Ctrl-C is heard.
LOOK_S = 0.2
BATCH = 9  # cases a run of hypothesis: it spends larger runs on variations of what it has drawn
DRAWS = 1 << 16  # different random inputs for the same axes and options
CONSTANT = "drawn by kdtr fuzz"


@dataclass
class Outcome:
    """What came of one spec. `case` is the failing one, as a line of [cases]; "" if none failed."""

    spec: str  # stem
    drawn: int = 0
    judged: int = 0
    refused: int = 0  # the launcher said NotImplementedError
    seconds: float = 0.0
    seen: dict[str, str] = field(default_factory=dict)  # what was drawn of each name, in words
    case: str = ""
    status: str = ""
    text: str = ""  # the failure, as the gate prints it
    again: str = ""  # the command that finds it again

    @property
    def ok(self) -> bool:
        return not self.case and not self.text and self.judged > 0


# -- one spec, in this process ---------------------------------------------------------------------


class _Failed(Exception):
    """The case that was just judged failed; hypothesis makes it smaller."""


class _Enough(BaseException):
    """The budget is spent. Not an Exception, which hypothesis would take for a failing case."""


def explore(
    spec: Spec,
    *,
    device: str,
    seed: int,
    examples: int | None = None,
    seconds: float | None = None,
    kernel: Any = None,
    shared: str = "",
    tell: Callable[[str], None] = lambda case: None,
) -> Outcome:
    """Draw and judge until `examples` cases or `seconds` are used up, or one fails.

    `tell` gets every case before it is judged, as TOML. The same seed draws the same cases.
    `shared` are the UUIDs of GPUs on which other workers take turns with this one.
    """
    import hypothesis
    from hypothesis.internal.conjecture import providers

    # Hypothesis mixes literals from whatever modules are loaded into what it draws, and has no
    # setting for that: the same seed would draw other cases after other specs.
    vars(providers)["is_local_module_file"] = lambda path: False

    search = _Search(spec, device == "sim", kernel, tell)
    if shared:
        search.turn = lambda: devices.turn(shared)
    start = time.monotonic()
    search.seconds = math.inf if seconds is None else seconds
    search.left = DRAWS if examples is None else examples
    settings = hypothesis.settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    batch = 0
    try:
        while True:
            drawn = hypothesis.given(strategy(spec, search.simulated))(search.attempt)
            hypothesis.seed(number(seed, batch))(settings(drawn))()
            batch += 1
    except (_Enough, _Failed):
        pass
    except hypothesis.errors.HypothesisException:  # a failure that does not always come
        if search.verdict is None:
            raise
    outcome = search.outcome(seed)
    outcome.seconds = time.monotonic() - start
    return outcome


def strategy(spec: Spec, simulated: bool) -> Any:
    """A hypothesis strategy for dictionaries: a value for each name in [fuzz], and the draw."""
    from hypothesis import strategies as st

    def of(range_: Range) -> Any:
        top = range_.sim if simulated and range_.sim is not None else math.inf
        if range_.values:
            return st.sampled_from([v for v in range_.values if isinstance(v, str) or v <= top])
        steps = (min(range_.hi, top) - range_.lo) // range_.step
        one = st.integers(0, int(steps)).map(lambda i: range_.lo + range_.step * i)
        if not range_.most:
            return one
        return st.lists(one, min_size=1, max_size=range_.most).map(lambda n: ",".join(map(str, n)))

    names = {name: of(range_) for name, range_ in spec.fuzz.items()}
    return st.fixed_dictionaries({**names, "draw": st.integers(1, DRAWS)})


def number(*parts: object) -> int:
    """64 bits that depend on all of `parts`."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


class _Search:
    """Judges what hypothesis draws, and remembers what for."""

    def __init__(self, spec: Spec, simulated: bool, kernel: Any, tell: Callable[[str], None]):
        self.spec, self.simulated, self.kernel, self.tell = spec, simulated, kernel, tell
        self.seconds, self.left = math.inf, 0
        self.deadline = math.inf  # the first case, which compiles, has no limit
        self.turn: Callable[[], Any] = contextlib.nullcontext
        self.known: set[str] = set()  # cases that passed
        self.judged = self.refused = 0
        self.values: dict[str, list[Any]] = {name: [] for name in spec.fuzz}
        self.case: Case | None = None  # the smallest that failed
        self.verdict: Any = None

    def attempt(self, values: dict[str, Any]) -> None:
        from harness import run

        if time.monotonic() > self.deadline or (self.verdict is None and self.left <= 0):
            raise _Enough
        case, fault = drawn_case(self.spec, values, self.simulated)
        text = paste(self.spec, case)
        if text in self.known:
            return
        self.tell(text)
        verdict = fault or run.run_case(
            self.spec, case, kernel=self.kernel, turn=self.turn, drawn=True
        )
        if self.deadline == math.inf:
            self.deadline = time.monotonic() + self.seconds
        if self.verdict is None:
            self.left -= 1
            for name, value in values.items():
                if name in self.values:
                    self.values[name].append(value)
        if verdict.ok:
            self.known.add(text)
            refused = verdict.status == "UNSUPPORTED"
            self.judged += not refused
            self.refused += refused
            return
        if self.verdict is None:
            self.judged += 1
            self.deadline = time.monotonic() + SHRINK_S
        elif verdict.status != self.verdict.status:  # another fault: not what is being made small
            return
        self.case, self.verdict = case, verdict
        if verdict.lost:  # nothing can be judged in this process any more
            raise _Enough
        raise _Failed

    def outcome(self, seed: int) -> Outcome:
        from harness import report

        drawn = self.judged + self.refused
        made = Outcome(self.spec.stem, drawn, self.judged, self.refused)
        made.seen = {n: in_words(v) for n, v in self.values.items() if v}
        if self.verdict is not None and self.case is not None:
            made.case, made.status = (
                paste(self.spec, declared(self.spec, self.case)),
                str(self.verdict.status),
            )
            lines = report.failure_text(self.verdict).splitlines()
            made.text = "\n".join(line for line in lines if not line.startswith("  again "))
            made.again = f"kdtr fuzz --spec {self.spec.stem} --seed {seed}"
            made.again += f" --examples {len(next(iter(self.values.values()), []))}"
            made.again += f" --device {'sim' if self.simulated else 'cuda'}"
            if self.kernel is not None:
                made.again += f" --kernel {self.verdict.kernel}"
        return made


def drawn_case(spec: Spec, values: Mapping[str, Any], simulated: bool) -> tuple[Case, Any]:
    """The case of drawn values, and the verdict on it if the oracle's `derived` already failed."""
    from harness import golden, report

    values = {**spec.defaults, "exact": False, **values}
    fault = None
    try:
        values |= golden.derived(spec, values)
    except report.Fault as error:
        fault = error
    axes = spec.axis_names()
    missing = axes - values.keys()
    if missing and fault is None:
        said = f"neither [fuzz] nor [axes] nor the oracle's derived() gives {sorted(missing)}"
        fault = report.Fault(report.Status.SPEC_ERROR, said)
    case = Case(
        "fuzz",
        {n: v for n, v in values.items() if n in axes},
        {n: v for n, v in values.items() if n in spec.scalars},
        {n: v for n, v in values.items() if n in spec.options},
        sim=simulated,
        exact=values["exact"],
        timeout_s=CASE_S["sim" if simulated else "cuda"],
        constant=CONSTANT,
        draw=values["draw"],
        weights=spec.weights,
    )
    case = replace(case, name=f"fuzz_{number(spec.stem, paste(spec, case)) >> 40:06x}")
    if fault is None:
        return case, None
    return case, report.Verdict(
        spec.case_id(case), spec.stage, spec.stem, case.name, fault.status, "none",
        message=fault.message, kernel=spec.kernel or "", reference=spec.reference,
    )  # fmt: skip


def declared(spec: Spec, case: Case) -> Case:
    """The case with `constant` only where its golden needs it, and without the name of the tool."""
    from harness import golden, report

    case = replace(case, constant=None)
    try:
        golden.build(spec, case)
    except report.Fault as fault:
        if fault.status is report.Status.VACUOUS:
            return replace(case, constant=fault.message.partition("; a kernel")[0])
    return case


def paste(spec: Spec, case: Case) -> str:
    """The case as a line of the spec's [cases]."""
    entries: dict[str, Any] = {
        name: value
        for name, value in {**case.axes, **case.scalars, **case.options}.items()
        if name not in spec.defaults or spec.defaults[name] != value
    }
    entries |= {"exact": True} if case.exact else {}
    if case.constant and case.constant != CONSTANT:
        entries["constant"] = case.constant
    entries |= {"draw": case.draw, **({"sim": True} if case.sim else {})}
    return f"{case.name} = {{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in entries.items()) + " }"


def _toml(value: Any) -> str:
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def in_words(values: list[Any]) -> str:
    """What was drawn of one name: "1..17", or each value with how often."""
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values) and len(set(values)) > 4:
        return f"{min(values)}..{max(values)}"
    counts = Counter(map(str, values)).most_common()
    text = " ".join(v if n == 1 else f"{v}*{n}" for v, n in counts[:12])
    return text + (f" and {len(counts) - 12} more" if len(counts) > 12 else "")


# -- workers ---------------------------------------------------------------------------------------


def attend(events: int) -> None:
    """A worker: a job a line on stdin, what happens as lines of JSON on the file descriptor."""
    import faulthandler

    faulthandler.enable()

    def send(**event: Any) -> None:
        os.write(events, (json.dumps(event) + "\n").encode())

    for line in sys.stdin:
        job = json.loads(line)
        spec = load(Path(job.pop("path")))
        outcome = explore(spec, tell=lambda case: send(case=case), **job)
        send(outcome=asdict(outcome))


class _Worker:
    """A process that explores. `explore` returns None when it is lost."""

    def __init__(self, root: Path, environ: Mapping[str, str]):
        self.events, theirs = os.pipe()
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.fuzz", str(theirs)],
            cwd=root,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self.rest = b""

    def explore(self, job: Mapping[str, Any]) -> Outcome:
        """The job's outcome; of a lost worker, what it was last told about."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: no event will come
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()
        start, cases, last = time.monotonic(), 0, ""
        status, said = "CRASHED", "its process died"
        while True:
            event = self.event(2 * CASE_S[job["device"]] + GRACE_S)
            if event is None:
                break
            if not event:
                status, said = "TIMEOUT", "it never let go of its process"
                break
            if "outcome" in event:
                return Outcome(**event["outcome"])
            cases, last = cases + 1, event["case"]
        self.process.kill()  # where it hangs
        self.errors.seek(0)
        tail = self.errors.read().decode(errors="replace").splitlines()[-12:]
        self.process.wait()
        text = "\n".join([f"{Path(job['path']).stem} {status}: {said}; not made smaller", *tail])
        again = f"kdtr fuzz --spec {Path(job['path']).stem} --seed {job['seed']} --examples {cases}"
        again += f" --device {job['device']}"
        return Outcome(
            Path(job["path"]).stem, cases, cases, seconds=time.monotonic() - start,
            case=last, status=status, text=text, again=again,
        )  # fmt: skip

    def event(self, limit_s: float) -> dict[str, Any] | None:
        """The next event; None at the end of the process, {} after `limit_s` without one."""
        while b"\n" not in self.rest:
            if not select.select([self.events], [], [], limit_s)[0]:
                return {}
            some = os.read(self.events, 1 << 16)
            if not some:
                return None
            self.rest += some
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()
        with contextlib.suppress(OSError):  # a job that the dead process did not read
            self.process.stdin.close()  # type: ignore[union-attr]
        if self.events >= 0:
            os.close(self.events)
            self.events = -1


@dataclass
class Fuzz:
    """One run: the jobs, dealt out to a worker a core or a GPU."""

    root: Path
    choice: devices.Choice
    jobs: list[dict[str, Any]]
    workers: int
    leases: devices.Leases
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the leases and of these:
    alive: list[_Worker] = field(default_factory=list)

    def run(self, show: Callable[[Outcome], None]) -> list[Outcome]:
        """Every job's outcome. KeyboardInterrupt and DeviceError end it."""
        jobs: queue.SimpleQueue = queue.SimpleQueue()
        done: queue.SimpleQueue = queue.SimpleQueue()
        for job in self.jobs:
            jobs.put(job)
        stop = threading.Event()
        threads = [
            threading.Thread(target=self.serve, args=(jobs, done, stop))
            for _ in range(min(self.workers, len(self.jobs)))
        ]
        outcomes: list[Outcome] = []
        try:
            for thread in threads:
                thread.start()
            while len(outcomes) < len(self.jobs):
                try:
                    one = done.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                if isinstance(one, BaseException):
                    raise one
                outcomes.append(one)
                show(one)
        finally:
            stop.set()
            with self.lock:
                for worker in self.alive:
                    worker.process.kill()
            for thread in threads:
                if thread.ident:
                    thread.join()
            self.leases.close()
        return outcomes

    def serve(
        self, jobs: queue.SimpleQueue, done: queue.SimpleQueue, stop: threading.Event
    ) -> None:
        """One thread: a worker, replaced when it is lost."""
        worker, lease = None, None
        environ = {**os.environ, "NUMBA_ENABLE_CUDASIM": str(int(self.choice.device == "sim"))}
        try:
            while not stop.is_set():
                try:
                    job = jobs.get_nowait()
                except queue.Empty:
                    return
                if worker is None:
                    if self.choice.gpus:
                        with self.lock:
                            lease = self.leases.take()
                        environ[devices.VISIBLE] = lease.visible
                    worker = _Worker(self.root, environ)
                    with self.lock:
                        self.alive.append(worker)
                    if stop.is_set():  # while it started: nobody saw it in `alive`
                        return
                crowded = self.workers > len(self.choice.gpus)
                shared = lease.visible if lease and crowded else ""
                outcome = worker.explore({**job, "shared": shared})
                lost = outcome.status in ("CRASHED", "TIMEOUT") and self.choice.device == "cuda"
                if lost or worker.process.poll() is not None:
                    worker.close()
                    worker = None
                    if lease:
                        with self.lock:
                            self.leases.give_back(lease, crashed=True)
                        lease = None
                done.put(outcome)
        except BaseException as error:
            done.put(error)
        finally:
            if worker:
                worker.close()


if __name__ == "__main__":
    attend(int(sys.argv[1]))
