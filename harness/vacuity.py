"""Would a kernel that ignores an input pass? A golden must depend on each input and each scalar.

Each one is perturbed and the oracle asked again, once for each state of spec and oracle; what comes
out lies beside the goldens in the cache, and is charged to the first case of the spec.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.alarm import time_limit
from harness.golden import Golden, build, cache_path, digest, reference
from harness.report import Fault, Status, replace_file
from harness.spec import Case, Spec


def inputs_matter(spec: Spec, cache_dir: Path | None) -> None:
    """Raise VACUOUS if there is an input or a scalar that no golden of the spec depends on.

    SPEC_ERROR for a scalar that is declared to change nothing and does.
    """
    found = insensitive(spec, cache_dir=cache_dir)
    if moving := [name for name in spec.invariant if name not in found]:
        raise Fault(
            Status.SPEC_ERROR,
            f"{', '.join(moving)}: declared invariant, and a golden changes with it",
        )
    if names := [name for name in found if name not in spec.invariant]:
        raise Fault(
            Status.VACUOUS,
            f"no golden of {spec.id} changes when {', '.join(names)} is perturbed: a kernel that "
            "ignores it passes. Add a case where it matters, or drop it; a scalar that chooses how "
            "something is computed and never what is named in `invariant`",
        )


def insensitive(spec: Spec, *, cache_dir: Path | None = None) -> list[str]:
    """Inputs and scalars that change the golden of no case, asked once a state of spec and oracle.

    Initial values of outputs that are changed in place are inputs too. Only the simulator's cases
    are tried, if there are any.
    """
    path = cache_path(spec, "inputs", cache_dir).with_suffix(".json")
    initial = {n for n, o in spec.outputs.items() if o.inout}
    asked = {*spec.inputs, *initial, *(spec.scalars if spec.kernel else ())}  # kernels ignore them
    with contextlib.suppress(OSError, ValueError, TypeError):
        names = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(names, list) and asked.issuperset(names):
            return names
    cases = [c for c in spec.cases.values() if c.sim] or list(spec.cases.values())
    cases.sort(key=lambda c: sum(map(math.prod, spec.shapes(c).values())))
    telling = next((c for c in cases if not c.constant), cases[0])
    values = dict.fromkeys(item for c in spec.cases.values() for item in c.scalars.items())

    def moving(case: Case, names: Iterable[str]) -> set[str]:
        return {name for name, found in sensitivity(spec, case, names).items() if found}

    left = asked.difference(spec.invariant)
    for case in cases:
        if left:
            left -= moving(case, left)
    for name, value in values:  # a seed says nothing where the temperature is 0
        some = left.intersection(spec.scalars) - {name}
        if some and telling.scalars[name] != value:
            with contextlib.suppress(Fault):
                left -= moving(replace(telling, scalars={**telling.scalars, name: value}), some)
    if spec.invariant:
        left |= set(spec.invariant) - moving(telling, spec.invariant)
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(sorted(left)).encode())
    return sorted(left)


def sensitivity(spec: Spec, case: Case, names: Iterable[str] | None = None) -> dict[str, bool]:
    """For each input and scalar: does the golden change, or the oracle object, when that changes?

    Of an input are tried, until one works: every element changed, the order of elements reversed,
    one element in the middle changed. An oracle that fails or does not end has looked at it.
    """
    start = time.monotonic()
    golden = build(spec, replace(case, constant="asked for"))
    limit_s = 5.0 + 10.0 * (time.monotonic() - start)
    found = {}
    for name in [*golden.inputs, *spec.scalars] if names is None else sorted(names):
        if name in golden.inputs:
            trials = (
                (case, replace(golden, inputs={**golden.inputs, name: changed}))
                for changed in _perturbed(golden.inputs[name])
            )
        else:
            trials = (
                (replace(case, scalars={**case.scalars, name: changed}), golden)
                for changed in _others(case.scalars[name])
            )
        found[name] = any(_differs(spec, *trial, limit_s) for trial in trials)
    return found


def _differs(spec: Spec, case: Case, golden: Golden, limit_s: float) -> bool:
    """Whether the oracle now says something else than what the golden expects."""
    try:
        with time_limit(limit_s, "it does not end"), np.errstate(all="ignore"):
            returned = reference(spec, case, golden)
    except Fault:
        return True
    return any(digest(np.asarray(returned[n])) != digest(golden.expected[n]) for n in spec.outputs)


def _others(value: bool | int | float) -> list[bool | int | float]:
    """Values of a scalar's type that are not it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value, value // 2, value + 97, value + 389]
    return [value * 1.5 + 1e-3, value / 2, -value, value + 1]


def _perturbed(array: np.ndarray) -> Iterator[np.ndarray]:
    array = np.asarray(array)
    if array.size == 0:
        return
    if array.dtype == bool:
        other = ~array
    elif array.dtype.kind in "iu":
        other = array ^ array.dtype.type(1)
    else:
        with np.errstate(all="ignore"):
            other = np.where(np.isfinite(array), array * array.dtype.type(-0.5) + 1, 1)
        other = other.astype(array.dtype)
    yield other
    yield np.ascontiguousarray(array.reshape(-1)[::-1]).reshape(array.shape)
    one = array.copy()
    one.reshape(-1)[array.size // 2] = other.reshape(-1)[array.size // 2]
    yield one
