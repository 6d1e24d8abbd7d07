"""Can a spec fail? Mutants are planted, one at a time, and the spec's cases must kill them.

What comes out is the spec's kill certificate (harness/certificates.py). Mutants are made by
harness/mutants.py and judged in processes of their own (harness/nursery.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import certificates, golden, mutants, nursery, sources
from harness import spec as specs
from harness.certificates import (
    CERTIFIED,
    EQUIVALENT,
    FOR_A_GPU,
    INVALID,
    KILLED,
    SURVIVED,
    VACUOUS,
)
from harness.mutants import Planted
from harness.report import Status
from harness.spec import Case, Spec

COUNT = 8  # generic mutants of a kernel
COUNT_GOLDEN = 4  # and of an oracle
# For a case whose own time is not known: processor time in the simulator, time on a GPU.
LIMIT_S = {"sim": 300.0, "cuda": 60.0}


# -- processes -------------------------------------------------------------------------------------


class Pool:
    """`workers` processes that judge jobs, in the simulator or on the GPU that is visible."""

    def __init__(self, root: Path, workers: int, device: str = "sim"):
        self.root, self.device = root, device
        self._threads = ThreadPoolExecutor(workers)
        self._idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self._started: list[subprocess.Popen] = []
        self._ended = False

    def submit(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._threads.submit(self._judge, job)

    def close(self, *, now: bool = False) -> None:
        """Wait for what is queued, or with `now` end it."""
        if now:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._ended = True  # what a thread starts after this it ends itself
            for process in self._started:
                _kill(process)
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            process.wait()

    def _judge(self, job: dict[str, Any]) -> dict[str, Any]:
        if self.device == "cuda":
            return self._once(job)
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"harness.nursery ended with {process.wait()}; it says why on stderr"
            )
        self._idle.put(process)
        return json.loads(answer)

    def _start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": str(int(self.device == "sim"))}
        environment |= variables
        environment.setdefault("OMP_NUM_THREADS", "1")
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.nursery", *arguments],
            cwd=self.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # with its children, in a group of its own
        )
        self._started.append(process)
        if self._ended:
            _kill(process)
        return process

    def _once(self, job: dict[str, Any]) -> dict[str, Any]:
        variables = {"KDTR_CACHE": job["cache"]} if job.get("cache") else {}
        process = self._start("--once", **variables)
        limit_s = 60 + sum(job["limits"].values())
        try:
            answer, _ = process.communicate(json.dumps(job) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return nursery.lost(job, Status.TIMEOUT, f"no verdict after {limit_s:g} s")
        if self._ended:  # then it was killed, and its mutant was not
            raise RuntimeError("the run ended before its verdict")
        try:
            return json.loads(answer)
        except ValueError:
            message = f"its process ended with {process.returncode} and no verdict"
            return nursery.lost(job, Status.CRASHED, message)


def _kill(process: subprocess.Popen) -> None:
    """End a process and its children, if it has not ended: its number may be another's by then."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def pool(root: Path, workers: int, device: str = "sim") -> Iterator[Pool]:
    made = Pool(root, workers, device)
    try:
        yield made
    except BaseException:
        made.close(now=True)
        raise
    made.close()


# -- one spec --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Honest:
    """How one case of the kernel as it is came out, and which lines of its file it reached."""

    case: str
    ok: bool
    status: str
    headroom: float | None
    seconds: float
    reached: frozenset[int]


@dataclass
class Examination:
    """The mutants of one spec against its cases."""

    spec: Spec
    pool: Pool
    folder: Path  # for the mutants' files
    siblings: Sequence[Spec] = ()  # other specs of the same module
    count: int = COUNT
    honest: dict[str, Honest] = field(default_factory=dict)

    def module(self) -> str:
        return mutants.default_module(self.spec)

    def sources(self) -> dict[str, str]:
        """Source of every module that the spec's mutants change."""
        names = {self.module(), *(m.module for m in self.spec.mutants if m.module)}
        return {name: _source(name) for name in sorted(names)}

    def planted(self, only: Collection[str] | None = None) -> tuple[list[Planted], list[Planted]]:
        """The named mutants, and the generic ones, all or `only` these, in the order in which they
        are drawn."""
        texts = self.sources()
        own = mutants.named(self.spec, texts)
        return own, mutants.generic(self.spec, self.module(), texts[self.module()], only)

    def wanted(self) -> int:
        """How many generic mutants are drawn; above the kernels only a launcher that does nothing
        is, because each costs a whole pass."""
        if self.spec.stage == "golden":
            return min(COUNT_GOLDEN, self.count)
        if self.spec.stage != "kernel" or self.module().startswith("tests."):
            return 1  # a launcher of tests/ puts other files' kernels together and belongs to us
        return self.count if mutants.has_kernels(_source(self.module())) else 1

    def cases(self) -> list[Case]:
        cases = list(self.spec.cases.values())
        if self.spec.stage == "golden":
            return cases
        if self.pool.device == "sim":
            return [case for case in cases if case.sim]
        return [case for case in cases if case.gpus == 1 and not case.unsupported]

    def run_honest(self) -> None:
        """Judge the kernel as it is, case by case, and see which statements each case reaches."""
        text = mutants.instrumented(_source(self.module()))
        covered = self.file("reached", text)
        found = {
            case.name: self.pool.submit(self.job([case.name], self.module(), covered, cover=True))
            for case in self.cases()
        }
        for name, future in found.items():
            result = future.result()
            if result["flaw"] and not result["runs"]:
                raise RuntimeError(f"{self.spec.id}: {result['flaw']}")
            run = result["runs"][0]
            self.honest[name] = Honest(
                name,
                run["ok"],
                run["status"],
                _number(run["headroom"]),
                run["seconds"],
                frozenset(run["reached"]),
            )

    def order(self, mutant: Planted) -> list[str]:
        """The cases that reach a mutant, the cheapest first."""
        by_cost = sorted(
            (
                h
                for h in self.honest.values()
                if h.ok and (not mutant.line or self.reaches(h, mutant))
            ),
            key=lambda h: (h.seconds, h.case),
        )
        return [h.case for h in by_cost]

    def reaches(self, honest: Honest, mutant: Planted) -> bool:
        return mutant.module != self.module() or mutant.line in honest.reached

    def judge(
        self, mutant: Planted, cases: Sequence[str], *, of: Spec | None = None
    ) -> Callable[[], dict[str, Any]]:
        """Start on a mutant; what is returned waits for its row of the certificate. of: the spec
        whose cases they are, where it is a sibling."""
        row = {"name": mutant.name, "operator": mutant.operator, "module": mutant.module}
        if mutant.gpu and not mutant.flaw and self.pool.device == "sim":
            return lambda: {**row, "outcome": FOR_A_GPU, "why": mutant.gpu}
        if mutant.flaw or not cases:
            outcome, _, why = mutant.flaw.partition(": ")
            if not mutant.flaw:
                outcome, why = SURVIVED, "no case reaches it"
            return lambda: {**row, "outcome": outcome, "why": why}
        key = hashlib.sha256(f"{mutant.module}\0{mutant.name}".encode()).hexdigest()[:16]
        file = self.file(key, mutant.source)
        job = self.job(cases, mutant.module, file, of=of)
        on_device = self.spec.stage == "kernel" or mutants.has_device_code(mutant.source)
        if self.pool.device == "cuda" and on_device:
            job["cache"] = str(self.own_cache(key))
        future = self.pool.submit(job)
        return lambda: {**row, **self.outcome(mutant, future.result(), of)}

    def elsewhere(self, mutant: Planted, row: dict[str, Any]) -> dict[str, Any]:
        """The row of a survivor that another spec of the same file kills. What the cases of one
        spec cannot show (a batch, another dtype) is there for the others to show."""
        for sibling in self.siblings:
            cases = [case.name for case in _cheapest(sibling)]
            found = self.judge(mutant, cases, of=sibling)()
            if found["outcome"] == KILLED:
                return found
        return row

    def outcome(
        self, mutant: Planted, result: Mapping[str, Any], of: Spec | None
    ) -> dict[str, Any]:
        if result["flaw"]:
            return {"outcome": INVALID, "why": result["flaw"].removeprefix("INVALID: ")[:200]}
        runs = result["runs"]
        last = runs[-1]
        if last["ok"]:
            if mutant.reason:
                return {"outcome": EQUIVALENT, "why": mutant.reason}
            return {"outcome": SURVIVED, "why": f"{len(runs)} cases pass"}
        case = f"{of.stem}::{last['case']}" if of else last["case"]
        found = {"outcome": KILLED, "case": case, "verdict": last["status"]}
        if not of and (excess := _number(last["excess"])) is not None:
            found["excess"] = certificates.rounded(excess)
        if mutant.reason:
            found["why"] = f"it is said to change nothing: {mutant.reason}"
        return found

    def job(
        self,
        cases: Sequence[str],
        module: str,
        file: Path,
        *,
        cover: bool = False,
        of: Spec | None = None,
    ) -> dict[str, Any]:
        known = {} if of else self.honest
        limits = {
            name: 5 + 10 * known[name].seconds if name in known else LIMIT_S[self.pool.device]
            for name in cases
        }
        return {
            "spec": str((of or self.spec).path.resolve()),
            "module": module,
            "file": str(file),
            "cases": list(cases),
            "limits": limits,
            "cover": cover,
        }

    def file(self, key: str, text: str) -> Path:
        path = self.folder / f"{self.spec.stem}.{key}.py"
        path.write_text(text, encoding="utf-8")
        return path

    def own_cache(self, key: str) -> Path:
        """A KDTR_CACHE for one mutant, but for goldens, which all share.

        The engine keeps machine code under a digest of the files in the tree, and a mutant is in
        none of them: it would be judged by the machine code of the kernel as it is, or leave its
        own for that kernel to find."""
        home = self.folder / f"{self.spec.stem}.{key}.cache"
        if not home.exists():
            home.mkdir()
            shared = golden.cache_path(self.spec, "", None).parent
            shared.mkdir(parents=True, exist_ok=True)
            (home / "goldens").symlink_to(shared.resolve())
        return home

    def run(self, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """The certificate; `before` is the one that it replaces."""
        self.run_honest()
        own, generic = self.planted()
        waiting = [self.judge(mutant, self.order(mutant)) for mutant in own]
        reached = {line for h in self.honest.values() for line in h.reached}
        drawn = mutants.draw(generic, len(generic), reached)
        wanted = self.wanted()
        rows: list[dict[str, Any]] = []
        while drawn and (short := wanted - sum(r["outcome"] != INVALID for r in rows)) > 0:
            batch = [self.judge(mutant, self.order(mutant)) for mutant in drawn[:short]]
            del drawn[:short]
            rows += [wait() for wait in batch]
        by_name = {mutant.name: mutant for mutant in generic}
        rows = [
            self.elsewhere(by_name[row["name"]], row) if row["outcome"] == SURVIVED else row
            for row in rows
        ]
        return self.certificate([wait() for wait in waiting] + rows, before)

    def certificate(
        self, rows: list[dict[str, Any]], before: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        dead = {r["name"] for r in (before or {}).get("mutants", ()) if certificates.was_killed(r)}
        for row in rows:
            if row["outcome"] in (SURVIVED, EQUIVALENT) and row["name"] in dead:
                row["revived"] = True
        content = {
            "version": 1,
            "spec": self.spec.id,
            "device": self.pool.device,
            "digest": sources.digest(self.spec),
            "honest": [
                {"case": h.case, "verdict": h.status, "headroom": certificates.rounded(h.headroom)}
                for h in sorted(
                    self.honest.values(), key=lambda h: list(self.spec.cases).index(h.case)
                )
            ],
            "mutants": rows,
        }
        content["calibration"] = certificates.calibration(self.spec, content)
        content["score"] = certificates.score(rows)
        content["problems"] = certificates.problems(self.spec, content)
        content["verdict"] = VACUOUS if content["problems"] else CERTIFIED
        return certificates.sealed(content)


def _cheapest(spec: Spec) -> list[Case]:
    """The simulator's cases of a spec, the smallest tensors first."""
    cases = (case for case in spec.cases.values() if case.sim)
    return sorted(cases, key=lambda case: size(spec, case))


def size(spec: Spec, case: Case) -> int:
    """Elements of all tensors of a case."""
    return sum(math.prod(shape) for shape in spec.shapes(case).values())


def _source(module: str) -> str:
    found = specs.find_module(module)
    if found is None or not found.origin or not found.origin.endswith(".py"):
        raise LookupError(f"{module}: there is no source to plant a fault in")
    return Path(found.origin).read_text(encoding="utf-8")


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


# -- all of them -----------------------------------------------------------------------------------


def examine(
    root: Path,
    chosen: Sequence[Spec],
    *,
    everything: Sequence[Spec],
    workers: int,
    count: int = COUNT,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Make and write the certificate of each spec, in the simulator; everything: all specs."""

    def one(spec: Spec) -> dict[str, Any]:
        try:
            before = certificates.read(root, spec)
        except ValueError:
            before = None
        family = [s for s in everything if _family(s) == _family(spec) and s.id != spec.id]
        certificate = Examination(spec, judges, Path(folder), family, count).run(before)
        certificates.write(root, spec, certificate)
        say(certificates.line(spec, certificate))
        return certificate

    with (
        tempfile.TemporaryDirectory(prefix="kdtr-mutants-") as folder,
        ThreadPoolExecutor(workers + 1) as threads,
        pool(root, workers) as judges,  # ends first, so that who waits for a verdict ends too
    ):
        return all_of(threads, one, chosen)


def _family(spec: Spec) -> str:
    return mutants.default_module(spec) if spec.stage == "kernel" else spec.id


def check(
    root: Path,
    chosen: Sequence[Spec],
    *,
    workers: int,
    part: float = 1.0,
    say: Callable[[str], None] = print,
) -> list[str]:
    """What is wrong with the certificates: missing, damaged, made from other sources, VACUOUS, or
    no longer what comes out when `part` of their mutants (chosen by content) are judged again in
    the simulator. harness/mutate_gpu.py judges them on a GPU."""

    def one(spec: Spec) -> list[str]:
        said = certificates.standing(root, spec)
        if not said:
            certificate = certificates.read(root, spec)
            assert certificate is not None
            said = again(Examination(spec, judges, Path(folder)), certificate, part)
        for problem in said:
            say(f"FAILED {spec.id}: {problem}")
        return [f"{spec.id}: {problem}" for problem in said]

    with (
        tempfile.TemporaryDirectory(prefix="kdtr-mutants-") as folder,
        ThreadPoolExecutor(workers + 1) as threads,
        pool(root, workers) as judges,  # ends first, so that who waits for a verdict ends too
    ):
        return [problem for found in all_of(threads, one, chosen) for problem in found]


def all_of(threads: ThreadPoolExecutor, one: Callable[[Spec], Any], chosen: Sequence[Spec]) -> list:
    """`one` of each, in order. Waits in short steps: one long wait would not hear an interrupt that
    came just before it, or to another thread."""
    futures = [threads.submit(one, spec) for spec in chosen]
    try:
        while True:
            done, left = wait_for(futures, 0.2, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not left:
                return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def again(examination: Examination, certificate: Mapping[str, Any], part: float) -> list[str]:
    """Judge a certificate's mutants again: the dead by the case that killed them, those that change
    nothing by two."""
    spec = examination.spec
    own, generic = examination.planted({row["name"] for row in certificate["mutants"]})
    planted = {(p.module, p.name): p for p in [*own, *generic]}
    cases = [h["case"] for h in certificate["honest"]][:2]
    waiting: list[tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]] = []
    said = []
    for row in certificate["mutants"]:
        mutant = planted.get((row["module"], row["name"]))
        if mutant is None:
            said.append(f"{row['name']} is in its certificate and cannot be made any more")
        elif row["outcome"] == KILLED and drawn(spec, mutant, part):
            of, case = killer(spec, row)
            waiting.append((row, examination.judge(mutant, [case], of=of)))
        elif row["outcome"] == EQUIVALENT and drawn(spec, mutant, part):
            waiting.append((row, examination.judge(mutant, cases)))
    for row, wait in waiting:
        now = wait()
        if now["outcome"] != row["outcome"]:
            said.append(f"{row['name']} was {row['outcome']} and is {now['outcome']} now")
    return said


def killer(spec: Spec, row: Mapping[str, Any]) -> tuple[Spec | None, str]:
    """The case that killed a mutant, and the sibling whose case it is, if it is not the spec's."""
    stem, _, case = row["case"].rpartition("::")
    return (specs.load(spec.path.with_name(f"{stem}.toml")) if stem else None), case


def drawn(spec: Spec, mutant: Planted, part: float) -> bool:
    """Whether a check of a part of all mutants takes this one: by its content and its spec's."""
    text = f"{sources.digest(spec)}\0{mutant.name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") < part * 2**32
