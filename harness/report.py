"""What was judged, and how it is said: statuses, verdicts, report.json, the table and the page."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import os
import platform
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.spec import SpecError

MANY = 40  # cases: of more the table has a row a spec


class Status(StrEnum):
    PASSED = "PASSED"
    UNSUPPORTED = "UNSUPPORTED"  # the spec declares it with a reason, and the launcher refuses
    WRONG = "WRONG"
    WRONG_SHAPE = "WRONG_SHAPE"
    WRONG_DTYPE = "WRONG_DTYPE"
    NONFINITE = "NONFINITE"  # NaN or infinity where the golden has none, or elsewhere than there
    UNWRITTEN = "UNWRITTEN"  # the poison survived
    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"  # a guard band was touched
    MUTATED_INPUT = "MUTATED_INPUT"
    ALIASED = "ALIASED"  # the launcher returned something instead of writing its outputs
    NONDETERMINISTIC = "NONDETERMINISTIC"  # two runs, different bits
    CRASHED = "CRASHED"
    TIMEOUT = "TIMEOUT"
    GOLDEN_ERROR = "GOLDEN_ERROR"
    SPEC_ERROR = "SPEC_ERROR"
    VACUOUS = "VACUOUS"  # passing would mean nothing

    @property
    def ok(self) -> bool:
        return self in (Status.PASSED, Status.UNSUPPORTED)


class Fault(Exception):
    """Ends a case with this status. `lost` says that the process's GPU context is unusable."""

    def __init__(self, status: Status, message: str, *, lost: bool = False):
        message = printable(message)
        super().__init__(message)
        self.status, self.message, self.lost = status, message, lost


def printable(text: str) -> str:
    """Text of others, with what a terminal or UTF-8 cannot take (ESC, lone surrogates) escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def told(error: BaseException) -> str:
    """Type and text of an error, whose `__str__` may fail in turn."""
    try:
        text = str(error)
    except Exception as another:
        text = f"its text cannot be had, {type(another).__name__}"
    return f"{type(error).__name__}: {text}"


def told_where(error: BaseException) -> str:
    """Type, text, notes and the innermost line of an error that is not some library's."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if "site-packages" not in f.filename), frames[-1])
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return f"{told(error)}{notes} ({where})"


@dataclass(frozen=True)
class Result:
    """How one output fared. `got`, `want` and `bound` belong to the coordinate `first`."""

    output: str
    status: Status
    wrong: int  # elements
    total: int
    match: str  # the rule, in words
    within: str = ""  # the box of indices that holds the wrong elements: "[0:3, 95]"
    first: tuple[int, ...] | None = None
    got: float | int | bool | None = None
    want: float | int | bool | None = None
    bound: float | None = None
    headroom: float | None = None  # share of the allowance used; None where the match is exact
    message: str = ""
    bits: str = ""  # digest of what was written, to compare GPUs and runs


@dataclass(frozen=True)
class Verdict:
    id: str  # specs/rms_norm.toml::odd_tail
    stage: str | None  # None: the spec could not be read
    spec: str  # stem
    case: str
    status: Status
    device: str
    headroom: float | None = None  # worst of the outputs
    time_us: float | None = None
    message: str = ""
    outputs: tuple[Result, ...] = ()
    digest: str = ""  # of the case, of oracle and kernel with what they import
    kernel: str = ""
    reference: str = ""
    replaced: bool = False  # `kernel` was given by the caller in place of the spec's
    notes: tuple[str, ...] = ()
    lost: bool = False  # the process must be replaced before another case runs on this GPU

    @property
    def ok(self) -> bool:
        return self.status.ok


def broken(error: SpecError) -> Verdict:
    """The verdict on a spec that could not be read. It belongs to every stage."""
    stem = Path(error.file).stem
    return Verdict(
        id=f"specs/{printable(Path(error.file).name)}::spec",
        stage=None,
        spec=stem,
        case="spec",
        status=Status.SPEC_ERROR,
        device="none",
        message=printable(str(error)),
    )


# -- for the reader of a failure -----------------------------------------------------------------


def failure_text(verdict: Verdict) -> str:
    """What went wrong, where to look, and the one command that runs it again."""
    lines = [f"{verdict.spec}::{verdict.case} {verdict.status} on {verdict.device}"]
    lines += [f"  {line}" for line in verdict.message.splitlines()]
    for result in verdict.outputs:
        if not result.status.ok:
            lines += [f"  {line}" for line in result_lines(result)]
    lines += [f"  note    {note}" for note in verdict.notes]
    lines.append(f"  spec    {verdict.id.partition('::')[0]}")
    if verdict.reference:
        lines.append(f"  oracle  {verdict.reference}")
    if verdict.kernel:
        lines.append(f"  kernel  {verdict.kernel}")
    lines.append(f"  again   {again(verdict)}")
    return "\n".join(lines)


def result_lines(result: Result) -> list[str]:
    """One output's failure: how many and where, the first one, what is allowed, what it is like."""
    if result.first is None:
        return [f"{result.output}: {result.status}, {result.message}"]
    wrong = f"{result.output}: {result.status}, {result.wrong} of {result.total} wrong"
    first = f"first at {result.first}: got {_number(result.got)}, want {_number(result.want)}"
    if result.bound is not None:
        first += f", bound {_number(result.bound)}"
    return [
        wrong if result.wrong == 1 else f"{wrong}, all of them within {result.within}",
        f"  {first}",
        f"  allowed: {result.match}",
        *(f"  {said}" for said in result.message.split("; ") if said),
    ]


def again(verdict: Verdict) -> str:
    """The one command that judges this case, or at least its spec, again."""
    if verdict.replaced:
        name = verdict.kernel if "<" not in verdict.kernel else "MODULE:FUNCTION"
        return f"kdtr gate --spec {verdict.spec} --kernel {name}"
    if verdict.stage is None:
        return f"kdtr gate --spec {verdict.spec}"
    return f"pytest {verdict.id}"


def _number(value: float | int | bool | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# -- for the gate --------------------------------------------------------------------------------


def totals(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    counts = Counter(v.status.value for v in verdicts)
    failed = sum(not v.ok for v in verdicts)
    return {
        "cases": len(verdicts),
        "passed": counts[Status.PASSED],
        "unsupported": counts[Status.UNSUPPORTED],
        "failed": failed,
        "by_status": dict(sorted(counts.items())),
        "ok": bool(counts[Status.PASSED]) and not failed,
    }


def as_report(verdicts: Sequence[Verdict], **context: Any) -> dict[str, Any]:
    """The content of report.json; `context` (device list, command line) is added to `context`."""
    content = {
        "version": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "context": {"python": platform.python_version(), **_versions(), **context},
        "cases": [_case(v) for v in verdicts],
        "totals": totals(verdicts),
    }
    return {**content, "seal": seal(content)}


def seal(content: Mapping[str, Any]) -> str:
    """sha256 of all but the seal itself, so that an edit by hand shows."""
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def schema() -> dict[str, Any]:
    text = importlib.resources.files("harness").joinpath("report.schema.json").read_text("utf-8")
    return json.loads(text)


def check(report: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError where a report is not as report.schema.json says."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())  # `validate` would judge it each time too
    if error := jsonschema.exceptions.best_match(validator.iter_errors(report)):
        raise error


def write(path: Path | str, verdicts: Sequence[Verdict], **context: Any) -> dict[str, Any]:
    """Write report.json to `path` and report.html beside it; returns the report.

    Valid against report.schema.json, and atomic: a reader finds the old file or the new one.
    """
    path = Path(path)
    report = as_report(verdicts, **context)
    check(report)
    _write_json(path, report)
    replace_file(path.with_suffix(".html"), page(report).encode())
    return report


def write_part(path: Path, verdicts: Sequence[Verdict], **context: Any) -> None:
    """Write report.json alone, for `merge.read`, which checks it."""
    _write_json(path, as_report(verdicts, **context))


def _write_json(path: Path, report: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())


def page(report: Mapping[str, Any]) -> str:
    """The report as one HTML page, with headroom bars."""
    import jinja2

    text = importlib.resources.files("harness").joinpath("report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"decades": _decades, "duration": _time}
    return environment.from_string(text).render(report)


def table(verdicts: Sequence[Verdict]) -> Any:
    """The verdicts as a rich table: a row a case, or of many a row a spec and what is not well."""
    from rich.table import Table
    from rich.text import Text

    whole = len(verdicts) <= MANY
    what = "case" if whole else "cases"
    grid = Table("spec", what, "device", "status", box=None, header_style="bold")
    grid.add_column("headroom" if whole else "most headroom", justify="right")
    grid.add_column("time" if whole else "longest", justify="right")
    for few in ([v] for v in verdicts) if whole else _by_spec(verdicts):
        status = few[0].status if len({v.status for v in few}) == 1 else "PASSED, UNSUPPORTED"
        style = "green" if status is Status.PASSED else "yellow" if few[0].ok else "bold red"
        rooms = [v.headroom for v in few if v.headroom is not None]
        times = [v.time_us for v in few if v.time_us is not None]
        grid.add_row(
            Text(few[0].spec),  # brackets are markup to rich
            few[0].case if whole or not few[0].ok else str(len(few)),
            few[0].device,
            Text(status, style=style),
            f"{max(rooms):.3f}" if rooms else "",
            _time(max(times)) if times else "",
        )
    return grid


def _by_spec(verdicts: Sequence[Verdict]) -> Iterator[list[Verdict]]:
    """The verdicts of each spec and device that are well together, each other one alone."""
    well: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        if v.ok:
            well.setdefault((v.spec, v.device), []).append(v)
    yield from well.values()
    yield from ([v] for v in verdicts if not v.ok)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that nobody ever sees half of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a file to write, with the suffix of `path`, whose place it then takes.

    A process that is killed, or an error, leaves the old file as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(path.suffix, f".{path.stem}.", path.parent)
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(handle)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _case(verdict: Verdict) -> dict[str, Any]:
    case = asdict(verdict)
    case["ok"] = verdict.ok
    case["headroom"] = _finite(verdict.headroom)
    for result in case["outputs"]:
        result |= {k: _finite(result[k]) for k in ("got", "want", "bound", "headroom")}
        result["first"] = None if result["first"] is None else list(result["first"])
    case["outputs"] = list(case["outputs"])
    case["notes"] = list(case["notes"])
    if not verdict.ok:
        case["text"] = failure_text(verdict)
    return case


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _versions() -> dict[str, str]:
    found = {}
    for name in ("kdtree-engine", "numpy", "ml_dtypes", "numba", "numba-cuda"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _time(time_us: float) -> str:
    return f"{time_us:.1f} us" if time_us < 1e4 else f"{time_us / 1e3:.0f} ms"


def _decades(headroom: Any) -> float:
    """Length of a headroom bar in percent: a logarithmic scale from 0.001 to 1."""
    if isinstance(headroom, str):  # inf, nan
        return 100.0
    return 100.0 * min(1.0, max(0.0, 1.0 + math.log10(max(headroom, 1e-9)) / 3.0))
