"""pytest hooks: specs become test items, and each item is judged by `run.run_case`.

Thin on purpose. Where a process runs cases and how it may be lost is harness/seat.py; leases,
verdicts and the report are the controller's, harness/controller.py. Nothing here imports numba at
module level, because the device must be chosen before anything does. The plugin is loaded in every
pytest session of an environment that has it, so it does nothing at all unless the session's root
has `specs/*.toml`.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import devices
from harness.controller import PROPERTY, RUN, Run, verdict_of
from harness.seat import CHOICE, LOST, SEAT, Seat, as_json, limit_s, lost_verdict

if TYPE_CHECKING:
    from harness.report import Verdict
    from harness.spec import Case, Spec

WRITE_S = 60.0  # for the report of a session that ends in the middle of a case
LARGE = 4 << 30  # bytes of tensors with which a case has a shared GPU to itself


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
    group.addoption(
        "--kdtr-progress",
        action="store_true",
        help="One line a case, and of the report only report.json (kdtr gate)",
    )


# -- which device, before anything imports numba ---------------------------------------------------


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
        faulthandler.dump_traceback_later(WRITE_S, exit=True)  # in place of the one that is near
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
