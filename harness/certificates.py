"""A kill certificate: what it says of a spec, whether that is enough, and how it stands on disk.

`ci/certificates/<spec>.json` holds each mutant with the case and the verdict that killed it,
survivors with the written reason why they change nothing, the headroom of the honest kernel, and
for float specs the calibration of the bound from both sides: the honest kernel far inside it, every
named fault outside. It holds the digest of what it is about, and a seal: the digest of itself. A
spec with a survivor that nobody explained, or without a kill, is VACUOUS.

What an earlier certificate says was killed must not live again, whatever reason is given: that is
how a loosened bound shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import sources
from harness.report import Status, replace_file, seal
from harness.spec import Case, Spec

FOLDER = Path("ci", "certificates")
HONEST = 0.5  # share of its bound that the honest kernel may use

KILLED, SURVIVED, EQUIVALENT = "killed", "survived", "equivalent"
FOR_A_GPU = "for a GPU"  # the simulator cannot show it, the spec says why
INVALID, EQUAL, STALE = "INVALID", "EQUAL", "STALE"
CERTIFIED, VACUOUS, MISSING = "CERTIFIED", "VACUOUS", "MISSING"


# -- what it says ----------------------------------------------------------------------------------


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
        "honest": rounded(honest), "least": None, "mutant": None, "distance": None,
    }  # fmt: skip
    if excess:
        least = min(excess, key=lambda name: excess[name])
        found |= {"least": rounded(excess[least]), "mutant": least}
        found["distance"] = rounded(excess[least] / honest) if honest else "inf"
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


def bounded(spec: Spec, case: Case) -> bool:
    """Whether some output of the case is judged by a bound and not by equality."""
    return not case.exact and any(o.match.kind != "exact" for o in spec.outputs.values())


def rounded(value: float | None) -> float | str | None:
    """Three digits: enough to read, and the same on every machine. JSON has no infinity."""
    if value is None:
        return None
    return float(f"{value:.3g}") if value < float("inf") else "inf"


def was_killed(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == KILLED or bool(row.get("revived"))


# -- on disk --------------------------------------------------------------------------------------


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """With the digest of all else, so that an edit by hand shows."""
    return {**content, "seal": seal(content)}


def path(root: Path, spec: Spec) -> Path:
    return root / FOLDER / f"{spec.stem}.json"


def read(root: Path, spec: Spec) -> dict[str, Any] | None:
    """The certificate on disk; None if there is none. ValueError if it is damaged."""
    file = path(root, spec)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["seal"] != seal(content):
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


def standing(root: Path, spec: Spec) -> list[str]:
    """What can be said against a spec's certificate without running anything."""
    return _read_and_judged(root, spec, sources.Snapshot())[1]


def _read_and_judged(
    root: Path, spec: Spec, seen: sources.Snapshot
) -> tuple[dict[str, Any] | None, list[str]]:
    """A certificate as far as it can be read, and what can be said against it."""
    try:
        certificate = read(root, spec)
    except ValueError as error:
        return None, [str(error)]
    if certificate is None:
        return None, [f"MISSING: no certificate; kdtr mutate --spec {spec.stem} makes it"]
    if certificate["digest"] != sources.digest(spec, seen=seen):
        return certificate, [
            f"STALE: made from other sources; kdtr mutate --spec {spec.stem} makes it again"
        ]
    return certificate, [f"VACUOUS: {problem}" for problem in problems(spec, certificate)]


def is_stale(root: Path, spec: Spec) -> bool:
    """Whether a spec's certificate is missing, damaged or made from other sources."""
    try:
        certificate = read(root, spec)
    except ValueError:
        return True
    return certificate is None or certificate["digest"] != sources.digest(spec)


# -- for the reader --------------------------------------------------------------------------------


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


def summary(
    root: Path, chosen: Sequence[Spec], seen: sources.Snapshot | None = None
) -> dict[str, Any]:
    """The report's section: every spec's certificate as it stands, and the score of all."""
    seen = seen or sources.Snapshot()
    rows = []
    total = score(())
    for spec in chosen:
        certificate, said = _read_and_judged(root, spec, seen)
        row: dict[str, Any] = {
            "spec": spec.stem, "verdict": CERTIFIED, "problems": said, "survivors": [],
            "score": None, "calibration": None,
        }  # fmt: skip
        if certificate:
            row |= {k: certificate[k] for k in ("score", "calibration")}
            row["survivors"] = [
                {"name": r["name"], "why": r["why"]}
                for r in certificate["mutants"]
                if r["outcome"] in (SURVIVED, EQUIVALENT, FOR_A_GPU)
            ]
            total = {k: n + certificate["score"].get(k, 0) for k, n in total.items()}
        if said:
            row["verdict"] = next((v for v in (MISSING, STALE) if said[0].startswith(v)), VACUOUS)
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
        f"{verdicts.count(v)} {v}" for v in (CERTIFIED, STALE, MISSING, VACUOUS) if v in verdicts
    )
    said += "; mutants: " + (
        ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) or "none"
    )
    return said if share is None else f"{said}; {100 * share:.1f}% killed"
