"""The gate on a machine with several GPUs: one command, one JSON, one section for the README.

    python -m ci.many_gpus --gpus 8
    python -m ci.many_gpus --gpus 2 --budget 400 --subset rms_norm --subset moe_w4a16

In this order, as far as --budget lasts: compile for these GPUs and make goldens, on all cores; the
gate on each GPU alone, all at once; on 2, 4, .. and all GPUs, there with receipts; a worker killed
in the middle of a case; a K2.6 layer split over 1, 2, 4, .. GPUs. With --subset the runs that are
compared take these specs alone, and the whole gate runs once, first, on all GPUs, unless --no-whole
says that another call has done that. Cases for k GPUs run where k are.

Written to --out: many-gpus.json, many-gpus.md, and report and log of each run. Exit 0 if every
verdict is a pass but that of the killed case, no bits differ, and nothing was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path.cwd())]

from ci.legs import Leg, Sampler, differences, markdown  # noqa: E402
from harness import devices, golden, merge, report, spec, stages  # noqa: E402

TARGETS = {"9.0": "sm_90a", "10.0": "sm_100", "12.0": "sm_120"}
PREPARE_SHARE = 0.4  # of the budget, at most
WHOLE_SHARE = 0.6  # of what is left, where the whole gate comes first
LAST_S = 30.0  # to write everything
HOLD_S = 60.0  # for the replacement of a killed worker
POLL_S = 0.005
CASES_A_WORKER = 60  # of the run in which one is killed: it takes seconds to replace it
GOLDEN_WORKERS = 20  # goldens at real shapes take gigabytes each
OF_RANKS = Path("tests", "scale", "k26_ranks.py")


class Watch:
    """What the workers of a session are at, from the last words that each keeps (harness/seat.py).

    Workers are numbered: one that replaces another has a number that the first ones had not.
    """

    def __init__(self, folder: Path, workers: int):
        self.folder, self.workers = folder, workers
        self.cases: dict[Path, list[str]] = {}  # of each worker, in the order in which they begin
        self.pids: dict[Path, int] = {}

    def look(self) -> Path | None:
        """A worker that has begun its second case, or a later one, since the last look."""
        begun = None
        for file in sorted(self.folder.glob("kdtr-run-*/gw*")):
            try:
                head = json.loads(file.read_text(errors="replace").partition("\n")[0])
            except (OSError, ValueError):  # gone, or not yet written
                continue
            cases = self.cases.setdefault(file, [])
            if "pid" in head and head["id"] not in cases:
                self.pids[file] = head["pid"]
                cases.append(head["id"])
                if len(cases) > 1:
                    begun = file
        return begun

    def others(self, worker: Path) -> list[int]:
        return [pid for file, pid in self.pids.items() if file != worker]

    def later(self, worker: Path) -> list[str]:
        """Cases of the workers of that session that came after its first ones."""
        return [
            case
            for file, cases in self.cases.items()
            if file.parent == worker.parent and int(file.name.removeprefix("gw")) >= self.workers
            for case in cases
        ]


class Runs:
    """All runs of one call, against its budget."""

    def __init__(self, asked: argparse.Namespace, choice: devices.Choice):
        self.asked, self.choice = asked, choice
        self.gpus = [gpu.uuid for gpu in choice.gpus[: asked.gpus]]
        self.out: Path = asked.out
        narrowed = devices.Choice(choice.device, choice.gpus[: asked.gpus], "")
        self.pairs = stages.select(stages.load_specs(Path.cwd()), narrowed).here
        self.started = time.monotonic()
        self.sampler = Sampler()
        self.legs: list[Leg] = []
        self.processes: list[Any] = []
        self.steps: dict[str, float] = {}
        self.kill: dict[str, Any] = {}
        self.ranks: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def left(self) -> float:
        return self.asked.budget - (time.monotonic() - self.started)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {line}", flush=True)

    def all(self) -> None:
        gpus, subset = self.gpus, self.asked.subset
        self.prepare()
        if subset and self.asked.whole:  # first, for its receipts
            self.together([Leg("whole", gpus)], [], receipt=True, share=WHOLE_SHARE)
        alone = gpus if self.asked.alone is None else gpus[: self.asked.alone]
        if alone:
            self.together([Leg(f"alone-{i}", [gpu]) for i, gpu in enumerate(alone)], subset)
        for count in self.asked.on or _doubling(len(gpus))[1:]:
            last = count == len(gpus) and not subset
            self.together([Leg(f"on-{count}", gpus[:count])], subset, receipt=last)
        self.killed()
        self.split()
        self.sampler.close()

    # -- before the first run

    def prepare(self) -> None:
        """Compile for these GPUs, and make the goldens of the runs that are compared."""
        since, limit = time.monotonic(), PREPARE_SHARE * self.asked.budget
        compiling = None
        if self.choice.device == "cuda" and not self.asked.compiled:
            target = TARGETS.get(self.choice.gpus[0].compute, "sm_90a")
            command = [
                sys.executable,
                "-m",
                "engine.compile_gate",
                "--target",
                target,
                "--only-cache",
            ]
            with (self.out / "compile.log").open("w") as log:
                compiling = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        wanted = {*self.asked.subset, *self.asked.kill}
        pairs = [p for p in self.pairs if not wanted or p[0].stem in wanted]
        made = _make_goldens(pairs, limit)
        self.say(f"goldens: {made} of {len(pairs)} in {time.monotonic() - since:.1f} s")
        if compiling:
            try:
                compiling.wait(max(1.0, limit - (time.monotonic() - since)))
            except subprocess.TimeoutExpired:
                os.killpg(compiling.pid, signal.SIGKILL)  # its workers too
                self.problems.append("compiling was not done in time")
        self.steps["prepare"] = round(time.monotonic() - since, 1)
        self.say(f"prepared in {self.steps['prepare']} s")

    # -- the gate

    def together(
        self,
        legs: Sequence[Leg],
        names: Sequence[str],
        *,
        receipt: bool = False,
        share: float = 1.0,
    ) -> None:
        """Run the legs at once, until they are done or this share of what is left of the budget."""
        since = time.monotonic()
        until = since + share * max(0.0, self.left() - LAST_S)
        workers = self.asked.workers if receipt else "auto"
        running = [(leg, self.start(leg, names, receipt, workers)) for leg in legs]
        ends: dict[str, float] = {}
        while len(ends) < len(running):
            for leg, process in running:
                if process.poll() is not None:
                    ends.setdefault(leg.name, time.monotonic())
            if time.monotonic() > until:
                for leg, process in running:
                    if leg.name not in ends and process.poll() is None:
                        self.problems.append(f"{leg.name} was interrupted: the budget is spent")
                        _interrupt(process)
            time.sleep(0.05)
        for leg, process in running:
            self.finish(leg, process, since, ends[leg.name])

    def start(
        self, leg: Leg, names: Sequence[str], receipt: bool = False, workers: str = "auto",
        **environ: str,
    ) -> Any:  # fmt: skip
        folder = self.out / leg.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "harness.cli", "gate", "-n", workers, "--keep-going"]
        command += ["--report", str(folder)]
        for name in names:
            command += ["--spec", name]
        if receipt and self.choice.device == "cuda":
            command.append("--receipt")
        visible = {devices.VISIBLE: ",".join(leg.gpus), **environ}
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **visible}, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def finish(self, leg: Leg, process: Any, since: float, end: float) -> None:
        leg.seconds, leg.done = end - since, process.returncode in (0, 1)
        leg.used = self.sampler.mean(since, end, leg.gpus)
        try:
            leg.found = merge.read(self.out / leg.name)
        except merge.MergeError as error:
            self.problems.append(f"{leg.name}: {error}")
        self.legs.append(leg)
        totals = leg.found.get("totals", {})
        self.say(
            f"{leg.name}: {totals.get('passed', 0)} passed, {totals.get('failed', 0)} failed on "
            f"{len(leg.gpus)} GPUs in {leg.seconds:.1f} s"
        )

    # -- a worker is killed

    def killed(self) -> None:
        """Kill a worker in the middle of a case, and see what becomes of the case and the GPU. The
        other workers are held until its replacement has begun, so that there is work left."""
        if self.left() < 2 * LAST_S:
            self.problems.append("no worker was killed: the budget is spent")
            return
        leg, words = Leg("killed", self.gpus), (self.out / "killed-tmp").absolute()
        shutil.rmtree(words, ignore_errors=True)
        words.mkdir(parents=True)
        since = time.monotonic()
        names = self.asked.kill or _some(self.pairs, CASES_A_WORKER * len(self.gpus))
        process = self.start(leg, names, TMPDIR=str(words))
        watch = Watch(words, len(self.gpus))
        victim: Path | None = None
        case, held, until = "", [], 0.0
        while process.poll() is None:
            begun = watch.look()
            if victim is None and begun is not None:
                victim, case, until = begun, watch.cases[begun][-1], time.monotonic() + HOLD_S
                os.kill(watch.pids[victim], signal.SIGKILL)
                held = watch.others(victim)
                _signal(held, signal.SIGSTOP)
            if held and victim:
                out_of_time = time.monotonic() > until or self.left() < LAST_S
                if out_of_time or watch.later(victim):
                    _signal(held, signal.SIGCONT)
                    held = []
            if self.left() < LAST_S:
                _interrupt(process)
            time.sleep(POLL_S)
        self.finish(leg, process, since, time.monotonic())
        shutil.rmtree(words, ignore_errors=True)
        if victim is None:
            self.problems.append("no worker was killed: too few cases ran")
            return
        gpu, later = leg.ran_on.get(case, []), watch.later(victim)
        statuses = {each["id"]: each["status"] for each in leg.cases}
        crashed = [name for name, status in statuses.items() if status == report.Status.CRASHED]
        self.kill = {
            "case": case, "status": statuses.get(case, "no verdict"), "gpu": gpu,
            "crashed": crashed, "cases_of_the_replacement": len(later),
            "replacement_on_the_same_gpu": bool(later)
            and all(leg.ran_on.get(name) == gpu for name in later),
        }  # fmt: skip
        if len(crashed) != 1 or not self.kill["replacement_on_the_same_gpu"]:
            self.problems.append(f"after a worker was killed: {self.kill}")

    # -- ranks

    def split(self) -> None:
        """A K2.6 layer on 1, 2, 4, .. GPUs: time, and bits against one GPU."""
        if self.choice.device != "cuda" or not OF_RANKS.exists():
            return
        found = self.out / "ranks.json"
        command = [sys.executable, "-m", "tests.scale.k26_ranks", "--json", str(found)]
        command += ["--nodes", "1", "16", "64", "--nccl", *map(str, _doubling(len(self.gpus)))]
        environ = {**os.environ, devices.VISIBLE: ",".join(self.gpus)}
        since = time.monotonic()
        with (self.out / "ranks.log").open("w") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
            try:
                process.wait(max(1.0, self.left() - LAST_S))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.steps["ranks"] = round(time.monotonic() - since, 1)
        if process.returncode or not found.exists():
            self.problems.append(f"the layer on ranks ended with {process.returncode}: ranks.log")
            return
        self.ranks = json.loads(found.read_text())
        self.problems += [
            f"K2.6 layer, {row['on']}, {row['nodes']} rows: other bits than one GPU"
            for row in self.ranks
            if not row["bits_of_one_gpu"]
        ]

    # -- the end

    def write(self) -> int:
        """many-gpus.json and many-gpus.md; the exit code."""
        unlike, shared = differences(self.legs)
        self.problems += unlike
        killed = self.kill.get("crashed", [])
        for leg in self.legs:
            self.problems += [
                f"{leg.name}: {case['id']} {case['status']}"
                for case in leg.cases
                if not case["ok"] and not (leg.name == "killed" and case["id"] in killed)
            ]
        names = sorted({gpu.name for gpu in self.choice.gpus})
        found = {
            "version": 1,
            "gpus": [
                {"uuid": g.uuid, "name": g.name, "driver": g.driver} for g in self.choice.gpus
            ],
            "device": self.choice.device,
            "cores": devices.cores(),
            "subset": self.asked.subset,
            "seconds": round(time.monotonic() - self.started, 1),
            "steps": self.steps,
            "legs": [leg.as_json() for leg in self.legs],
            "cases_on_several_gpus": shared,
            "killed": self.kill,
            "ranks": self.ranks,
            "problems": self.problems,
        }
        report.replace_file(
            self.out / "many-gpus.json", (json.dumps(found, indent=1) + "\n").encode()
        )
        if self.choice.device == "cuda" and Path("ci", "receipts").is_dir():
            shutil.copytree(Path("ci", "receipts"), self.out / "receipts", dirs_exist_ok=True)
        text = markdown(found, " and ".join(names))
        report.replace_file(self.out / "many-gpus.md", text.encode())
        print(text, flush=True)
        return 1 if self.problems else 0


def _doubling(count: int) -> list[int]:
    """1, 2, 4, .. and `count`."""
    return sorted({1 << i for i in range(count.bit_length()) if 1 << i <= count} | {count})


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _interrupt(process: Any) -> None:
    """End the gate, which ends its cases and writes the report of what it has."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(0.75 * LAST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _make_goldens(pairs: Sequence[stages.Pair], limit_s: float) -> int:
    """Make goldens on the cores into the cache, large ones first; how many were done in time."""
    paths = [(str(one.path), case.name) for one, case in sorted(pairs, key=_elements)]
    workers = min(GOLDEN_WORKERS, max(1, devices.cores() - 1))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, max(1, len(paths))), mp_context=context)
    futures = [pool.submit(_golden, *each) for each in paths]
    done, _ = wait(futures, timeout=limit_s)
    for process in list((pool._processes or {}).values()):
        if len(done) < len(futures):
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return sum(future.exception() is None for future in done)


def _elements(pair: stages.Pair) -> int:
    """Minus the elements of all tensors of a case."""
    one, case = pair
    return -sum(math.prod(shape) for shape in one.shapes(case).values())


def _some(pairs: Sequence[stages.Pair], count: int) -> list[str]:
    """Names of specs of kernels that have `count` cases together."""
    names: dict[str, int] = {}
    for one, case in pairs:
        if one.stage == "kernel" and case.gpus == 1 and sum(names.values()) < count:
            names[one.stem] = names.get(one.stem, 0) + 1
    return list(names)


def _golden(path: str, case: str) -> None:
    loaded = spec.load(path)
    golden.make(loaded, loaded.cases[case])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.many_gpus", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=int, required=True, help="how many GPUs to use")
    parser.add_argument("--subset", action="append", default=[], metavar="NAME", help="a spec")
    parser.add_argument(
        "--alone", type=int, metavar="K", help="run it alone on K GPUs, at once (default: on each)"
    )
    parser.add_argument(
        "--on", type=int, action="append", metavar="K", help="and on K GPUs (default: 2, 4, .. all)"
    )
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="NAME",
        help="a spec of the run in which a worker is killed",
    )
    parser.add_argument(
        "--workers", default="auto", metavar="N",
        help="of the run with receipts; with more than GPUs, goldens are made meanwhile",
    )  # fmt: skip
    parser.add_argument(
        "--whole", action=argparse.BooleanOptionalAction, default=True,
        help="with --subset: the whole gate, with receipts",
    )  # fmt: skip
    parser.add_argument(
        "--compiled", action="store_true", help="the cubins are in the cache (KDTR_CACHE)"
    )
    parser.add_argument("--budget", type=float, default=7200.0, metavar="S", help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("report", "many-gpus"))
    asked = parser.parse_args(arguments)
    try:
        choice = devices.choose("auto")
    except devices.DeviceError as error:
        parser.error(str(error))
    if not 1 <= asked.gpus <= len(choice.gpus):
        parser.error(f"--gpus {asked.gpus}: there are {len(choice.gpus)} ({choice.why})")
    asked.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(asked, choice)
    try:
        runs.all()
    finally:
        for process in runs.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        runs.sampler.close()
        code = runs.write()
    return code


if __name__ == "__main__":
    sys.exit(main())
