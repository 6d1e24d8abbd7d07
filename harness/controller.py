"""The controller: one session as it sees it, from the first lease to the report.

It hands GPUs to workers, collects the verdicts that they send, makes those of the workers that are
lost, and writes. Its methods are pytest and xdist hooks; `plugin.pytest_configure` registers it in
every session that is no worker.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import devices
from harness.seat import SEAT, as_json, last_verdict

if TYPE_CHECKING:
    from harness.report import Verdict

PROPERTY = "kdtr"  # the user property that carries a verdict from worker to controller
SECONDS = Path(".cache", "kdtr", "seconds.json")  # of each case in earlier runs, by device
FUTILE = 3  # workers in a row that die before they collect
RUN = pytest.StashKey["Run"]()


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
        cases = [case for i in session.items if (case := getattr(i, "case", None))]
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
            everything = {**report.read_object(root / SECONDS), self.choice.device: times}
            with contextlib.suppress(OSError):  # a read-only checkout costs the order alone
                report.replace_file(root / SECONDS, json.dumps(everything, indent=1).encode())
        if self.config.option.kdtr_report:
            path = self.config.invocation_params.dir / self.config.option.kdtr_report
            write = report.write_part if self.config.option.kdtr_progress else report.write
            write(path / "report.json", self.sorted_verdicts(), **self.context())

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
        from harness import receipts, report

        kept = report.read_object(self.config.rootpath / SECONDS).get(self.choice.device)
        pairs = kept.items() if isinstance(kept, dict) else ()
        found = {case: s for case, s in pairs if isinstance(s, int | float)}
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


def verdict_of(report: Any) -> Verdict | None:
    """The verdict that a test report carries, if it is one of ours."""
    from harness.merge import restore

    carried = dict(getattr(report, "user_properties", ())).get(PROPERTY)
    return restore(json.loads(carried)) if carried else None
