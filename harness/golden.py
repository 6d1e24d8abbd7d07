"""A case becomes its golden: the oracle's inputs and the values that must come out.

An oracle is a module with `inputs(rng, ...)` and `reference(...)` (specs/README.md). What it
returns is checked against the spec's shapes and dtypes, so that both say the same thing twice.
Goldens are kept in a cache by the digest of everything that they depend on; what is committed of
them is the manifest (harness/manifest.py).
"""

import hashlib
import importlib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from filelock import FileLock

from harness import sources
from harness.report import Fault, Status, replace_file, told_where
from harness.spec import FLOATS, Case, Output, Spec

CHUNK = 1 << 22  # elements handled at once, so that temporaries stay near 100 MB
CACHE_LIMIT = 1 << 29  # bytes: a larger golden is cheaper to make again than to keep


@dataclass(frozen=True)
class Golden:
    # In the declared dtypes, initial values of inout outputs too; a goldens.numerics.Gathered may
    # stand for an array that is too large to make on the host.
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]  # float64 or integers, not yet rounded
    magnitudes: Mapping[str, np.ndarray]  # float64 companions, by output
    weights: Mapping[str, np.ndarray] | None = None
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


# -- making one ----------------------------------------------------------------------------------


def make(spec: Spec, case: Case, *, cache_dir: Path | None = None) -> Golden:
    """The golden of a case, from the cache where it is there and intact.

    Raises Fault: GOLDEN_ERROR for what the oracle does wrong, SPEC_ERROR where it asks for
    something that the spec does not give, VACUOUS where any kernel, or none, would pass.
    """
    weights, config = bundle(case)
    path = cache_path(spec, case.name, cache_dir)
    golden, note = _read_cache(path)
    if golden is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                golden, note = _read_cache(path, note)  # another process may have been faster
                if golden is None:
                    golden = _build(spec, case, weights, config)
                    note = _write_cache(path, golden, note)
        except OSError as error:  # a read-only or full disk costs time, not the verdict
            if golden is None:
                golden = _build(spec, case, weights, config)
            note = f"golden not cached: {error}"
    return replace(golden, weights=weights, config=config, notes=(note,) if note else ())


def bundle(case: Case) -> tuple[Mapping[str, np.ndarray] | None, Mapping[str, Any] | None]:
    """Weights and config of the bundle that a case names, or (None, None)."""
    if case.weights is None:
        return None, None
    try:
        bundles = importlib.import_module("goldens.bundles")
        return bundles.tensors(case.weights), bundles.config(case.weights)
    except Exception as error:
        raise Fault(
            Status.GOLDEN_ERROR, f"weights {case.weights!r}: {type(error).__name__}: {error}"
        ) from error


def oracle(spec: Spec) -> ModuleType:
    """The oracle's module, with the functions that it must have."""
    try:
        module = importlib.import_module(spec.reference)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and pytest.skip, which would be no failure
        raise Fault(Status.GOLDEN_ERROR, f"{spec.reference}: {told_where(error)}") from error
    for name in ("inputs", "reference", *(["witness"] if spec.stage == "golden" else [])):
        if not callable(getattr(module, name, None)):
            raise Fault(Status.SPEC_ERROR, f"{spec.reference} has no function {name}(...)")
    if spec.stage == "golden" and module.witness is module.reference:
        raise Fault(Status.VACUOUS, f"{spec.reference}: the witness is the reference itself")
    return module


def derived(spec: Spec, values: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from drawn axes, scalars and options by the oracle's `derived`, if it has one.

    It may know axes of other specs, which are left out here.
    """
    function = getattr(oracle(spec), "derived", None)
    if function is None:
        return {}
    made = _call(function, spec.reference, values)
    mine = {*spec.axis_names(), *spec.defaults, "exact"}
    return {name: value for name, value in made.items() if name in mine}


def reference(spec: Spec, case: Case, golden: Golden, function: str = "reference") -> dict:
    """What the oracle's `reference` (or `witness`) returns for these inputs, unchecked."""
    return _call(
        getattr(oracle(spec), function),
        spec.reference,
        {**golden.inputs, **case.scalars, "weights": golden.weights, "config": golden.config},
    )


def stream(spec: Spec, case: Case) -> Any:
    """The case's random stream: the same numbers on every machine, others for every other case."""
    return numerics().Stream(spec.stem, case.draw or case.name)


def rounded(values: np.ndarray, output: Output) -> np.ndarray:
    """Golden values in the output's dtype: rounded once, to nearest, ties to even."""
    if values.dtype == output.numpy_dtype or output.dtype not in FLOATS:
        return values.astype(output.numpy_dtype, copy=False)
    return numerics().round_to(values, output.dtype)


def numerics() -> ModuleType:
    """Rounding, ulps and streams, which the judge shares with the oracles."""
    return importlib.import_module("goldens.numerics")


def build(spec: Spec, case: Case) -> Golden:
    """The golden as the oracle makes it here and now, past the cache."""
    return _build(spec, case, *bundle(case))


def _build(spec: Spec, case: Case, weights: Any, config: Any) -> Golden:
    offered = {
        **case.axes, **case.scalars, **case.options,
        "exact": case.exact, "weights": weights, "config": config,
    }  # fmt: skip
    _all_used(spec, case)
    inputs = _call(oracle(spec).inputs, spec.reference, offered, stream(spec, case))
    shapes = spec.shapes(case)
    inout = {n: t for n, t in spec.outputs.items() if t.inout}
    tensors = {**spec.inputs, **inout}
    _same_names(f"{spec.reference}.inputs", inputs, tensors)
    for name, tensor in tensors.items():
        _check(f"{spec.reference}.inputs: {name}", inputs[name], shapes[name], tensor.numpy_dtype)
    inputs = {n: _frozen(inputs[n], shapes[n]) for n in tensors}

    golden = Golden(inputs, {}, {}, weights, config)
    returned = reference(spec, case, golden)
    wanted = {f"{n}.magnitude" for n, o in spec.outputs.items() if needs_magnitude(o, case)}
    _same_names(
        f"{spec.reference}.reference",
        returned,
        {*spec.outputs, *wanted},
        optional={f"{n}.magnitude" for n in spec.outputs},
    )
    expected = {n: np.asarray(returned[n]) for n in spec.outputs}
    magnitudes = {
        n: np.asarray(returned[m]) for n in spec.outputs if (m := f"{n}.magnitude") in wanted
    }
    golden = replace(golden, expected=expected, magnitudes=magnitudes)
    for output in spec.outputs.values():
        _check_expected(spec, case, golden, output)
    _check_says_something(spec, case, golden)
    return golden


def _frozen(array: Any, shape: tuple[int, ...]) -> Any:
    """`array` in C order, read-only: a reference that changes its input raises where it does."""
    if isinstance(array, numerics().Gathered):
        array.pool.flags.writeable = array.index.flags.writeable = False
        return array
    array = np.ascontiguousarray(array).reshape(shape).view()
    array.flags.writeable = False
    return array


def _all_used(spec: Spec, case: Case) -> None:
    """What the spec sets and no function of the oracle asks for would be set in vain.

    Not so `exact`: on inputs that are not exact it cannot pass.
    """
    by_inputs, by_reference = (
        dict(inspect.signature(getattr(oracle(spec), name)).parameters)
        for name in ("inputs", "reference")
    )
    for names, taken, where in (
        ([*case.options], by_inputs, "inputs"),
        ([*case.scalars], by_inputs | by_reference, "inputs or reference"),
    ):
        idle = [name for name in names if name not in taken]
        if idle and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            raise Fault(
                Status.SPEC_ERROR,
                f"the spec sets {', '.join(idle)}, but {where} of the oracle does not take it",
            )


def needs_magnitude(output: Output, case: Case) -> bool:
    """An exact case compares bits: it needs no bound."""
    return output.match.kind in ("dot", "companion") and not case.exact


def _check_expected(spec: Spec, case: Case, golden: Golden, output: Output) -> None:
    where = f"{spec.reference}.reference: {output.name}"
    shape, values = spec.shape(output, case), golden.expected[output.name]
    if output.dtype in FLOATS:
        own = output.match.kind == "exact" and values.dtype == output.numpy_dtype
        _check(where, values, shape, values.dtype if own else np.dtype(np.float64))
        nonfinite = sum(
            int(np.count_nonzero(~np.isfinite(rounded(part, output)))) for part in chunks(values)
        )
        if nonfinite and not output.match.nonfinite:
            raise Fault(
                Status.GOLDEN_ERROR,
                f"{where} has {nonfinite} elements that are NaN or infinite in {output.dtype}; "
                "if they belong there, the spec says so with nonfinite = true in its match",
            )
    else:
        integers = values.dtype.kind in "iu" or values.dtype == bool
        _check(where, values, shape, values.dtype if integers else output.numpy_dtype)
        if (values.dtype == bool) != (output.dtype == "bool"):
            raise Fault(Status.GOLDEN_ERROR, f"{where} is {values.dtype}, expected {output.dtype}")
        if output.dtype != "bool" and values.size:
            limits = np.iinfo(output.numpy_dtype)
            if int(values.min()) < limits.min or int(values.max()) > limits.max:
                raise Fault(Status.GOLDEN_ERROR, f"{where} does not fit into {output.dtype}")
    if output.name in golden.magnitudes:
        magnitude = golden.magnitudes[output.name]
        _check(f"{where}.magnitude", magnitude, shape, np.dtype(np.float64))
        for want, size in zip(chunks(values), chunks(magnitude), strict=True):
            finite = np.isfinite(want)
            if not np.all((size[finite] >= 0) & (size[finite] < math.inf)):
                raise Fault(
                    Status.GOLDEN_ERROR, f"{where}.magnitude is negative, infinite or NaN somewhere"
                )
            if output.match.kind == "dot" and np.any(
                np.abs(want[finite]) > size[finite] * (1 + 1e-9)
            ):
                raise Fault(
                    Status.GOLDEN_ERROR,
                    f"{where}.magnitude is smaller than |{output.name}| somewhere; for a sum of "
                    "terms it is the sum of their absolute values",
                )


def _check_says_something(spec: Spec, case: Case, golden: Golden) -> None:
    """A golden that is empty, constant or what was there before passes kernels that do nothing."""
    if case.constant:
        return
    told = {}
    for output in spec.outputs.values():
        values = golden.expected[output.name]
        if values.size == 0:
            told[output.name] = "is empty"
        elif output.inout:
            start = golden.inputs[output.name]
            if digest(rounded(values, output)) == digest(start):
                told[output.name] = "is equal to its initial value"
        elif values.size == 1:
            if not values.any():
                told[output.name] = "is zero"
        elif _constant(values):
            told[output.name] = f"is {values.flat[0]} everywhere"
    flat = [n for n in told if spec.outputs[n].dtype in FLOATS and not spec.outputs[n].inout]
    if flat or len(told) == len(spec.outputs):
        raise Fault(
            Status.VACUOUS,
            "; ".join(f"the golden of {n} {told[n]}" for n in (flat or told))
            + "; a kernel that does nothing might pass. "
            'If this is wanted, the case says constant = "why"',
        )


def _constant(values: np.ndarray) -> bool:
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(-1)
    return bool((bits == bits[0]).all())


def _call(function: Callable, module: str, offered: Mapping[str, Any], *args: Any) -> dict:
    """Call an oracle with the keywords that its signature names."""
    name = f"{module}.{function.__name__}"
    parameters = list(inspect.signature(function).parameters.values())[len(args) :]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = dict(offered)
    else:
        missing = [p.name for p in parameters if p.name not in offered and p.default is p.empty]
        if missing:
            raise Fault(
                Status.SPEC_ERROR,
                f"{name} asks for {', '.join(missing)}; the spec gives {', '.join(offered)}",
            )
        keywords = {p.name: offered[p.name] for p in parameters if p.name in offered}
    try:
        returned = function(*args, **keywords)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Fault(Status.GOLDEN_ERROR, f"{name}: {told_where(error)}") from error
    if not isinstance(returned, dict):
        raise Fault(Status.GOLDEN_ERROR, f"{name} returned {type(returned).__name__}, not a dict")
    return returned


def _same_names(where: str, got: Iterable, want: Iterable, optional: Iterable = ()) -> None:
    missing, unknown = set(want) - set(got), set(got) - set(want) - set(optional)
    if missing or unknown:
        parts = [f"lacks {', '.join(sorted(missing))}"] if missing else []
        parts += [f"returns {', '.join(sorted(unknown))}, not in the spec"] if unknown else []
        raise Fault(Status.GOLDEN_ERROR, f"{where} {' and '.join(parts)}")


def _check(where: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if not isinstance(array, np.ndarray | np.generic | numerics().Gathered):
        raise Fault(Status.GOLDEN_ERROR, f"{where} is a {type(array).__name__}, not an array")
    if array.shape != shape:
        raise Fault(Status.GOLDEN_ERROR, f"{where} has shape {array.shape}, the spec says {shape}")
    if array.dtype != dtype:
        raise Fault(Status.GOLDEN_ERROR, f"{where} is {array.dtype}, expected {dtype}")


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array's elements in order, in flat pieces of at most CHUNK."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def digest(array: np.ndarray) -> str:
    """sha256 of an array's bytes in C order; of a gathered one, of what it is made of."""
    if isinstance(array, numerics().Gathered):
        return hashlib.sha256((digest(array.pool) + digest(array.index)).encode()).hexdigest()
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


# -- the cache -----------------------------------------------------------------------------------


def cache_path(spec: Spec, what: str, cache_dir: Path | None) -> Path:
    if cache_dir is None:
        home = os.environ.get("KDTR_CACHE")
        cache_dir = (Path(home) if home else spec.path.resolve().parents[1] / ".cache") / "goldens"
    parts = (sources.oracle_digest(spec), what, np.__version__, ml_dtypes.__version__, "1")
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(cache_dir) / f"{spec.stem}.{what}.{key[:24]}.safetensors"


def _write_cache(path: Path, golden: Golden, note: str) -> str:
    from safetensors.numpy import save

    groups = {
        "inputs": golden.inputs, "expected": golden.expected, "magnitudes": golden.magnitudes,
    }  # fmt: skip
    tensors = {
        f"{g}.{n}": np.ascontiguousarray(a) for g, table in groups.items() for n, a in table.items()
    }
    if sum(a.nbytes for a in tensors.values()) <= CACHE_LIMIT:
        hashes = json.dumps({name: digest(array) for name, array in tensors.items()})
        replace_file(path, save(tensors, {"sha256": hashes}))
    return note


def _read_cache(path: Path, note: str = "") -> tuple[Golden | None, str]:
    """The golden at `path`; None and a note if it is damaged, None if it is not there."""
    from safetensors import SafetensorError, safe_open

    groups: dict[str, dict[str, np.ndarray]] = {"inputs": {}, "expected": {}, "magnitudes": {}}
    try:
        with safe_open(path, framework="numpy") as file:
            hashes = json.loads((file.metadata() or {})["sha256"])
            if set(hashes) != set(file.keys()):
                raise ValueError("the list of tensors does not fit")
            for key in hashes:
                array = file.get_tensor(key)
                if digest(array) != hashes[key]:
                    raise ValueError(f"{key} has another sha256")
                group, _, name = key.partition(".")
                groups[group][name] = array
    except FileNotFoundError:
        return None, note
    except (SafetensorError, ValueError, KeyError) as error:
        return None, f"golden cache entry {path.name} was damaged ({error}) and made again"
    return Golden(groups["inputs"], groups["expected"], groups["magnitudes"]), note
