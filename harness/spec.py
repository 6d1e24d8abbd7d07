"""A spec file becomes a `Spec`. Nothing else knows the TOML format (specs/README.md).

Everything here is data and checks: no oracle and no kernel is imported. A file that cannot be
read, a key that nobody knows, an axis without a value: `SpecError`, which names file and key and
says what was expected.
"""

import math
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

STAGES = ("golden", "kernel", "layer", "model", "decode")

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{f"float{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{
        f"{kind}{bits}": np.dtype(f"{kind}{bits}")
        for bits in (8, 16, 32, 64)
        for kind in ("int", "uint")
    },
    "bool": np.dtype(bool),
}
FLOATS = ("bfloat16", "float16", "float32", "float64")

_TABLES = ("axes", "scalars", "options", "inputs", "outputs", "scratch", "cases", "fuzz", "mutants")
_TOP = ("stage", "kernel", "reference", "weights", "invariant", *_TABLES)
_CASE = {  # keys of a case that are neither axis, scalar nor option: type, what is expected
    "bench": (bool, "true or false"),
    "sim": (bool, "true or false"),
    "exact": (bool, "true or false"),
    "gpus": (int, "a number of GPUs, 1 or more"),
    "timeout_s": (float, "seconds, more than 0, at most 86400"),
    "unsupported": (str, "the reason why the launcher refuses this case"),
    "constant": (str, "the reason why this golden is empty or constant"),
    "draw": (int, "a number, 1 or more, that names other random inputs"),
    "weights": (str, "the name of a bundle"),
}
# Keywords that the harness itself passes to oracles and launchers.
_TAKEN = {"rng", "exact", "weights", "config", "stream"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class SpecError(ValueError):
    """A spec that cannot be used: `file`, `key`, and what was `expected` there."""

    def __init__(self, file: Path | str, key: str, expected: str, got: object = None):
        self.file = str(file).encode(errors="backslashreplace").decode()  # a name may be no UTF-8
        self.key, self.expected, self.got = key, expected, got
        super().__init__(file, key, expected, got)

    def __str__(self) -> str:
        got = "" if self.got is None else f", got {self.got!r}"
        return f"{self.file}: {self.key}: expected {self.expected}{got}"


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[str | int, ...]  # axis names and literals
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Match:
    """How near an output must come to its golden; `kind` says which fields count.

    exact      same bits
    ulp        within `ulp` units in the last place of the correctly rounded golden
    dot        within n * u(accumulate) * magnitude, then rounded to `store`; n is about
               slack * sqrt(terms), see harness/compare.py
    companion  within slack * magnitude, then rounded to `store`
    """

    kind: str
    ulp: int = 0
    terms: str | int = 0
    accumulate: str = "float32"
    store: str = ""
    slack: float = 0.0
    nonfinite: bool = False  # the golden may hold NaN or infinity


@dataclass(frozen=True)
class Output(Tensor):
    match: Match
    inout: bool = False  # inputs() makes its initial value, the launcher changes it in place


@dataclass(frozen=True)
class Case:
    name: str
    axes: Mapping[str, int]  # complete: the spec's defaults and this case's own
    scalars: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    bench: bool = False
    sim: bool = False
    exact: bool = False
    gpus: int = 1
    timeout_s: float = 300.0
    unsupported: str | None = None
    constant: str | None = None
    draw: int | None = None  # random inputs by this number, whatever the case is called
    weights: str | None = None


@dataclass(frozen=True)
class Range:
    """What `kdtr fuzz` may draw: one of `values`, or a number lo, lo + step, .. up to hi.

    With `most` it draws a text of 1 to `most` such numbers, "63,64,65". In the simulator nothing
    above `sim` is drawn.
    """

    values: tuple = ()
    lo: int = 0
    hi: int = 0
    step: int = 1
    most: int = 0
    sim: int | None = None


@dataclass(frozen=True)
class Mutant:
    name: str
    find: str
    replace: str
    equivalent: str | None = None
    module: str | None = None  # dotted name; None: the kernel's, in stage golden the oracle's
    gpu: str | None = None  # why the simulator cannot show it
    sim: str | None = None  # why a GPU need not show it


@dataclass(frozen=True)
class Spec:
    path: Path
    stem: str
    stage: str
    kernel: str | None  # "module:function"
    reference: str  # "module"
    weights: str | None
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Output]
    scratch: Mapping[str, Tensor]
    cases: Mapping[str, Case]
    axes: Mapping[str, int]  # these and the next two: where a case says nothing
    scalars: Mapping[str, Any]
    options: Mapping[str, Any]
    invariant: tuple[str, ...]  # scalars that choose how something is computed and never what
    fuzz: Mapping[str, Range]
    mutants: tuple[Mutant, ...]

    @property
    def id(self) -> str:
        return f"specs/{self.path.name}"

    def case_id(self, case: Case) -> str:
        """The pytest id, the key of reports, baselines and receipts."""
        return f"{self.id}::{case.name}"

    def tensors(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.outputs, **self.scratch}

    def shape(self, tensor: Tensor, case: Case) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else case.axes[n] for n in tensor.shape)

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Shape of every input, output and scratch tensor in this case."""
        return {name: self.shape(tensor, case) for name, tensor in self.tensors().items()}

    @property
    def defaults(self) -> dict[str, Any]:
        return {**self.axes, **self.scalars, **self.options}

    def axis_names(self) -> set[str]:
        """Every axis that has a default or that a shape or a match names."""
        names = {n for t in self.tensors().values() for n in t.shape if isinstance(n, str)}
        terms = {o.match.terms for o in self.outputs.values()}
        return {*self.axes, *names, *(n for n in terms if isinstance(n, str))}

    def terms(self, output: Output, case: Case) -> int:
        """Number of terms in the sum behind one element of a `dot` output."""
        terms = output.match.terms
        return terms if isinstance(terms, int) else case.axes[terms]


def discover(root: Path | str = ".") -> list[Path]:
    """The spec files of the checkout at `root`, sorted."""
    return sorted(Path(root).joinpath("specs").glob("*.toml"))


def load(path: Path | str) -> Spec:
    """Read one spec. Raises SpecError for whatever is wrong with it."""
    path = Path(path)
    if not _STEM.fullmatch(path.stem):  # a part of pytest ids and of file names in the cache
        raise SpecError(path, "file", "a name of letters, digits, _, - and .", path.name)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise SpecError(path, "file", "a regular file")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(path, "file", f"a readable UTF-8 file ({error})") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(path, "file", f"valid TOML ({error})") from None
    try:
        return _Reader(path, table).spec()
    except SpecError:
        raise
    except (
        Exception
    ) as error:  # a broken spec is a verdict on itself, and must cost no other its own
        raise SpecError(path, "file", f"a spec, and not {error!r}") from error


def find_module(name: str) -> ModuleSpec | None:
    """Where Python finds the module of a dotted name; None if nowhere.

    Imports nothing, where `importlib.util.find_spec("a.b")` imports a, which may do anything: to
    read a spec is no reason to run what it names.
    """
    top, *rest = name.split(".")
    try:
        found = find_spec(top)
    except (ImportError, ValueError):  # of "", or of __main__
        return None
    whole = top
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return None
        whole = f"{whole}.{part}"
        known = sys.modules.get(whole)
        path = found.submodule_search_locations
        found = known.__spec__ if known else PathFinder.find_spec(whole, path)
    return found


class _Reader:
    """Checks on the way from tables to a Spec; holds the file name for the errors."""

    def __init__(self, path: Path, table: dict[str, Any]):
        self.path, self.table = path, table

    def spec(self) -> Spec:
        self.known("", self.table, _TOP)
        for name in _TABLES:
            kind = list if name == "mutants" else dict
            if not isinstance(self.table.get(name, kind()), kind):
                raise self.error(name, "a table" if kind is dict else "an array of tables")
        stage = self.table.get("stage")
        if stage not in STAGES:
            raise self.error("stage", f"one of {', '.join(STAGES)}", stage)

        self.axes = self.section("axes", lambda v: _is_int(v) and v >= 0, "an integer, 0 or more")
        self.scalars = self.section(
            "scalars",
            lambda v: _is_constant(v) and not isinstance(v, str),
            "an integer, a float or a bool",
        )
        self.options = self.section("options", _is_constant, "a string, a number or a bool")
        inputs = {n: self.tensor("inputs", n, t) for n, t in self.items("inputs")}
        outputs = {n: self.output(n, t) for n, t in self.items("outputs")}
        scratch = {n: self.tensor("scratch", n, t) for n, t in self.items("scratch")}
        if not outputs:
            raise self.error("outputs", "at least one output")
        tensors = [*inputs.values(), *outputs.values(), *scratch.values()]
        self.used_axes = {a for t in tensors for a in t.shape if isinstance(a, str)}
        self.used_axes |= {
            o.match.terms for o in outputs.values() if isinstance(o.match.terms, str)
        }
        self.distinct_names()

        weights = self.text("weights", "the name of a bundle")
        cases = {n: self.case(n, c, weights) for n, c in self.items("cases")}
        if not cases:
            raise self.error("cases", "at least one case")
        return Spec(
            path=self.path,
            stem=self.path.stem,
            stage=stage,
            kernel=self.kernel(stage),
            reference=self.reference(),
            weights=weights,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            cases=cases,
            axes=self.axes,
            scalars=self.scalars,
            options=self.options,
            invariant=self.invariant(),
            fuzz=self.fuzz(),
            mutants=self.mutants(),
        )

    # -- the pieces ---------------------------------------------------------------------------

    def kernel(self, stage: str) -> str | None:
        name = self.text("kernel", '"module:function"')
        if stage == "golden":
            if name is not None:
                raise self.error("kernel", "no kernel: stage golden checks the oracle alone", name)
            return None
        if name is None or not re.fullmatch(r"[\w.]+:\w+", name):
            raise self.error("kernel", '"module:function"', name)
        self.module_exists("kernel", name.partition(":")[0])
        return name

    def reference(self) -> str:
        name = self.text("reference", 'the dotted name of the oracle, as in "goldens.rms_norm"')
        if name is None:
            raise self.error("reference", 'the dotted name of the oracle, as in "goldens.rms_norm"')
        self.module_exists("reference", name)
        return name

    def module_exists(self, key: str, name: str) -> None:
        if find_module(name) is None:
            raise self.error(key, "a module that Python can find", name)

    def tensor(self, section: str, name: str, table: object, extra: Iterable[str] = ()) -> Tensor:
        key = f"{section}.{name}"
        if not isinstance(table, dict):
            raise self.error(key, '{ shape = [...], dtype = "..." }', table)
        self.known(key, table, ("shape", "dtype", *extra))
        shape, dtype = table.get("shape"), table.get("dtype")
        if not isinstance(shape, list) or not shape:
            raise self.error(f"{key}.shape", "a list of axis names and integers", shape)
        for entry in shape:
            if not (_is_int(entry) and entry >= 0) and not _is_name(entry):
                raise self.error(f"{key}.shape", "axis names and integers, 0 or more", entry)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.error(f"{key}.dtype", f"one of {', '.join(DTYPES)}", dtype)
        return Tensor(name, tuple(shape), dtype)

    def output(self, name: str, table: object) -> Output:
        tensor = self.tensor("outputs", name, table, ("match", "inout"))
        assert isinstance(table, dict)
        inout = table.get("inout", False)
        if not isinstance(inout, bool):
            raise self.error(f"outputs.{name}.inout", "true or false", inout)
        match = self.match(f"outputs.{name}.match", table.get("match"), tensor.dtype)
        return Output(tensor.name, tensor.shape, tensor.dtype, match, inout)

    def match(self, key: str, table: object, dtype: str) -> Match:
        expected = '"exact", { ulp = n } or { bound = "dot" | "companion", ... }'
        if table == "exact":
            return Match("exact")
        if not isinstance(table, dict):
            raise self.error(key, expected, table)
        if dtype not in FLOATS:
            raise self.error(key, f'"exact", the only match for {dtype}', table)
        nonfinite = table.get("nonfinite", False)
        if not isinstance(nonfinite, bool):
            raise self.error(f"{key}.nonfinite", "true or false", nonfinite)
        if "exact" in table:
            self.known(key, table, ("exact", "nonfinite"))
            if table["exact"] is not True:
                raise self.error(f"{key}.exact", "true", table["exact"])
            return Match("exact", nonfinite=nonfinite)
        if "ulp" in table:
            self.known(key, table, ("ulp", "nonfinite"))
            if not _is_int(table["ulp"]) or table["ulp"] < 1:
                raise self.error(f"{key}.ulp", 'an integer, 1 or more (0 is "exact")', table["ulp"])
            return Match("ulp", ulp=table["ulp"], nonfinite=nonfinite)
        bound = table.get("bound")
        if bound not in ("dot", "companion"):
            raise self.error(key, expected, table)
        keys = ("terms", "accumulate") if bound == "dot" else ()
        self.known(key, table, ("bound", "store", "slack", "nonfinite", *keys))
        slack = table.get("slack")
        if not _is_number(slack) or not 0 < slack < math.inf:
            raise self.error(f"{key}.slack", "a number, more than 0", slack)
        terms = table.get("terms", 0)
        if bound == "dot" and not (_is_int(terms) and terms >= 1) and not _is_name(terms):
            raise self.error(f"{key}.terms", "an axis name or an integer, 1 or more", terms)
        for name in ("accumulate", "store"):
            if table.get(name, "float32") not in FLOATS:
                raise self.error(f"{key}.{name}", f"one of {', '.join(FLOATS)}", table[name])
        return Match(
            bound,
            terms=terms,
            accumulate=table.get("accumulate", "float32"),
            store=table.get("store", dtype),
            slack=float(slack),
            nonfinite=nonfinite,
        )

    def case(self, name: str, table: object, weights: str | None) -> Case:
        key = f"cases.{name}"
        if not _NAME.fullmatch(name):
            raise self.error(key, "a name of letters, digits and _", name)
        if name == "spec":  # the case of a spec that cannot be read
            raise self.error(key, "another name, the harness uses this one itself", name)
        if not isinstance(table, dict):
            raise self.error(key, "a table", table)
        axes, scalars, options = dict(self.axes), dict(self.scalars), dict(self.options)
        reserved: dict[str, Any] = {"weights": weights}
        for entry, value in table.items():
            where = f"{key}.{entry}"
            if entry in _CASE:
                reserved[entry] = self.reserved(where, entry, value)
            elif entry in scalars:
                scalars[entry] = self.like(where, scalars[entry], value)
            elif entry in options:
                options[entry] = self.like(where, options[entry], value)
            elif entry in self.axes or entry in self.used_axes:
                if not _is_int(value) or value < 0:
                    raise self.error(where, "an integer, 0 or more", value)
                axes[entry] = value
            else:
                declared = sorted({*self.axes, *self.used_axes, *scalars, *options, *_CASE})
                raise self.error(where, f"one of {', '.join(declared)}", entry)
        for axis in sorted(self.used_axes - set(axes)):
            raise self.error(f"{key}.{axis}", "a value: the axis is used in a shape or a match")
        return Case(name, axes, scalars, options, **reserved)

    def reserved(self, where: str, entry: str, value: object) -> object:
        kind, expected = _CASE[entry]
        if kind is float and _is_int(value):
            value = float(value)
        positive = kind not in (int, float) or (isinstance(value, int | float) and value > 0)
        endless = kind is float and isinstance(value, float) and value > 86400  # no timer takes inf
        if type(value) is not kind or not positive or endless or value == "":
            raise self.error(where, expected, value)
        return value

    def invariant(self) -> tuple[str, ...]:
        names = self.table.get("invariant", [])
        if not isinstance(names, list) or not all(n in self.scalars for n in names):
            raise self.error("invariant", "a list of names of [scalars]", names)
        return tuple(names)

    def fuzz(self) -> dict[str, Range]:
        ranges = {}
        for name, table in self.items("fuzz"):
            key = f"fuzz.{name}"
            constants = {**self.scalars, **self.options, "exact": False}
            if name in constants:
                default = constants[name]
            elif name in self.axes or name in self.used_axes:
                default = 0
            else:
                raise self.error(key, "the name of an axis, scalar or option, or exact", name)
            if isinstance(table, list):  # [lo, hi] for an axis
                pair = name not in constants and len(table) == 2
                bounds = dict(zip(("lo", "hi"), table, strict=True)) if pair else {}
                table = bounds or {"values": table}
            ranges[name] = self.range(key, default, table)
        return ranges

    def range(self, key: str, default: object, table: object) -> Range:
        expected = (
            "a list of values, [lo, hi] for an axis, { values, sim } or { lo, hi, step, sim, most }"
        )
        if not isinstance(table, dict) or ("values" in table) == ("lo" in table and "hi" in table):
            raise self.error(key, expected, table)
        known = ("values", "sim") if "values" in table else ("lo", "hi", "step", "sim", "most")
        self.known(key, table, known)
        for entry in table.keys() - {"values"}:
            if not _is_int(table[entry]) or table[entry] < (entry in ("step", "most")):
                raise self.error(f"{key}.{entry}", "an integer, 0 or more", table[entry])
        if "values" in table:
            values = table["values"]
            if not isinstance(values, list) or not values:
                raise self.error(key, expected, values)
            made = Range(tuple(self.like(key, default, v) for v in values), sim=table.get("sim"))
        else:
            made = Range(**table)
            kind = str if made.most else int
            if type(default) is not kind:
                raise self.error(key, f"a {type(default).__name__}, as its default", table)
        smallest = min(made.values, default=0) if made.values and _is_int(default) else made.lo
        if (made.sim is not None and made.sim < smallest) or (
            not made.values and made.hi < made.lo
        ):
            raise self.error(key, "at least one value, in the simulator too", table)
        return made

    def mutants(self) -> tuple[Mutant, ...]:
        mutants = []
        for i, table in enumerate(self.table.get("mutants", [])):
            key = f"mutants[{i}]"
            if not isinstance(table, dict):
                raise self.error(key, "a table", table)
            self.known(key, table, [entry.name for entry in fields(Mutant)])
            for entry in ("name", "find", "replace"):
                if not isinstance(table.get(entry), str) or (
                    entry != "replace" and not table[entry]
                ):
                    raise self.error(f"{key}.{entry}", "a string", table.get(entry))
            reason = table.get("equivalent")
            if reason is not None and (not isinstance(reason, str) or not reason):
                raise self.error(f"{key}.equivalent", "the reason why it changes nothing", reason)
            for entry, why in (("gpu", "it needs a GPU"), ("sim", "a GPU need not show it")):
                if not isinstance(table.get(entry, "why"), str) or table.get(entry) == "":
                    raise self.error(f"{key}.{entry}", f"the reason why {why}", table[entry])
            if len({"equivalent", "gpu", "sim"} & set(table)) > 1:
                raise self.error(key, "one of equivalent, gpu and sim", sorted(table))
            module = table.get("module")
            if module is not None:
                if not isinstance(module, str) or not re.fullmatch(r"[\w.]+", module):
                    raise self.error(f"{key}.module", "the dotted name of a module", module)
                self.module_exists(f"{key}.module", module)
            mutants.append(Mutant(**table))
        names = [m.name for m in mutants]
        for name in names:
            if names.count(name) > 1:
                raise self.error("mutants", "names that differ", name)
        return tuple(mutants)

    # -- small checks -------------------------------------------------------------------------

    def error(self, key: str, expected: str, got: object = None) -> SpecError:
        return SpecError(self.path, key, expected, got)

    def known(self, key: str, table: Mapping[str, object], keys: Iterable[str]) -> None:
        for name in table:
            if name not in keys:
                raise self.error(f"{key}.{name}".lstrip("."), f"one of {', '.join(keys)}", name)

    def items(self, section: str) -> Iterable[tuple[str, Any]]:
        return self.table.get(section, {}).items()

    def section(self, name: str, ok: Any, expected: str) -> dict[str, Any]:
        for key, value in self.items(name):
            if not ok(value):
                raise self.error(f"{name}.{key}", expected, value)
        return dict(self.items(name))

    def text(self, key: str, expected: str) -> str | None:
        value = self.table.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(key, expected, value)
        return value

    def like(self, where: str, default: object, value: object) -> object:
        """A value of the default's type; an integer may stand where a float is declared."""
        if type(default) is float and _is_int(value):
            return float(value)
        if type(value) is not type(default) or not _is_constant(value):
            raise self.error(
                where, f"a {type(default).__name__}, as its default {default!r}", value
            )
        return value

    def distinct_names(self) -> None:
        """Axes, scalars, options and tensors are passed by keyword: a name may be used once."""
        seen: dict[str, str] = {}
        for section in ("axes", "scalars", "options", "inputs", "outputs", "scratch"):
            for name, _ in self.items(section):
                key = f"{section}.{name}"
                if not _is_name(name) or name in _TAKEN or name in _CASE:
                    raise self.error(
                        key, "a parameter's name that the harness does not use itself", name
                    )
                if name in seen:
                    raise self.error(key, f"a name of its own ({seen[name]} has it)", name)
                seen[name] = key
        for name in sorted(self.used_axes):
            if seen.get(name, "axes").partition(".")[0] != "axes":
                raise self.error(seen[name], "a name that is not also an axis", name)


def _is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer of TOML, which ends at 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_constant(value: object) -> bool:
    return isinstance(value, str | float | bool) or _is_int(value)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, float) or _is_int(value)


def _is_name(value: object) -> TypeGuard[str]:
    """Whether it can be a parameter of a Python function."""
    return isinstance(value, str) and bool(_NAME.fullmatch(value)) and not iskeyword(value)
