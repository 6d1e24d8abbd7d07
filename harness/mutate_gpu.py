"""The mutants of certificates, judged once more on a GPU.

A certificate is made in the simulator, which sees more than a GPU shows: an exception of Python, an
index beyond shared memory that hits nothing, threads in another order, a read before the barrier
that it needed, shared and local memory that starts as NaN. What died there of such a thing may live
on a GPU, and is listed, as is what the spec says a GPU need not show. What died of the values that
it left must die on a GPU too, and so must what the spec says is for a GPU alone.

A kill counts if the kernel as it is passes that case here: on a GPU that does not work all would
die.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import certificates
from harness.certificates import EQUIVALENT, FOR_A_GPU, INVALID, KILLED
from harness.mutants import Planted
from harness.mutate import Examination, all_of, drawn, killer, pool, size
from harness.report import Status
from harness.spec import Spec

# How a mutant came out. FAILED and NOT_JUDGED are no pass.
DIES, SAME, SIMULATORS = "die", "change nothing", "the simulator alone kills"
REFUSED, FAILED, NOT_JUDGED = "do not compile", "FAILED", "not judged"
GROUPS = (DIES, SAME, SIMULATORS, REFUSED, FAILED, NOT_JUDGED)

# What the simulator finds where a GPU may go on: it raised, ran the threads in another order, or
# read memory that nobody had written.
_SIMULATORS_OWN = {
    Status.CRASHED,
    Status.OUT_OF_BOUNDS,
    Status.NONDETERMINISTIC,
    Status.NONFINITE,
    Status.TIMEOUT,
}


@dataclass
class Found:
    """The mutants of one spec by group, and a line on each that a reader must know of."""

    spec: str
    counts: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)  # of those that die
    said: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.counts[FAILED] or self.counts[NOT_JUDGED])

    def add(self, group: str, text: str = "") -> None:
        self.counts[group] += 1
        if text:
            self.said.append(f"{group}: {text}")

    def __str__(self) -> str:
        verdicts = ", ".join(f"{n} {verdict}" for verdict, n in self.verdicts.most_common())
        said = counted(self.counts).replace(f" {DIES}", f" {DIES} ({verdicts})", 1)
        return "\n".join([f"{self.spec}: {said}", *(f"  {line}" for line in self.said)])


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[group]} {group}" for group in GROUPS if counts[group]) or "no mutant"


def total(found: Sequence[Found], chosen: Sequence[Spec]) -> str:
    """All in a line, and how to go on where specs are left."""
    counts: Counter[str] = sum((one.counts for one in found), Counter())
    said = f"{len(found)} of {len(chosen)} specs judged: {counted(counts)}"
    left = {spec.stem for spec in chosen} - {one.spec for one in found}
    if left:
        said += "\nnot judged to the end: " + " ".join(f"--spec {stem}" for stem in sorted(left))
    return said


def check(
    root: Path,
    chosen: Sequence[Spec],
    *,
    workers: int,
    part: float = 1.0,
    show: Callable[[Found], None],
) -> None:
    """Judge the mutants of each spec's certificate; `show` gets each spec when it is done."""

    def one(spec: Spec) -> None:
        found = Found(spec.stem)
        problems = certificates.standing(root, spec)
        for problem in problems:
            found.add(NOT_JUDGED, problem)
        if not problems:
            certificate = certificates.read(root, spec)
            assert certificate is not None
            judge(Examination(spec, judges, Path(folder)), certificate, part, found)
        show(found)

    with (
        tempfile.TemporaryDirectory(prefix="kdtr-mutants-") as folder,
        ThreadPoolExecutor(workers + 1) as threads,
        pool(root, workers, "cuda") as judges,  # ends first, as who waits for a verdict must
    ):
        all_of(threads, one, chosen)


def judge(
    examination: Examination, certificate: Mapping[str, Any], part: float, found: Found
) -> None:
    """Judge `part` of a certificate's mutants, and all that are for a GPU, into `found`."""
    spec, rows = examination.spec, certificate["mutants"]
    own, generic = examination.planted({row["name"] for row in rows})
    planted = {(p.module, p.name): p for p in [*own, *generic]}
    waiting = []
    for row in rows:
        mutant = planted.get((row["module"], row["name"]))
        if row["outcome"] not in (KILLED, EQUIVALENT, FOR_A_GPU):
            continue
        if mutant is None:
            found.add(FAILED, f"{row['name']} is in the certificate and cannot be made any more")
        elif row["outcome"] == FOR_A_GPU or drawn(spec, mutant, part):
            of, cases = _cases(examination, certificate, row)
            if not cases:
                found.add(NOT_JUDGED, f"{mutant.name}: the spec has no case of one GPU")
                continue
            first = row.get("case", cases[0])
            waiting.append((row, mutant, first, examination.judge(mutant, cases, of=of)))
    judged = [(row, mutant, first, wait()) for row, mutant, first, wait in waiting]
    unfit = _unfit(examination, [now.get("case", first) for _, _, first, now in judged])
    for row, mutant, first, now in judged:
        case = now.get("case", first)
        if case in unfit:
            found.counts[NOT_JUDGED] += 1
            unfit[case] += f"; {mutant.name}"
            continue
        group, why = ruled(row, mutant, now)
        found.add(group, why and f"{mutant.name}: {why}")
        if group == DIES:
            found.verdicts[now["verdict"]] += 1
    found.said += [f"{NOT_JUDGED}: {said}" for said in unfit.values()]


def ruled(row: Mapping[str, Any], mutant: Planted, now: Mapping[str, Any]) -> tuple[str, str]:
    """The group of a mutant, and what is to be said of it. row: what the certificate says; now:
    what came out on the GPU."""
    was, outcome = row["outcome"], now["outcome"]
    if outcome == INVALID and was != FOR_A_GPU:
        return REFUSED, now["why"]
    if outcome == KILLED:
        if was == EQUIVALENT:
            return FAILED, f"{now['case']} gives {now['verdict']}, but {row['why']}"
        if was == FOR_A_GPU and now["verdict"] == Status.TIMEOUT:  # of many cases, some large
            return NOT_JUDGED, "there was no verdict in time"
        return DIES, ""
    if outcome == was:  # EQUIVALENT
        return SAME, ""
    if was == FOR_A_GPU:
        return FAILED, f"it is for a GPU to kill, and lives on this one: {now['why']}"
    verdict = Status(row["verdict"])
    if mutant.sim:
        return SIMULATORS, f"{mutant.sim}; here {now['why']}"
    if mutant.waits or verdict in _SIMULATORS_OWN:
        return SIMULATORS, f"{verdict} by {row['case']}; here {now['why']}"
    return FAILED, f"{row['case']} gives {verdict} in the simulator; here {now['why']}"


def _cases(
    examination: Examination, certificate: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[Spec | None, list[str]]:
    """What a mutant has to pass to live: the case that killed it, then the simulator's others, the
    smallest first; if it is for a GPU, all, first those that the simulator does not run; if it
    changes nothing, any two. With them the sibling whose cases they are, if not the spec's."""
    if row["outcome"] == EQUIVALENT:
        return None, [h["case"] for h in certificate["honest"]][:2]
    of, first = killer(examination.spec, row) if row["outcome"] == KILLED else (None, "")
    spec = of or examination.spec
    every = [c for c in spec.cases.values() if c.gpus == 1 and not c.unsupported]
    every = [c for c in every if c.sim or not first]
    every.sort(key=lambda c: (c.name != first, not first and c.sim, size(spec, c)))
    return of, [case.name for case in every]


def _unfit(examination: Examination, cases: Iterable[str]) -> dict[str, str]:
    """Those of the cases that the kernel as it is does not pass here, and how."""
    by_spec: dict[str, list[str]] = {}
    for case in sorted(set(cases)):
        by_spec.setdefault(case.rpartition("::")[0], []).append(case)
    said = {}
    for left in by_spec.values():
        while left:  # a job ends at the first case that does not pass
            found = [killer(examination.spec, {"case": case}) for case in left]
            job = examination.job([name for _, name in found], "", Path(), of=found[0][0])
            runs = examination.pool.submit(job).result()["runs"]
            if not runs[-1]["ok"]:
                case, run = left[len(runs) - 1], runs[-1]
                said[case] = f"{case} gives {run['status']} for the kernel as it is"
                said[case] += f" ({' '.join(run['message'].split())})" if run["message"] else ""
            del left[: len(runs)]
    return said
