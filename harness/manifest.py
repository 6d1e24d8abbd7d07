"""What is committed of the goldens: goldens/manifest.toml, a line a case.

Inputs and integer outputs are kept by sha256, because raw bit-generator integers and exact scaling
make them the same everywhere. Float outputs have a fingerprint, because float64 sums depend on the
order in which a BLAS takes them: 484 cases moved by less than DRIFT between numpy 2.1.3, 2.3.5 and
2.4.6 and between one thread and two.
"""

import datetime
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from harness import golden
from harness.report import Fault, replace_file
from harness.spec import FLOATS, Case, Spec, SpecError

LIMIT = 1 << 24  # bytes of inputs and outputs: larger cases are not in the manifest
DRIFT = 1e-9  # of an output's RMS: how far float64 sums in another order may move a fingerprint

_HEADER = """\
# Digests of what the oracles make. Written by `kdtr golden generate --reason "..."`.
# Inputs and integer outputs are exact: sha256 of the bytes. A float output has a fingerprint:
# [rms, mean, projection], where differences up to drift * rms are rounding in another order.
# Cases of more than 16 MiB are left out: the same oracle makes them, and anyone can check the rest.
"""


def path_of(spec: Spec) -> Path:
    return spec.path.resolve().parents[1] / "goldens" / "manifest.toml"


def fits(spec: Spec, case: Case) -> bool:
    """Whether the case is small enough for the manifest."""
    tensors = [*spec.inputs.values(), *spec.outputs.values()]
    sizes = (math.prod(spec.shape(t, case)) * t.numpy_dtype.itemsize for t in tensors)
    return sum(sizes) <= LIMIT


def record(spec: Spec, case: Case) -> dict[str, Any]:
    """What the manifest keeps of a case, made by the oracle here and now (never from the cache)."""
    made = golden.build(spec, case)
    inputs = {name: golden.digest(array) for name, array in made.inputs.items()}
    drift = float(getattr(golden.oracle(spec), "DRIFT", DRIFT))
    outputs: dict[str, Any] = {}
    for name, output in spec.outputs.items():
        values = made.expected[name]
        if output.dtype in FLOATS:
            outputs[name] = {"fingerprint": fingerprint(values), "drift": drift}
        else:
            outputs[name] = golden.digest(golden.rounded(values, output))
    return {"inputs": inputs, "outputs": outputs}


def fingerprint(values: np.ndarray) -> list[float]:
    """[rms, mean, projection on fixed weights], in which NaN and the infinities count as numbers.

    Elements that trade places move the projection; any other change moves all three.
    """
    n = max(values.size, 1)
    squares = total = projection = 0.0
    start = 0
    for part in golden.chunks(values):
        part = np.nan_to_num(part.astype(np.float64), nan=3.0, posinf=5.0, neginf=7.0)
        weights = _weights(start, part.size)
        squares += float(np.dot(part, part))
        total += float(part.sum())
        projection += float(np.dot(part, weights))
        start += part.size
    return [math.sqrt(squares / n), total / n, projection / math.sqrt(n)]


def _weights(start: int, count: int) -> np.ndarray:
    """Fixed weights in [-1, 1) for elements start .. start+count: splitmix64 of the index."""
    z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def verify(
    specs: Iterable[Spec], *, select: Callable[[Spec, Case], bool] | None = None
) -> list[str]:
    """Differences between the manifest and what the oracles make here; empty is good.

    `select(spec, case)` narrows the cases. Entries without a spec or a case are differences.
    """
    differences = []
    for path, group in _by_file(specs).items():
        known = _read(path)
        differences += _orphans(path, known, group)
        for spec in group:
            for case in spec.cases.values():
                if not fits(spec, case) or (select and not select(spec, case)):
                    continue
                where = spec.case_id(case)
                entry = known.get(spec.stem, {}).get(case.name)
                if entry is None:
                    differences.append(f"{where}: not in {path.name}")
                    continue
                try:
                    differences += [f"{where}: {d}" for d in _differ(entry, record(spec, case))]
                except Fault as fault:
                    differences.append(f"{where}: {fault.status}: {fault.message}")
    return differences


def generate(specs: Iterable[Spec], reason: str) -> list[str]:
    """Rewrite the manifest entries of `specs`; returns what changed, a line each.

    Raises PermissionError under pytest-xdist, where parallel workers would bless whatever they
    saw, ValueError without a reason, and Fault if an oracle fails: then nothing is written.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        raise PermissionError("goldens are not generated by parallel test workers; run it alone")
    if not reason.strip():
        raise ValueError("a golden changes only for a reason: say it")
    changes = []
    for path, group in _by_file(specs).items():
        lock = path.parents[1] / ".cache" / "manifest.lock"  # stays: whoever waits holds it open
        lock.parent.mkdir(exist_ok=True)
        with FileLock(lock):
            known = _read(path)
            changes += [f"removed {orphan}" for orphan in _orphans(path, known, group)]
            for spec in group:
                table = known.setdefault(spec.stem, {})
                for case in spec.cases.values():
                    if not fits(spec, case):
                        continue
                    try:
                        new, old = record(spec, case), table.get(case.name)
                    except Fault as fault:
                        where = spec.case_id(case)
                        raise Fault(fault.status, f"{where}: {fault.message}") from fault
                    different = ["new"] if old is None else _differ(old, new)
                    if different:
                        changes += [f"{spec.case_id(case)}: {d}" for d in different]
                        today = datetime.datetime.now(datetime.UTC).date().isoformat()
                        table[case.name] = {"reason": reason, "date": today, **new}
            replace_file(path, _text(known).encode())
    return changes


def _by_file(specs: Iterable[Spec]) -> dict[Path, list[Spec]]:
    groups: dict[Path, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(path_of(spec), []).append(spec)
    return groups


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SpecError(path, "file", f"valid TOML ({error})") from None
    for stem, table in known.items():
        if not isinstance(table, dict):
            raise SpecError(path, stem, "a table of cases", table)
    return known


def _text(known: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML with a line a case, so that a changed case is a changed line."""
    lines = [_HEADER]
    for stem in sorted(known):
        lines += [
            f"[{json.dumps(stem) if '.' in stem else stem}]",
            *(f"{n} = {_inline(known[stem][n])}" for n in sorted(known[stem])),
            "",
        ]
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_inline(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _orphans(path: Path, known: dict[str, Any], specs: Iterable[Spec]) -> list[str]:
    """Take out the entries of which the spec, or in the given specs the case, is gone."""
    stems = {p.stem for p in (path.parents[1] / "specs").glob("*.toml")}
    gone = [stem for stem in known if stem not in stems]
    for stem in gone:
        del known[stem]
    said = [f"{stem}: no such spec" for stem in gone]
    for spec in specs:
        listed = known.get(spec.stem, {})
        for name in [n for n in listed if n not in spec.cases or not fits(spec, spec.cases[n])]:
            del listed[name]
            said.append(f"{spec.id}::{name}: no such case, or it is too large")
    return said


def _differ(old: Any, new: Mapping[str, Any]) -> list[str]:
    try:
        with np.errstate(all="ignore"):
            return _differences(old, new)
    except (AttributeError, KeyError, TypeError, ValueError):
        return ["its entry is not one that kdtr golden generate writes"]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for kind in ("inputs", "outputs"):
        before, after = old.get(kind, {}), new[kind]
        for name in sorted({*before, *after}):
            a, b = before.get(name), after.get(name)
            if a is None or b is None:
                found.append(f"{kind[:-1]} {name} {'is new' if a is None else 'is gone'}")
            elif a == b:
                continue
            elif isinstance(a, str) or isinstance(b, str):
                found.append(f"{kind[:-1]} {name} has other bytes")
            elif a["drift"] != b["drift"]:
                found.append(f"output {name} has drift {b['drift']}, was {a['drift']}")
            else:
                pairs = list(zip(a["fingerprint"], b["fingerprint"], strict=True))
                moved, scale = np.abs(np.diff(pairs)).max(), max(pairs[0])
                if not moved <= a["drift"] * scale < math.inf:  # NaN is no agreement
                    part = f"{moved / scale:.3g} of its rms, more than drift = {a['drift']:g}"
                    found.append(f"output {name} moved by {part}")
    return found
