"""Can a spec fail? Mutants are planted, one at a time, and the spec's cases must kill them.

The result is a kill certificate, `ci/certificates/<spec>.json`: each mutant with the case and the
verdict that killed it, survivors with the written reason why they change nothing, the headroom of
the honest kernel, and for float specs the calibration of the bound from both sides: the honest
kernel far inside it, every named fault outside. A certificate holds the digest of what it is about
and of itself. A spec with a survivor that nobody explained, or without a kill, is VACUOUS.

What an earlier certificate says was killed must not live again, whatever reason is given: that is
how a loosened bound shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import mutants, nursery, sources
from harness import spec as specs
from harness.mutants import Planted
from harness.report import Status, replace_file
from harness.spec import Case, Spec

FOLDER = Path("ci", "certificates")
COUNT = 8  # generic mutants of a kernel
COUNT_GOLDEN = 4  # and of an oracle
# For a case whose own time is not known: processor time in the simulator, time on a GPU.
LIMIT_S = {"sim": 300.0, "cuda": 60.0}
HONEST = 0.5  # share of its bound that the honest kernel may use

KILLED, SURVIVED, EQUIVALENT = "killed", "survived", "equivalent"
FOR_A_GPU = "for a GPU"  # the simulator cannot show it, the spec says why
INVALID, EQUAL, STALE = "INVALID", "EQUAL", "STALE"
CERTIFIED, VACUOUS = "CERTIFIED", "VACUOUS"


# -- processes -------------------------------------------------------------------------------------


class Pool:
    """`workers` processes that judge jobs, in the simulator or on the GPU that is visible."""

    def __init__(self, root: Path, workers: int, device: str = "sim"):
        self.root, self.device = root, device
        self._threads = ThreadPoolExecutor(workers)
        self._idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self._started: list[subprocess.Popen] = []

    def submit(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._threads.submit(self._judge, job)

    def close(self, *, now: bool = False) -> None:
        """Wait for what is queued, or with `now` end it."""
        if now:
            for process in self._started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            if process.stdin:
                process.stdin.close()
            process.wait()

    def _judge(self, job: dict[str, Any]) -> dict[str, Any]:
        if self.device == "cuda":
            return self._once(job)
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
            self._started.append(process)
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

    def _start(self, *arguments: str) -> subprocess.Popen:
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": str(int(self.device == "sim"))}
        environment.setdefault("OMP_NUM_THREADS", "1")
        return subprocess.Popen(
            [sys.executable, "-m", "harness.nursery", *arguments],
            cwd=self.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # with its children, in a group of its own
        )

    def _once(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._start("--once")
        limit_s = 60 + sum(job["limits"].values())
        try:
            answer, _ = process.communicate(json.dumps(job) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return nursery.lost(job, Status.TIMEOUT, f"no verdict after {limit_s:g} s")
        try:
            return json.loads(answer)
        except ValueError:
            message = f"its process ended with {process.returncode} and no verdict"
            return nursery.lost(job, Status.CRASHED, message)


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

    def planted(self) -> tuple[list[Planted], list[Planted]]:
        """The named mutants, and all generic ones in the order in which they are drawn."""
        texts = self.sources()
        own = mutants.named(self.spec, texts)
        return own, mutants.generic(self.spec, self.module(), texts[self.module()])

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
        future = self.pool.submit(self.job(cases, mutant.module, file, of=of))
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
            found["excess"] = _rounded(excess)
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
        dead = {r["name"] for r in (before or {}).get("mutants", ()) if _was_killed(r)}
        for row in rows:
            if row["outcome"] in (SURVIVED, EQUIVALENT) and row["name"] in dead:
                row["revived"] = True
        content = {
            "version": 1,
            "spec": self.spec.id,
            "device": self.pool.device,
            "digest": sources.digest(self.spec),
            "honest": [
                {"case": h.case, "verdict": h.status, "headroom": _rounded(h.headroom)}
                for h in sorted(
                    self.honest.values(), key=lambda h: list(self.spec.cases).index(h.case)
                )
            ],
            "mutants": rows,
        }
        content["calibration"] = calibration(self.spec, content)
        content["score"] = score(rows)
        content["problems"] = problems(self.spec, content)
        content["verdict"] = VACUOUS if content["problems"] else CERTIFIED
        return sealed(content)


def _cheapest(spec: Spec) -> list[Case]:
    """The simulator's cases of a spec, the smallest tensors first."""

    def size(case: Case) -> int:
        return sum(math.prod(shape) for shape in spec.shapes(case).values())

    return sorted((case for case in spec.cases.values() if case.sim), key=size)


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or not found.origin or not found.origin.endswith(".py"):
        raise LookupError(f"{module}: there is no source to plant a fault in")
    return Path(found.origin).read_text(encoding="utf-8")


def bounded(spec: Spec, case: Case) -> bool:
    """Whether some output of the case is judged by a bound and not by equality."""
    return not case.exact and any(o.match.kind != "exact" for o in spec.outputs.values())


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def _rounded(value: float | None) -> float | str | None:
    """Three digits: enough to read, and the same on every machine. JSON has no infinity."""
    if value is None:
        return None
    return float(f"{value:.3g}") if value < float("inf") else "inf"


def _was_killed(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == KILLED or bool(row.get("revived"))


# -- what a certificate says -----------------------------------------------------------------------


def score(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Mutants by outcome. Only the killed count for the spec, and survivors count against it."""
    outcomes = (KILLED, SURVIVED, EQUIVALENT, FOR_A_GPU, INVALID, EQUAL, STALE)
    found = dict.fromkeys(outcomes, 0)
    for row in rows:
        found[row["outcome"]] += 1
    return found


def calibration(spec: Spec, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The bound from both sides; None for a spec without one.

    honest: the largest share of the bound that the kernel uses. least: the named mutant that comes
    nearest to the bound from outside, by its worst element in the case that killed it (where the
    spec names none, of the others). One that leaves NaN, or unwritten or foreign memory behind is
    beyond any bound.
    """
    if not any(bounded(spec, spec.cases[h["case"]]) for h in content["honest"]):
        return None
    rooms = [float(h["headroom"]) for h in content["honest"] if h["headroom"] is not None]
    dead = [row for row in content["mutants"] if row["outcome"] == KILLED]
    dead = [row for row in dead if row["operator"] == "named"] or dead
    excess = {row["name"]: float(row.get("excess", "inf")) for row in dead}
    honest = max(rooms, default=0.0)
    found: dict[str, Any] = {
        "honest": _rounded(honest), "least": None, "mutant": None, "distance": None,
    }  # fmt: skip
    if excess:
        least = min(excess, key=lambda name: excess[name])
        found |= {"least": _rounded(excess[least]), "mutant": least}
        found["distance"] = _rounded(excess[least] / honest) if honest else "inf"
    return found


def problems(spec: Spec, content: Mapping[str, Any]) -> list[str]:
    """Why the spec is VACUOUS: nothing means that it is certified."""
    said = [
        f"{h['case']} gives {h['verdict']} for the kernel as it is"
        for h in content["honest"]
        if not Status(h["verdict"]).ok
    ]
    rows = content["mutants"]
    if not any(row["outcome"] == KILLED for row in rows):
        said.append("no mutant is killed")
    for row in rows:
        outcome, name = row["outcome"], row["name"]
        if row.get("revived"):
            said.append(f"{name} lives again: an earlier certificate has it killed")
        elif outcome == SURVIVED:
            said.append(f"{name} survives ({row['why']})")
        elif outcome == KILLED and "why" in row:
            said.append(f"{name} is killed by {row['case']}, but {row['why']}")
        elif outcome in (INVALID, EQUAL, STALE) and row["operator"] == "named":
            said.append(f"{name} is {outcome}: {row['why']}")
    bound = content["calibration"]
    if bound and float(bound["honest"]) >= HONEST and not _in_steps(spec):
        said.append(f"the honest kernel uses {bound['honest']} of its bound, {HONEST} or more")
    if bound and not _in_steps(spec):
        if bound["least"] is not None and float(bound["least"]) <= 1:
            said.append(f"{bound['mutant']} is within the bound: {bound['least']} of it")
    return said


def _in_steps(spec: Spec) -> bool:
    """Whether errors are counted in ulps, so that one ulp of one is already the whole bound."""
    return all(o.match.kind in ("exact", "ulp") for o in spec.outputs.values())


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """With the digest of all else, so that an edit by hand shows."""
    return {**content, "seal": _seal(content)}


def _seal(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def path(root: Path, spec: Spec) -> Path:
    return root / FOLDER / f"{spec.stem}.json"


def read(root: Path, spec: Spec) -> dict[str, Any] | None:
    """The certificate on disk; None if there is none. ValueError if it is damaged."""
    file = path(root, spec)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["seal"] != _seal(content):
            raise ValueError("its seal is not that of its content")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a certificate: {error}") from None
    return content


def write(root: Path, spec: Spec, content: Mapping[str, Any]) -> Path:
    """One mutant a line, so that a difference can be read."""
    lists = {}
    for name in ("honest", "mutants"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in content[name])
        lists[name] = f"[\n{rows}\n ]" if rows else "[]"
    parts = [f' "{k}": {lists.get(k) or json.dumps(v)}' for k, v in content.items()]
    file = path(root, spec)
    replace_file(file, ("{\n" + ",\n".join(parts) + "\n}\n").encode())
    return file


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
            before = read(root, spec)
        except ValueError:
            before = None
        family = [s for s in everything if _family(s) == _family(spec) and s.id != spec.id]
        certificate = Examination(spec, judges, Path(folder), family, count).run(before)
        write(root, spec, certificate)
        say(line(spec, certificate))
        return certificate

    with (
        tempfile.TemporaryDirectory(prefix="kdtr-mutants-") as folder,
        pool(root, workers) as judges,
        ThreadPoolExecutor(workers + 1) as threads,
    ):
        return list(threads.map(one, chosen))


def _family(spec: Spec) -> str:
    return mutants.default_module(spec) if spec.stage == "kernel" else spec.id


def check(
    root: Path,
    chosen: Sequence[Spec],
    *,
    workers: int,
    device: str = "sim",
    part: float = 1.0,
    say: Callable[[str], None] = print,
) -> list[str]:
    """What is wrong with the certificates: missing, damaged, made from other sources, VACUOUS, or
    no longer what comes out when `part` of their mutants (chosen by content) are judged again."""

    def one(spec: Spec) -> list[str]:
        said = standing(root, spec)
        if not said:
            certificate = read(root, spec)
            assert certificate is not None
            said = again(Examination(spec, judges, Path(folder)), certificate, part)
        for problem in said:
            say(f"FAILED {spec.id}: {problem}")
        return [f"{spec.id}: {problem}" for problem in said]

    with (
        tempfile.TemporaryDirectory(prefix="kdtr-mutants-") as folder,
        pool(root, workers, device) as judges,
        ThreadPoolExecutor(workers + 1) as threads,
    ):
        return [problem for found in threads.map(one, chosen) for problem in found]


def standing(root: Path, spec: Spec) -> list[str]:
    """What can be said against a spec's certificate without running anything."""
    try:
        certificate = read(root, spec)
    except ValueError as error:
        return [str(error)]
    if certificate is None:
        return [f"VACUOUS: no certificate; kdtr mutate --spec {spec.stem} makes it"]
    if certificate["digest"] != sources.digest(spec):
        return [f"its certificate is stale; kdtr mutate --spec {spec.stem} makes it again"]
    return [f"VACUOUS: {problem}" for problem in certificate["problems"]]


def is_stale(root: Path, spec: Spec) -> bool:
    """Whether a spec's certificate is missing, damaged or made from other sources."""
    try:
        certificate = read(root, spec)
    except ValueError:
        return True
    return certificate is None or certificate["digest"] != sources.digest(spec)


def again(examination: Examination, certificate: Mapping[str, Any], part: float) -> list[str]:
    """Judge a certificate's mutants again: the dead by the case that killed them, those that change
    nothing by the two cheapest, on a GPU those that need one by all."""
    spec = examination.spec
    own, generic = examination.planted()
    planted = {(p.module, p.name): p for p in [*own, *generic]}
    cases = [h["case"] for h in certificate["honest"]][:2]
    on_gpu = examination.pool.device == "cuda"
    waiting: list[tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]] = []
    said = []
    for row in certificate["mutants"]:
        mutant = planted.get((row["module"], row["name"]))
        if mutant is None:
            said.append(f"{row['name']} is in its certificate and cannot be made any more")
        elif row["outcome"] == KILLED and _chosen(spec, mutant, part):
            stem, _, case = row["case"].rpartition("::")
            of = specs.load(spec.path.with_name(f"{stem}.toml")) if stem else None
            waiting.append((row, examination.judge(mutant, [case], of=of)))
        elif row["outcome"] == EQUIVALENT and _chosen(spec, mutant, part):
            waiting.append((row, examination.judge(mutant, cases)))
        elif row["outcome"] == FOR_A_GPU and on_gpu:
            every = [case.name for case in examination.cases()]
            waiting.append(({**row, "outcome": KILLED}, examination.judge(mutant, every)))
    for row, wait in waiting:
        now = wait()
        if now["outcome"] != row["outcome"]:
            said.append(f"{row['name']} was {row['outcome']} and is {now['outcome']} now")
    return said


def _chosen(spec: Spec, mutant: Planted, part: float) -> bool:
    """Whether a check of a part of all mutants takes this one: by its content and its spec's."""
    text = f"{sources.digest(spec)}\0{mutant.name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") < part * 2**32


def line(spec: Spec, certificate: Mapping[str, Any]) -> str:
    """A certificate in a line, and what is wrong with it in others."""
    counts = certificate["score"]
    said = f"{certificate['verdict']} {spec.stem}: " + ", ".join(
        f"{n} {outcome}" for outcome, n in counts.items() if n
    )
    bound = certificate["calibration"]
    if bound:
        said += f"; honest {bound['honest']}, least fault {bound['least']}"
    return "\n".join([said, *(f"  {problem}" for problem in certificate["problems"])])


def summary(root: Path, chosen: Sequence[Spec]) -> dict[str, Any]:
    """The report's section: every spec's certificate as it stands, and the score of all."""
    rows = []
    total = score(())
    for spec in chosen:
        said = standing(root, spec)
        row: dict[str, Any] = {
            "spec": spec.stem, "verdict": CERTIFIED, "problems": said, "survivors": [],
            "score": None, "calibration": None,
        }  # fmt: skip
        with contextlib.suppress(ValueError):
            certificate = read(root, spec)
            if certificate:
                row |= {k: certificate[k] for k in ("score", "calibration")}
                row["survivors"] = [
                    {"name": r["name"], "why": r["why"]}
                    for r in certificate["mutants"]
                    if r["outcome"] in (SURVIVED, EQUIVALENT, FOR_A_GPU)
                ]
                total = {k: n + certificate["score"].get(k, 0) for k, n in total.items()}
        if said:
            stale = len(said) == 1 and "stale" in said[0]
            row["verdict"] = "STALE" if stale else VACUOUS
        rows.append(row)
    decided = total[KILLED] + total[SURVIVED]
    share = total[KILLED] / decided if decided else None
    return {"specs": rows, "total": total, "killed_share": share}


def total(found: Mapping[str, Any]) -> str:
    """The summary in a line."""
    counts = found["total"]
    share = found["killed_share"]
    verdicts = [row["verdict"] for row in found["specs"]]
    said = f"{len(verdicts)} specs, " + ", ".join(
        f"{verdicts.count(v)} {v}" for v in (CERTIFIED, "STALE", VACUOUS) if v in verdicts
    )
    said += "; mutants: " + (
        ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) or "none"
    )
    return said if share is None else f"{said}; {100 * share:.1f}% killed"
