"""Several reports become one: the shards of a run on many machines, the stages of one gate.

A shard says which shard of how many it is and the digest of the specs' sources that it saw. A
shard that is missing, that is there twice or that saw other sources is an error, because the
merged report would say of a tree what was seen of another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import Result, Status, Verdict

DERIVED = ("ok", "text")  # keys of a case in report.json that a Verdict computes


class MergeError(ValueError):
    """Reports that do not make one. The text names the file and the reason."""


def restore(case: Mapping[str, Any]) -> Verdict:
    """A verdict from its JSON form, as in the `cases` of report.json."""
    fields = {k: v for k, v in case.items() if k not in DERIVED}
    fields["status"] = Status(fields["status"])
    fields["notes"] = tuple(fields["notes"])
    fields["headroom"] = _number(fields["headroom"])
    fields["outputs"] = tuple(_result(result) for result in fields["outputs"])
    return Verdict(**fields)


def _result(result: Mapping[str, Any]) -> Result:
    fields = {k: _number(v) if k in NUMBERS else v for k, v in result.items()}
    fields["status"] = Status(fields["status"])
    fields["first"] = None if fields["first"] is None else tuple(fields["first"])
    return Result(**fields)


NUMBERS = ("got", "want", "bound", "headroom")


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity: report.json holds them as text."""
    return float(value) if isinstance(value, str) else value


def read(path: Path | str) -> dict[str, Any]:
    """A report.json, checked against schema and seal. `path` may be the folder that holds it."""
    import jsonschema

    from harness.report import check, seal

    path = Path(path)
    if path.is_dir():
        path = path / "report.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found)
    except (OSError, ValueError) as error:
        raise MergeError(f"{path}: not a report: {error}") from None
    except jsonschema.ValidationError as error:
        raise MergeError(f"{path}: not a report: {error.message}") from None
    if found["seal"] != seal(found):
        raise MergeError(f"{path}: not as it was written: its seal is not that of its content")
    return found


def verdicts(reports: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """All verdicts, by id. Raises MergeError if a case was judged twice."""
    found: dict[str, Verdict] = {}
    for report in reports:
        for case in report["cases"]:
            if case["id"] in found and case["stage"] is not None:
                raise MergeError(f"{case['id']} is in two reports")
            found[case["id"]] = restore(case)
    return [found[i] for i in sorted(found)]


def contexts(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One context: maps and lists are joined, of the rest the last report's value stands."""
    joined: dict[str, Any] = {}
    for report in reports:
        for key, value in report["context"].items():
            if isinstance(value, dict) and isinstance(joined.get(key), dict):
                joined[key] = {**joined[key], **value}
            elif isinstance(value, list) and isinstance(joined.get(key), list):
                joined[key] = joined[key] + [v for v in value if v not in joined[key]]
            else:
                joined[key] = value
    return joined


def shards(paths: Sequence[Path | str], sources: str) -> tuple[list[Verdict], dict[str, Any]]:
    """Join the reports of one sharded run: verdicts and context.

    `sources` is the digest of the specs and what they import as they are here; a shard that saw
    others is stale.
    """
    reports = [read(path) for path in paths]
    seen: dict[int, str] = {}
    counts, asked = set(), []
    for path, report in zip(map(str, paths), reports, strict=True):
        shard = report["context"].get("shard")
        if not shard:
            raise MergeError(f"{path}: not of a sharded run")
        if shard["index"] in seen:
            raise MergeError(f"{path}: shard {shard['index']} is also in {seen[shard['index']]}")
        if report["context"].get("sources") != sources:
            raise MergeError(f"{path}: stale: made from other sources than the ones here")
        seen[shard["index"]] = path
        counts.add(shard["count"])
        asked.append(report["context"].get("asked"))
    if len(counts) != 1:
        raise MergeError(f"shards of different runs: of {', '.join(map(str, sorted(counts)))}")
    if any(each != asked[0] for each in asked):
        raise MergeError("shards of different runs: they were asked for different cases")
    (count,) = counts
    missing = [str(i) for i in range(1, count + 1) if i not in seen]
    if missing:
        raise MergeError(f"of {count} shards, missing: {', '.join(missing)}")
    context = contexts(reports)
    del context["shard"]
    return verdicts(reports), context
