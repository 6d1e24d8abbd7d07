"""The gate: the stages in order, each in a pytest session of its own, one report in the end.

A session's exit code is not trusted alone. What was asked for is reconciled with the verdicts in
the report, so that a case that vanished on the way fails as surely as one that is wrong.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import certificates, devices, merge, orphans, receipts, report, sources, spec
from harness.spec import Case, Spec, SpecError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_S = 0.5  # how often a session is looked at
LINGER_S = 60.0  # that it may take to end after its report
Pair = tuple[Spec, Case]


def load_specs(root: Path) -> list[Spec | SpecError]:
    """Every spec of the project at `root`; a SpecError in the place of one that cannot be read."""
    files = spec.discover(root)
    if not files:
        raise LookupError(
            f"no specs/*.toml in {root}: run this in the root of a project with specs"
        )
    loaded: list[Spec | SpecError] = []
    for file in files:
        try:
            loaded.append(spec.load(file))
        except SpecError as error:
            loaded.append(error)
    return loaded


def readable(specs: Sequence[Spec | SpecError]) -> list[Spec]:
    return [s for s in specs if isinstance(s, Spec)]


@dataclass(frozen=True)
class Asked:
    """What one run was asked for: the cases that this machine can run, and those it cannot."""

    broken: list[SpecError]
    here: list[Pair]
    elsewhere: list[Pair]

    def of_stage(self, stage: str) -> list[Pair]:
        return [(s, c) for s, c in self.here if s.stage == stage]


def select(
    specs: Sequence[Spec | SpecError],
    choice: devices.Choice,
    *,
    stages: Sequence[str] = spec.STAGES,
    names: Sequence[str] = (),
    cases: Sequence[str] = (),
    shard: tuple[int, int] | None = None,
) -> Asked:
    """Narrow `specs` down. LookupError for a name that nothing has, with the nearest that is.

    A spec that cannot be read is part of every stage, and of a run that names its cases too.
    """
    stems = [s.stem if isinstance(s, Spec) else Path(s.file).stem for s in specs]
    for name in names:
        if name not in stems:
            raise LookupError(f"no spec {name!r}; {_nearest(name, stems)}")
    asked = Asked([], [], [])
    seen: list[str] = []
    for stem, one in zip(stems, specs, strict=True):
        if names and stem not in names:
            continue
        if isinstance(one, SpecError):
            if not shard or devices.of_shard(report.broken(one).id, *shard):
                asked.broken.append(one)
            continue
        if one.stage not in stages:
            continue
        seen += one.cases
        for case in one.cases.values():
            if cases and case.name not in cases:
                continue
            if shard and not devices.of_shard(one.case_id(case), *shard):
                continue
            (asked.here if runs(one, case, choice) else asked.elsewhere).append((one, case))
    for name in cases:
        if name not in seen and not asked.broken:
            raise LookupError(f"no case {name!r}; {_nearest(name, seen)}")
    return asked


def runs(spec: Spec, case: Case, choice: devices.Choice) -> bool:
    """Whether this machine can run the case with the device that was chosen."""
    if spec.stage == "golden":
        return True
    if choice.device == "sim" and not case.sim:
        return False
    return case.gpus <= max(1, len(choice.gpus))


def unjudged(found: Mapping[str, Any], specs: Sequence[Spec | SpecError]) -> list[str]:
    """Ids that a report lacks, by what it was asked for and the specs on disk."""
    context = found["context"]
    narrowing = dict(context.get("asked", {}))
    gpus = tuple(devices.Gpu(str(i)) for i in range(narrowing.pop("gpus", 1)))
    narrowing.pop("kernel", None)
    choice = devices.Choice(context["device"], gpus, "")
    asked = select(specs, choice, shard=_pair(context.get("shard")), **narrowing)
    wanted = [report.broken(e).id for e in asked.broken] + [s.case_id(c) for s, c in asked.here]
    seen = {case["id"] for case in found["cases"]}
    return [i for i in wanted if i not in seen]


def _pair(shard: Mapping[str, int] | None) -> tuple[int, int] | None:
    return (shard["index"], shard["count"]) if shard else None


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 3) or sorted(set(names))[:12]
    return f"there is {', '.join(near)}" if near else "there is none"


@dataclass
class Gate:
    """One run of the gate. `say` prints a line (rich markup is off), `show` a rich table."""

    root: Path
    specs: list[Spec | SpecError]
    asked: Asked
    choice: devices.Choice
    device: str = "auto"  # as asked for
    workers: int | None = None  # None: as many as GPUs can be leased, or cores
    kernel: str | None = None
    shard: tuple[int, int] | None = None
    lease_wait: float = devices.LEASE_WAIT_S
    folder: Path = Path("report")
    narrowing: dict[str, Any] = field(default_factory=dict)  # keywords of `select`, for the report
    whole: bool = True  # nothing narrows a stage: its receipt can be written
    enforce: bool = False  # refuse a stage whose earlier stages have not passed
    keep_going: bool = False
    require: str | None = None  # the GPU whose receipts must be fresh
    receipt: bool = False
    say: Callable[[str], None] = print
    show: Callable[[Any], None] = print
    reports: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False

    def run(self, stages: Sequence[str]) -> int:
        """Run `stages`, write the report, say what it means. The exit code: 0 is a pass."""
        scratch = Path(tempfile.mkdtemp(prefix="kdtr-gate-"))
        # Not pytest's: it can be asked neither for a folder nor for every file name.
        if broken := [report.broken(e) for e in self.asked.broken]:
            self.reports.append(report.as_report(broken))
        try:
            with orphans.ended():
                self.run_stages(stages, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return self.conclude()

    def run_stages(self, stages: Sequence[str], scratch: Path) -> None:
        for i, stage in enumerate(stages):
            if not self.asked.of_stage(stage) and (i or not self.asked.broken):
                continue
            if self.stage(stage, scratch) or (self.keep_going and not self.interrupted):
                continue
            left = [s for s in stages[i + 1 :] if self.asked.of_stage(s)]
            self.problems += [f"stage {s} did not run: stage {stage} failed" for s in left]
            return

    # -- one stage

    def stage(self, stage: str, scratch: Path) -> bool:
        """Run one stage; whether all of it passed."""
        if self.enforce:
            for reason in receipts.unmet(self.root, stage, self.choice.device, self.specs):
                self.problems.append(f"{stage} refused: {reason}; run kdtr gate, or --out-of-order")
                return False
        pairs = self.asked.of_stage(stage)
        wanted = [s.case_id(c) for s, c in pairs] + [report.broken(e).id for e in self.asked.broken]
        before = len(self.problems)
        for gpus in sorted({c.gpus for _, c in pairs}):
            group = [(s, c) for s, c in pairs if c.gpus == gpus]
            self.session(stage, group, gpus, scratch / f"{stage}-{gpus}")
            if self.interrupted:
                break
        seen = {c["id"]: c for r in self.reports for c in r["cases"]}
        bad = [i for i in wanted if i in seen and not seen[i]["ok"]]
        gone = [i for i in wanted if i not in seen]
        said = [f"{i} {seen[i]['status']}" for i in bad]
        said += [f"{i} was asked for and has no verdict" for i in gone]
        passed = not said and len(self.problems) == before and not self.interrupted
        self.problems += [s for s in said if s not in self.problems]  # a broken spec fails each
        try:
            if self.whole and passed:
                receipts.pass_stage(self.root, stage, self.choice.device, self.specs, len(pairs))
            elif not passed and not self.kernel:
                receipts.fail_stage(self.root, stage, self.choice.device)
        except OSError as error:  # a read-only checkout: the verdicts stand
            self.say(f"what stage {stage} gave is not kept for later stages: {error}")
        return passed

    def session(self, stage: str, pairs: Sequence[Pair], gpus: int, folder: Path) -> None:
        """One pytest session over `pairs`; its report goes to `self.reports`."""
        self.say(f"stage {stage}: {_count(len(pairs), 'case')} on {self.where(gpus)}")
        command = [
            sys.executable, "-m", "pytest", *self.targets(pairs), *plugin_arguments(),
            "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:benchmark",
            "-p", "no:hypothesispytest",  # it imports all of hypothesis to say nothing in the end
            "--color", _color(), "-qq", "--no-header", "--no-summary", "--kdtr-progress",
            "--device", self.device, "--kdtr-lease-wait", str(self.lease_wait),
            "--kdtr-report", str(folder),
        ]  # fmt: skip
        if self.choice.gpus:
            command += ["--kdtr-gpus", str(gpus)]
        if self.kernel:
            command += ["--kernel", self.kernel]
        workers = self.count(gpus, len(pairs))
        command += ["-n", str(workers)]
        if workers:
            command += ["--dist", "load", "--maxschedchunk", "1"]
        code = self.wait(command, max(1, devices.cores() // max(1, workers)), folder)
        try:
            found = merge.read(folder)
        except merge.MergeError:
            self.problems.append(f"stage {stage}: pytest ended with {code} and left no report")
            return
        self.reports.append(found)
        if code not in (0, 1):
            self.problems.append(f"stage {stage}: pytest ended with {code}")
        elif code and all(case["ok"] for case in found["cases"]):
            self.problems.append(f"stage {stage}: pytest failed, though every verdict is good")

    def targets(self, pairs: Sequence[Pair]) -> list[str]:
        """What pytest is told to collect."""
        return sorted(s.case_id(c) for s, c in pairs)

    def count(self, gpus: int, cases: int) -> int:
        """How many workers: never more than there are cases."""
        if self.workers is not None:
            return min(self.workers, cases)
        if self.choice.gpus:
            return min(devices.Leases(self.choice.gpus, gpus).workers(), cases)
        return min(devices.cores(), cases)

    def wait(self, command: Sequence[str], threads: int, folder: Path) -> int:
        """Run pytest in a process group of its own, and pass on an interrupt to all of that, once,
        whoever sent it and to whom, so that it can write what it has.

        Each worker's BLAS gets `threads`, unless the caller has said how many: left alone it takes
        as many as there are cores, in every worker. Its report in `folder` is the last thing that
        it does: what keeps it from ending then is a thread that some launcher has left running.
        """
        environ = {"OMP_NUM_THREADS": str(threads), **os.environ}
        environ.pop("PYTEST_ADDOPTS", None)  # it is told what to run
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environ,
            process_group=0,
            preexec_fn=_tied_to(os.getpid()),
        )
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            done = math.inf  # when it had written its report
            while True:
                try:
                    code = process.wait(LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if (folder / "report.json").exists():
                        done = min(done, time.monotonic())
                    if time.monotonic() - done > LINGER_S:
                        self.problems.append("pytest did not end: a launcher left a thread running")
                        process.kill()
                except KeyboardInterrupt:
                    self.interrupted = True
                    os.killpg(process.pid, signal.SIGINT)
        finally:
            signal.signal(signal.SIGTERM, before)
        self.interrupted = self.interrupted or code == 2
        return code

    def where(self, gpus: int) -> str:
        if not self.choice.gpus:
            return "the simulator"
        names = " and ".join(sorted({g.name for g in self.choice.gpus}))
        return f"{len(self.choice.gpus)} {names}" + (f", {gpus} a case" if gpus > 1 else "")

    # -- the end

    def conclude(self) -> int:
        """Write the report and print the table, what could not run here, and what is wrong."""
        verdicts = merge.verdicts(self.reports)
        context: dict[str, Any] = {"device": self.choice.device}
        context |= merge.contexts(self.reports)
        seen = sources.Snapshot()
        context["sources"] = receipts.sources_digest(self.specs, seen)
        context["asked"] = {"gpus": len(self.choice.gpus), "kernel": self.kernel, **self.narrowing}
        if (self.root / certificates.FOLDER).is_dir():
            context["mutation"] = certificates.summary(self.root, readable(self.specs), seen)
        if self.shard:
            context["shard"] = {"index": self.shard[0], "count": self.shard[1]}
        written = report.write(self.root / self.folder / "report.json", verdicts, **context)
        if verdicts:
            self.show(report.table(verdicts))
        for case in written["cases"]:
            if not case["ok"]:
                self.say("\n" + case["text"])
        self.tell_elsewhere()
        if "mutation" in context and self.whole:
            self.say(f"\n{certificates.total(context['mutation'])}")
        if self.receipt and verdicts:
            for path in receipts.record(self.root, written, readable(self.specs)):
                self.say(f"receipt: {path.relative_to(self.root)}")
        self.check_receipts()
        totals = written["totals"]
        if self.shard and not self.asked.here and not self.asked.broken:
            self.say(f"no case falls into shard {self.shard[0]}/{self.shard[1]}")
        elif not totals["passed"] and not self.problems:
            self.problems.append("nothing was run and passed")
        if self.interrupted:
            self.problems.append("interrupted: the report is partial")
        for problem in self.problems:
            self.say(f"FAILED {problem}")
        line = f"{totals['passed']} passed, {totals['failed']} failed"
        if totals["unsupported"]:
            line += f", {totals['unsupported']} unsupported as declared"
        if self.asked.elsewhere:
            line += f", {len(self.asked.elsewhere)} not for this machine"
        self.say(f"\n{line}; {self.folder / 'report.html'}")
        return 130 if self.interrupted else 1 if self.problems else 0

    def tell_elsewhere(self) -> None:
        """The cases that cannot run here, by the state of their receipts: they are not passes."""
        if not self.asked.elsewhere:
            return
        self.say(f"\n{_count(len(self.asked.elsewhere), 'case')} not for this machine:")
        if self.kernel:  # receipts are about the spec's own
            for line in folded([s.case_id(c) for s, c in self.asked.elsewhere]):
                self.say(f"  {line}")
            return
        for gpu in receipts.known(self.root) or ["any GPU"]:
            states: dict[str, list[str]] = {}
            for one in receipts.standing(self.root, gpu, self.asked.elsewhere):
                states.setdefault(one.state, []).append(one.id)
            for state, ids in sorted(states.items()):
                self.say(f"  {state} receipt of {gpu}: {len(ids)}")
                if state != receipts.State.FRESH:
                    for line in folded(ids):
                        self.say(f"    {line}")

    def check_receipts(self) -> None:
        """With --require-receipts: every case asked for has a fresh one, wherever it ran."""
        if not self.require:
            return
        pairs = [p for p in self.asked.here + self.asked.elsewhere if p[0].stage != "golden"]
        for one in receipts.standing(self.root, self.require, pairs):
            if one.state != receipts.State.FRESH:
                self.problems.append(f"{one.id}: {one.state} receipt of {self.require}")


def _tied_to(parent: int) -> Callable[[], None] | None:
    """What a child runs so that it is interrupted when `parent` is killed and cannot pass it on.

    Where the system has no such thing (it is Linux's), the child outlives a killed parent.
    """
    prctl = orphans.prctl()
    if prctl is None:
        return None

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != parent:  # it was killed before the call
            os.kill(os.getpid(), signal.SIGINT)

    return tie


def missing_module(kernel: str) -> str | None:
    """What to say of a launcher ("module:function") whose module is not there; None if it is."""
    module = kernel.partition(":")[0]
    if spec.find_module(module) is not None:
        return None
    return f"--kernel {kernel}: no module {module!r} in this folder or on PYTHONPATH"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def folded(ids: Sequence[str]) -> list[str]:
    """Case ids as a line a spec: "rms_norm.toml: one_token full_tree"."""
    by_spec: dict[str, list[str]] = {}
    for each in ids:
        name, _, case = each.removeprefix("specs/").partition("::")
        by_spec.setdefault(name, []).append(case)
    return [f"{name}: {' '.join(cases)}" for name, cases in by_spec.items()]


def plugin_arguments() -> list[str]:
    """How pytest finds our plugin: by its entry point, or by name where nothing is installed."""
    points = importlib.metadata.entry_points(group="pytest11")
    return [] if any(p.value == "harness.plugin" for p in points) else ["-p", "harness.plugin"]


def _color() -> str:
    return "yes" if sys.stdout.isatty() else "no"
