"""What was seen where: GPU receipts that are committed, stage receipts that are not.

CI has no GPU. The evidence for a case that needs one is a row in `ci/receipts/<gpu>.json`, made
by a run on that GPU; it holds the digest of the case as its spec declares it, of oracle and kernel,
and is stale when they have changed since. The gate lists every case without a fresh row.

A stage receipt (`.cache/stages/<stage>.json`) says that a stage passed on this machine with these
sources: a later stage refuses to run without it. tox's `depends` would only order them.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness import sources
from harness.report import Status, read_object, replace_file, seal
from harness.spec import STAGES, Case, Spec, SpecError

FOLDER = Path("ci", "receipts")
SANITIZED = Path("report", "sanitize.json")
STAGE_FOLDER = Path(".cache", "stages")
_STAGE_ROW = {"sources", "cases", "date"}
PACKAGES = ("kdtree-engine", "numpy", "ml_dtypes", "numba", "numba-cuda")


class State(StrEnum):
    FRESH = "fresh"
    STALE = "stale"  # made from other sources
    EDITED = "edited"  # not as it was written
    FAILED = "failed"  # the case did not pass there
    MISSING = "missing"


@dataclass(frozen=True)
class Standing:
    """How a case stands on one GPU: the state of its receipt, and the row if there is one."""

    id: str
    gpu: str
    state: State
    row: Mapping[str, Any] | None = None


def path(root: Path, gpu: str) -> Path:
    return root / FOLDER / f"{gpu}.json"


def known(root: Path) -> list[str]:
    """The GPUs that have a receipt file."""
    return sorted(file.stem for file in (root / FOLDER).glob("*.json"))


def read(root: Path, gpu: str) -> dict[str, dict[str, Any]]:
    """The rows of one GPU by case id; none if there is no file. ValueError if it is damaged."""
    file = path(root, gpu)
    if not file.exists():
        return {}
    try:
        return {row["id"]: row for row in json.loads(file.read_text(encoding="utf-8"))["cases"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a receipt file: {error!r}") from None


def _intact(row: Mapping[str, Any]) -> bool:
    """Whether a row is as `_write` left it; it is no evidence otherwise."""
    return row.get("seal") == seal(row)


def seconds(root: Path) -> dict[str, float]:
    """How long each case took, its golden included, in the runs that made the receipts."""
    found: dict[str, float] = {}
    for gpu in known(root):
        with contextlib.suppress(ValueError):
            rows = read(root, gpu).values()
            found |= {row["id"]: row["seconds"] for row in rows if row.get("seconds")}
    return found


def standing(
    root: Path,
    gpu: str,
    cases: Iterable[tuple[Spec, Case]],
    seen: sources.Snapshot | None = None,
) -> list[Standing]:
    """How each of `cases` stands on `gpu`."""
    rows = read(root, gpu)
    seen = seen or sources.Snapshot()
    digests: dict[str, dict[str, str]] = {}
    found = []
    for spec, case in cases:
        row = rows.get(spec.case_id(case))
        if spec.id not in digests:
            digests[spec.id] = sources.case_digests(spec, seen=seen)
        if row is None:
            state = State.MISSING
        elif not _intact(row):
            state = State.EDITED
        elif row["digest"] != digests[spec.id][case.name]:
            state = State.STALE
        elif not Status(row["status"]).ok:
            state = State.FAILED
        else:
            state = State.FRESH
        found.append(Standing(spec.case_id(case), gpu, state, row))
    return found


def record(root: Path, report: Mapping[str, Any], specs: Iterable[Spec]) -> list[Path]:
    """Put the cases of a report that ran on a real GPU into their GPUs' files; returns the files.

    Rows of cases that were not in this run stay, rows that were edited or of cases that no spec has
    go. A case judged
    with another kernel than the spec's is no evidence for the spec's. What compute-sanitizer said
    of the same sources (report/sanitize.json, or an earlier row) is noted.
    """
    context = report["context"]
    if context["device"] != "cuda":
        raise ValueError("a receipt is evidence from a GPU, and this run was in the simulator")
    gpus = {g["uuid"]: g for g in context["gpus"]}
    known_ids = {spec.case_id(case) for spec in specs for case in spec.cases.values()}
    rows: dict[str, dict[str, Any]] = {}
    for case in report["cases"]:
        uuids = context["ran_on"].get(case["id"], [])
        if case["replaced"] or case["id"] not in known_ids or not uuids:
            continue
        gpu = gpus[uuids[0]]
        rows.setdefault(gpu["slug"], {})[case["id"]] = {
            **{k: case[k] for k in ("id", "status", "headroom", "time_us", "digest")},
            "seconds": context.get("seconds", {}).get(case["id"]),
            "date": report["created"],
            "gpu": gpu["name"],
            "uuid": ",".join(uuids),
            "driver": gpu["driver"],
            "versions": {k: context[k] for k in PACKAGES if k in context},
        }
    found = read_object(root / SANITIZED)
    written = []
    for slug, new in sorted(rows.items()):
        old = read(root, slug)
        for i, row in new.items():
            before = old.get(i, {})
            if "sanitizer" in before and _intact(before) and before["digest"] == row["digest"]:
                row["sanitizer"] = before["sanitizer"]
        _note(new, found, slug)
        kept = {i: row for i, row in old.items() if i in known_ids and _intact(row)}
        _write(root, slug, kept | new)
        written.append(path(root, slug))
    return written


def _write(root: Path, gpu: str, rows: Mapping[str, Any]) -> None:
    sealed = {i: {**row, "seal": seal(row)} for i, row in rows.items()}
    lines = ",\n".join(f"  {json.dumps(sealed[i])}" for i in sorted(sealed))
    text = f'{{"version": 1, "gpu": {json.dumps(gpu)}, "cases": [\n{lines}\n]}}\n'
    replace_file(path(root, gpu), text.encode())


def note_sanitizer(root: Path, found: Mapping[str, Any]) -> int:
    """Note a report of ci/sanitize.py in the rows of the same sources; how many there were."""
    rows = {i: row for i, row in read(root, found["gpu"]).items() if _intact(row)}
    noted = _note(rows, found, found["gpu"])
    if noted:
        _write(root, found["gpu"], rows)
    return noted


def _note(rows: Mapping[str, dict[str, Any]], found: Mapping[str, Any], gpu: str) -> int:
    noted = 0
    for i, clean in found.get("clean", {}).items() if found.get("gpu") == gpu else ():
        if i in rows and rows[i]["digest"] == clean["digest"]:
            rows[i]["sanitizer"] = clean["tools"]
            noted += 1
    return noted


# -- stages ----------------------------------------------------------------------------------------


def sources_digest(specs: Iterable[Spec | SpecError], seen: sources.Snapshot | None = None) -> str:
    """sha256 over what `specs` depend on and the judge itself."""
    seen = seen or sources.Snapshot()
    digest = hashlib.sha256()
    for spec in specs:
        text = str(spec) if isinstance(spec, SpecError) else sources.digest(spec, seen=seen)
        digest.update(text.encode() + b"\n")
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def of_stage(specs: Iterable[Spec | SpecError], stage: str) -> list[Spec | SpecError]:
    """The specs of one stage; a spec that cannot be read belongs to all of them."""
    return [s for s in specs if isinstance(s, SpecError) or s.stage == stage]


def pass_stage(
    root: Path, stage: str, device: str, specs: Sequence[Spec | SpecError], cases: int
) -> None:
    """Write that `stage` passed on `device` with the sources as they are now."""
    file = root / STAGE_FOLDER / f"{stage}.json"
    row = {
        "sources": sources_digest(of_stage(specs, stage)),
        "cases": cases,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    content = {**_devices(file), device: row}
    replace_file(file, (json.dumps(content, indent=1) + "\n").encode())


def fail_stage(root: Path, stage: str, device: str) -> None:
    """Take back what an earlier run wrote of this stage."""
    file = root / STAGE_FOLDER / f"{stage}.json"
    content = _devices(file)
    if content.pop(device, None):
        replace_file(file, (json.dumps(content, indent=1) + "\n").encode())


def unmet(root: Path, stage: str, device: str, specs: Sequence[Spec | SpecError]) -> list[str]:
    """Why `stage` must not run yet: a sentence for each earlier stage without a valid receipt."""
    reasons = []
    for earlier in STAGES[: STAGES.index(stage)]:
        theirs = of_stage(specs, earlier)
        if all(isinstance(s, SpecError) for s in theirs):
            continue  # it has no specs; one that cannot be read fails the stage that runs
        row = _devices(root / STAGE_FOLDER / f"{earlier}.json").get(device)
        if row is None:
            reasons.append(f"stage {earlier} has not passed here on {device}")
        elif row["sources"] != sources_digest(theirs):
            reasons.append(f"stage {earlier} passed on {device} with other sources ({row['date']})")
    return reasons


def _devices(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of a stage by device. It is a cache: what cannot be read was not passed."""
    rows = read_object(file).items()
    return {device: row for device, row in rows if isinstance(row, dict) and _STAGE_ROW <= {*row}}
