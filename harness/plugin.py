"""pytest hooks: specs become test items, verdicts come back from the workers, a report is written.

Thin on purpose: the judge is `run.run_case`, the GPUs are in `devices.py`. Nothing here imports
numba at module level, because the device must be chosen before anything does. The plugin is
loaded in every pytest session of an environment that has it, so it does nothing at all unless the
session's root has `specs/*.toml`.

One process a worker, and the worker may be lost: a case that overruns its time, that poisons the
GPU context or that kills its process ends the worker. What the worker knew of it stands in a file
(its last words), which the controller turns into the verdict; a new worker goes on with the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from harness import devices

if TYPE_CHECKING:
    from harness.report import Verdict
    from harness.spec import Case, Spec

PROPERTY = "kdtr"  # the user property that carries a verdict from worker to controller
SECONDS = Path(".cache", "kdtr", "seconds.json")  # of each case in earlier runs, by device
GRACE_S = 5.0  # between one time limit and the next
LOST = 70  # exit status of a worker that ends itself
LARGE = 4 << 30  # bytes of tensors with which a case has a shared GPU to itself
FUTILE = 3  # workers in a row that die before they collect


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdtr", "kernel validation (kdtree-engine)")
    group.addoption(
        "--device",
        choices=devices.DEVICES,
        default="auto",
        help="Where specs run. auto: the GPUs if they are usable, else the simulator",
    )
    group.addoption(
        "--kernel",
        metavar="MODULE:FUNCTION",
        help="Judge this launcher in place of the one that the specs name",
    )
    group.addoption(
        "--kdtr-report", metavar="DIR", type=Path, help="Write report.json and report.html here"
    )
    group.addoption(
        "--kdtr-gpus",
        metavar="K",
        type=int,
        help="Lease K GPUs a worker and run only the cases that need K (default 1)",
    )
    group.addoption(
        "--kdtr-shard", metavar="I/N", type=devices.shard, help="Run only shard I of N (1-based)"
    )
    group.addoption(
        "--kdtr-lease-wait",
        metavar="S",
        type=float,
        default=devices.LEASE_WAIT_S,
        help="Seconds to wait for GPUs that other runs on this machine hold",
    )
    group.addoption("--kdtr-progress", action="store_true", help="One line a case (kdtr gate)")


# -- which device, before anything imports numba ---------------------------------------------------

CHOICE = pytest.StashKey[devices.Choice]()
SEAT = pytest.StashKey["Seat"]()
RUN = pytest.StashKey["Run"]()


def active(config: pytest.Config) -> bool:
    return any(config.rootpath.joinpath("specs").glob("*.toml"))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if not active(early_config):
        return
    if str(early_config.rootpath) not in sys.path:
        sys.path.insert(0, str(early_config.rootpath))  # kernels and oracles of that project
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker is told, and inherits the environment
        choose(early_config, early_config.known_args_namespace.device)


def choose(config: pytest.Config, request: str) -> devices.Choice:
    """Choose the device once a session and set what numba reads when it is imported."""
    if CHOICE not in config.stash:
        try:
            choice = devices.choose(request)
        except devices.DeviceError as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[CHOICE] = choice
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if choice.device == "sim" else "0"
    return config.stash[CHOICE]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not active(config):
        return
    from harness.spec import STAGES

    for stage in STAGES:
        config.addinivalue_line("markers", f"{stage}: specs of the {stage} stage")
    told = getattr(config, "workerinput", {}).get(PROPERTY)
    if told is not None:
        config.stash[SEAT] = Seat.of_worker(told, config.workerinput["workerid"])  # type: ignore[attr-defined]
        return
    choice = choose(config, config.option.device)
    if config.option.kernel:
        from harness import stages

        if missing := stages.missing_module(config.option.kernel):
            raise pytest.UsageError(missing)
    config.stash[SEAT] = Seat(choice.device, choice.gpus)
    config.stash[RUN] = Run(config, choice)
    config.pluginmanager.register(config.stash[RUN], "kdtr-run")
    if config.option.maxworkerrestart is None:  # every crash costs a worker, and all cases must run
        config.option.maxworkerrestart = "10000"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    choice = config.stash.get(CHOICE, None)
    if choice is None or not choice.gpus:
        return None  # xdist counts the cores
    return devices.Leases(choice.gpus, config.option.kdtr_gpus or 1).workers()


# -- the seat: where this process runs cases -------------------------------------------------------


class Seat:
    """What one process may use: its device, its GPUs, and a file for its last words."""

    def __init__(self, device: str, gpus: tuple[devices.Gpu, ...]):
        self.device, self.uuids = device, [g.uuid for g in gpus]
        self.shared = False
        self.worker = ""  # "" for a session without workers
        self.words: Path | None = None
        self.stderr = os.dup(2)  # the terminal: while a test runs, 2 is pytest's capture
        self.seconds: dict[str, float] = {}
        self.each: int | None = None  # run only the cases that need so many GPUs

    @classmethod
    def of_worker(cls, told: dict[str, Any], worker: str) -> Seat:
        """The seat that the controller leased for this worker. Sets CUDA_VISIBLE_DEVICES."""
        seat = cls(told["device"], ())
        seat.uuids, seat.shared, seat.each = told["uuids"], told["shared"], told["each"]
        seat.seconds, seat.worker = told["seconds"], worker
        seat.words = Path(told["folder"], worker)
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(".cache", "numba", worker).absolute()))
        seat.see()
        return seat

    def see(self) -> None:
        """Show this process the GPUs of the seat alone; before it initialises CUDA."""
        if self.uuids:
            os.environ[devices.VISIBLE] = ",".join(self.uuids)

    def takes(self, spec: Spec, case: Case) -> bool:
        """Whether `case` can run here."""
        if spec.stage == "golden":
            return self.each in (None, 1)  # host code, on every machine
        if self.device == "sim" and not self.uuids:
            return case.sim
        if self.device == "sim" and not case.sim:  # fake GPUs
            return False
        return case.gpus == self.each if self.each else case.gpus <= max(1, len(self.uuids))

    @contextlib.contextmanager
    def watch(
        self, case_id: str, limit_s: float, on_timeout: Callable[[], None], *, alone: bool = False
    ) -> Iterator[Callable[[], AbstractContextManager]]:
        """End the process if the block takes longer than `limit_s`.

        `run_case` has a limit for a launch, which costs no process. This one is for what that
        cannot interrupt; the last, which faulthandler keeps, for what never lets go of Python.
        Yields what to enter while the GPU is used: a turn on a shared one, `alone` or beside
        others. The wait for it does not count, and the limit starts again with it.
        """
        with contextlib.ExitStack() as stack:
            words = stack.enter_context(self.words.open("w")) if self.words else None
            if words:
                print(json.dumps({"id": case_id, "pid": os.getpid()}), file=words, flush=True)
                faulthandler.enable(words)
            stop = alarm(limit_s, on_timeout, words)

            @contextlib.contextmanager
            def turn() -> Iterator[None]:
                nonlocal stop
                with contextlib.ExitStack() as held:
                    if self.shared:
                        stop()
                        held.enter_context(devices.turn(",".join(self.uuids), alone=alone))
                        stop = alarm(limit_s, on_timeout, words)
                    yield

            try:
                yield turn
            finally:
                stop()
                if words:
                    faulthandler.enable(sys.__stderr__ or 2)

    def leave(self, verdict: Verdict) -> None:
        """End this worker; `verdict` is what the controller will read about its last case."""
        assert self.words is not None
        with self.words.open("a") as words:
            print(json.dumps(as_json(verdict)), file=words, flush=True)
        os._exit(LOST)


def alarm(
    limit_s: float, on_timeout: Callable[[], None], words: TextIO | None
) -> Callable[[], None]:
    """Call `on_timeout` after `limit_s`, end the process a little later; returns what stops it."""
    timer = threading.Timer(limit_s, on_timeout)
    timer.daemon = True
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=words or sys.stderr)
    timer.start()

    def stop() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    return stop


def as_json(verdict: Verdict) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(verdict)


# -- specs become items ----------------------------------------------------------------------------


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    config = parent.config
    if file_path.suffix == ".toml" and file_path.parent == config.rootpath / "specs":
        return SpecFile.from_parent(parent, path=file_path)
    return None


class SpecFile(pytest.File):
    """One spec. A broken one yields one failing item that belongs to every stage."""

    def collect(self) -> Iterator[pytest.Item]:
        from harness import report, spec

        seat = self.config.stash[SEAT]
        try:
            loaded = spec.load(self.path)
        except spec.SpecError as error:
            item = CaseItem.from_parent(self, name="spec", fixed=report.broken(error))
            for stage in spec.STAGES:
                item.add_marker(stage)
            yield item
            return
        for case in loaded.cases.values():
            asked = any(arg.endswith(f"{self.path.name}::{case.name}") for arg in self.config.args)
            if seat.takes(loaded, case):
                item = CaseItem.from_parent(self, name=case.name, spec=loaded, case=case)
            elif asked:
                item = CaseItem.from_parent(self, name=case.name, fixed=refused(loaded, case, seat))
            else:
                continue
            item.add_marker(loaded.stage)
            yield item


def refused(spec: Spec, case: Case, seat: Seat) -> Verdict:
    """The verdict on a case that was asked for by name and cannot run here."""
    from harness.report import Status, Verdict

    need = "a GPU (it has no sim = true)" if case.gpus == 1 else f"{case.gpus} GPUs"
    return Verdict(
        id=spec.case_id(case),
        stage=spec.stage,
        spec=spec.stem,
        case=case.name,
        status=Status.VACUOUS,
        device="simulator" if seat.device == "sim" else seat.device,
        message=f"nothing executed: the case needs {need}",
        kernel=spec.kernel or "",
        reference=spec.reference,
    )


class Failure(Exception):
    """Carries a verdict that is not ok out of an item."""


class CaseItem(pytest.Item):
    """One case of one spec. `fixed` is a verdict that stands before anything has run."""

    def __init__(
        self,
        *,
        spec: Spec | None = None,
        case: Case | None = None,
        fixed: Verdict | None = None,
        **rest: Any,
    ):
        super().__init__(**rest)
        self.spec, self.case, self.fixed = spec, case, fixed

    def runtest(self) -> None:
        from harness.report import Status

        verdict = self.fixed or self.judge()
        self.user_properties.append((PROPERTY, json.dumps(as_json(verdict))))
        if verdict.status is Status.UNSUPPORTED:
            pytest.skip(verdict.message)
        if not verdict.ok:
            raise Failure(verdict)

    def judge(self) -> Verdict:
        from harness import run

        assert self.spec is not None
        assert self.case is not None
        seat, spec, case = self.config.stash[SEAT], self.spec, self.case
        alone = size_of(spec, case) > LARGE
        with seat.watch(spec.case_id(case), limit_s(case), self.overran, alone=alone) as turn:
            verdict = run.run_case(spec, case, kernel=self.config.option.kernel, turn=turn)
        if verdict.lost and seat.worker:
            seat.leave(verdict)
        if verdict.lost:  # no case after this one could be judged fairly here
            self.session.shouldstop = f"{self.nodeid} cost the process its GPU; use -n 1"
        return verdict

    def overran(self) -> None:
        """Called in a thread of its own when the time is up: the process cannot be saved."""
        from harness import report

        assert self.case is not None
        stack = sys._current_frames().get(threading.main_thread().ident or 0)
        where = f"{stack.f_code.co_filename}:{stack.f_lineno}" if stack else "unknown"
        message = f"not done after {limit_s(self.case):g} s; it was in {where}"
        status = report.Status.TIMEOUT
        verdict = lost_verdict(self.nodeid, status, message, self.config, self.spec)
        seat = self.config.stash[SEAT]
        if seat.worker:
            seat.leave(verdict)
        run = self.config.stash[RUN]
        run.add(verdict, limit_s(self.case), seat.uuids)
        run.write()
        run.close()
        text = report.failure_text(verdict)
        text += "\nThe process ends here; with -n 1 a new one would go on with the next case.\n"
        os.write(seat.stderr, text.encode())
        os._exit(LOST)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from harness.report import failure_text

        if isinstance(excinfo.value, Failure):
            return failure_text(excinfo.value.args[0])
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def limit_s(case: Case) -> float:
    """For all of a case: its golden and two launches of at most `timeout_s` each."""
    return 2 * case.timeout_s + GRACE_S


def lost_verdict(
    case_id: str, status: Any, message: str, config: pytest.Config, spec: Spec | None = None
) -> Verdict:
    """The verdict on a case whose process is lost."""
    from harness import report
    from harness.spec import SpecError, load

    with contextlib.suppress(SpecError):
        spec = spec or load(config.rootpath / case_id.partition("::")[0])
    choice, replaced = config.stash.get(CHOICE, None), config.option.kernel
    return report.Verdict(
        id=case_id,
        stage=spec.stage if spec else None,
        spec=Path(case_id.partition("::")[0]).stem,
        case=case_id.partition("::")[2],
        status=status,
        device="simulator" if choice is None or choice.device == "sim" else choice.gpus[0].name,
        message=message,
        kernel=replaced or (spec and spec.kernel) or "",
        reference=spec.reference if spec else "",
        replaced=bool(replaced),
        lost=True,
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SEAT not in config.stash:
        return
    wanted = config.option.kdtr_shard
    if wanted:
        ours = [i for i in items if devices.of_shard(i.nodeid, *wanted)]
        config.hook.pytest_deselected(items=[i for i in items if i not in ours])
        items[:] = ours
    seat = config.stash[SEAT]
    if seat.worker:  # all workers must sort alike, so the times come from the controller
        cases = {i.nodeid: i for i in items if isinstance(i, CaseItem)}
        order = iter(devices.longest_first(cases, expected(cases.values()) | seat.seconds))
        items[:] = [cases[next(order)] if isinstance(i, CaseItem) else i for i in items]


def expected(items: Iterable[CaseItem]) -> dict[str, float]:
    """Seconds by size, for what nobody has measured: an oracle takes 40 MB of tensors a second."""
    found = {}
    for item in items:
        if item.spec and item.case:
            found[item.nodeid] = size_of(item.spec, item.case) / 4e7
    return found


def size_of(spec: Spec, case: Case) -> int:
    """Bytes of a case's tensors."""
    shapes = spec.shapes(case)
    return sum(math.prod(shapes[n]) * t.numpy_dtype.itemsize for n, t in spec.tensors().items())


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, str] | None:
    verdict = verdict_of(report)
    if verdict is None or report.when not in ("call", "???"):
        return None
    if config.option.kdtr_progress:  # `Run` prints a line of its own
        return report.outcome, "", ""
    letter = {"passed": ".", "skipped": "s"}.get(report.outcome, "F")
    return report.outcome, letter, verdict.status.value


def verdict_of(report: Any) -> Verdict | None:
    """The verdict that a test report carries, if it is one of ours."""
    from harness.merge import restore

    carried = dict(getattr(report, "user_properties", ())).get(PROPERTY)
    return restore(json.loads(carried)) if carried else None


# -- the controller --------------------------------------------------------------------------------


class Run:
    """One session as its controller sees it: leases, verdicts, the report."""

    def __init__(self, config: pytest.Config, choice: devices.Choice):
        self.config, self.choice = config, choice
        self.leases = devices.Leases(
            choice.gpus, config.option.kdtr_gpus or 1, config.option.kdtr_lease_wait
        )
        self.leased: dict[str, devices.Lease] = {}  # worker id -> lease
        self.verdicts: dict[str, Verdict] = {}
        self.seconds: dict[str, float] = {}
        self.ran_on: dict[str, list[str]] = {}  # case id -> UUIDs
        self.folder = Path(tempfile.mkdtemp(prefix="kdtr-run-"))
        atexit.register(self.close)
        self.collected: set[str] = set()
        self.futile = self.total = 0

    def pytest_report_header(self) -> str:
        names = {g.name for g in self.choice.gpus}
        what = "the simulator" if self.choice.device == "sim" else " and ".join(sorted(names))
        return f"kdtr: specs run on {what} ({self.choice.why})"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        bringing_up = self.config.pluginmanager.getplugin("terminaldistreporter")
        if bringing_up and self.config.option.kdtr_progress:
            bringing_up.write_line = lambda line: None

    # leases

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        lease = devices.Lease(())
        if self.choice.gpus:
            try:
                lease = self.leases.take()
            except devices.DeviceError as error:
                pytest.exit(f"no GPU for {node.gateway.id}: {error}", returncode=3)
        self.leased[node.gateway.id] = lease
        node.workerinput[PROPERTY] = {
            "device": self.choice.device,
            "uuids": [g.uuid for g in lease.gpus],
            "shared": lease.shared or self.crowded(node.workerinput.get("workercount", 1)),
            "each": (self.config.option.kdtr_gpus or 1) if self.choice.gpus else None,
            "seconds": self.earlier(),
            "folder": str(self.folder),
        }

    def crowded(self, workers: int) -> bool:
        """Whether workers will share GPUs, which the first of them must know too."""
        return workers * self.leases.per_worker > len(self.choice.gpus) > 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected.add(node.gateway.id)
        self.futile, self.total = 0, len(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        worker = node.gateway.id
        lease = self.leased.pop(worker, None)
        if lease is None:
            return
        for gpu in self.leases.give_back(lease, crashed=bool(error)):
            reason = self.leases.quarantined[gpu.uuid]
            self.say(f"kdtr: {gpu.uuid} ({gpu.name}) is quarantined: {reason}", red=True)
        if error and worker not in self.collected:
            self.futile += 1
            if self.futile >= FUTILE:
                pytest.exit(f"{FUTILE} workers in a row died before they collected", returncode=3)

    # verdicts

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers, lease the GPUs for this process: other runs must not share them."""
        self.total = self.total or len(session.items)
        seat = self.config.stash[SEAT]
        cases = [i.case for i in session.items if isinstance(i, CaseItem) and i.case]
        if not cases or not self.choice.gpus or self.config.option.collectonly:
            return
        self.leases.per_worker = max(c.gpus for c in cases)
        try:
            seat.uuids = [g.uuid for g in self.leases.take().gpus]
        except devices.DeviceError as error:
            pytest.exit(f"no GPU for this run: {error}", returncode=3)
        seat.see()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        if not crashitem.startswith("specs/"):
            return
        from harness.report import failure_text

        worker = report.node.gateway.id
        verdict = last_verdict(crashitem, self.folder / worker, self.config)
        report.longrepr = failure_text(verdict)
        report.user_properties = [(PROPERTY, json.dumps(as_json(verdict)))]
        told = report.node.workerinput[PROPERTY]
        self.ran_on[crashitem] = told["uuids"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        verdict = verdict_of(report)
        if verdict is None or report.when not in ("call", "???"):
            return
        told = getattr(getattr(report, "node", None), "workerinput", {}).get(PROPERTY, {})
        uuids = told.get("uuids", self.config.stash[SEAT].uuids)
        self.add(verdict, getattr(report, "duration", 0.0), uuids)

    def add(self, verdict: Verdict, seconds: float, uuids: list[str]) -> None:
        self.verdicts[verdict.id] = verdict
        self.ran_on[verdict.id] = uuids
        if verdict.ok:
            self.seconds[verdict.id] = round(seconds, 3)
        if self.config.option.kdtr_progress:
            done = f"{len(self.verdicts):>{len(str(self.total))}}/{self.total}"
            room = "" if verdict.headroom is None else f"  headroom {verdict.headroom:.3f}"
            name = verdict.id.removeprefix("specs/")
            colour = {"green": True} if verdict.ok else {"red": True}
            self.say(f"  {done} {verdict.status:<13} {name}  {seconds:.1f} s{room}", **colour)

    # the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.write()
        self.close()

    def close(self) -> None:
        """Leave neither files nor locked GPUs behind."""
        self.leases.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        """The report, if one was asked for, and the times for the next run's order."""
        from harness import report

        root = self.config.rootpath
        if self.seconds:
            times = {**self.earlier(), **self.seconds}
            everything = {**read_json(root / SECONDS), self.choice.device: times}
            with contextlib.suppress(OSError):  # a read-only checkout costs the order alone
                report.replace_file(root / SECONDS, json.dumps(everything, indent=1).encode())
        if self.config.option.kdtr_report:
            path = self.config.invocation_params.dir / self.config.option.kdtr_report
            report.write(path / "report.json", self.sorted_verdicts(), **self.context())

    def sorted_verdicts(self) -> list[Verdict]:
        return [self.verdicts[i] for i in sorted(self.verdicts)]

    def context(self) -> dict[str, Any]:
        gpus = [
            {key: getattr(g, key) for key in ("uuid", "name", "slug", "compute", "driver")}
            for g in self.choice.gpus
        ]
        return {
            "device": self.choice.device,
            "why": self.choice.why,
            "gpus": gpus,
            "quarantined": dict(self.leases.quarantined),
            "ran_on": self.ran_on,
            "seconds": self.seconds,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def earlier(self) -> dict[str, float]:
        """Seconds of each case in earlier runs: on GPUs those of the receipts, then those here."""
        from harness import receipts

        found = read_json(self.config.rootpath / SECONDS).get(self.choice.device, {})
        if self.choice.device == "sim":
            return found
        return receipts.seconds(self.config.rootpath) | found

    def say(self, line: str, **markup: bool) -> None:
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if terminal:
            terminal.write_line(line, **markup)
            terminal.flush()  # progress through a pipe must not wait for the end

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for uuid, reason in self.leases.quarantined.items():
            terminalreporter.write_line(f"kdtr: {uuid} was quarantined: {reason}", red=True)
        left = self.left_out() if self.verdicts and not self.config.option.kdtr_progress else 0
        if left:
            terminalreporter.write_line(
                f"kdtr: {left} cases in specs/ are not for this machine; kdtr gate lists them"
            )

    def left_out(self) -> int:
        """How many cases this machine cannot run: nobody should take them for passed."""
        from harness import spec, stages

        found = [s for s in stages.load_specs(self.config.rootpath) if isinstance(s, spec.Spec)]
        pairs = [(s, c) for s in found for c in s.cases.values()]
        return sum(not stages.runs(s, c, self.choice) for s, c in pairs)


def last_verdict(case_id: str, words: Path, config: pytest.Config) -> Verdict:
    """The verdict on a case whose worker died, from the file that the worker left."""
    from harness.merge import restore
    from harness.report import Status

    try:
        head, _, rest = words.read_text(errors="replace").partition("\n")
    except OSError:
        head, rest = "", ""
    if not head or json.loads(head)["id"] != case_id:
        return lost_verdict(case_id, Status.CRASHED, "its process died between two cases", config)
    if rest.startswith("{"):
        return restore(json.loads(rest))
    if rest.startswith("Timeout ("):
        message = "not done in time, and it never let go of the interpreter"
        return lost_verdict(case_id, Status.TIMEOUT, message + "\n" + stack(rest), config)
    message = f"its process died\n{stack(rest)}".rstrip()
    return lost_verdict(case_id, Status.CRASHED, message, config)


def stack(text: str) -> str:
    """What faulthandler wrote, cut down to the error and the frames below the judge."""
    lines = text.splitlines()
    first = next((line for line in lines if line.startswith("Fatal")), "")
    start = next((i for i, line in enumerate(lines) if "(most recent call first)" in line), None)
    for i, line in enumerate(lines):
        if line.startswith("Current thread"):
            start = i
    frames: list[str] = []
    for line in lines[start + 1 :] if start is not None else []:
        if "harness/run.py" in line or "harness/plugin.py" in line or not line.strip():
            break
        frames.append(line)
    return "\n".join([first, *frames[:12]]).strip("\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
