"""Is what came out what had to come out? One Result an output.

Shape, dtype and layout come first, then elements that were never written, then NaN and infinity,
then the values, by the output's `match`:

exact      The bits of the golden, rounded once. Also the sign of a zero; any NaN equals any NaN.
ulp        At most n representable values away from the golden, rounded once. -0 and 0 are one.
dot        What rounding to `store` makes of some value within the allowance of the golden, where
           allowance = n * u(accumulate) * magnitude with n = slack * sqrt(terms). Fewer than FEW
           terms count as that many, because errors do not average over a handful, but n is never
           more than the terms, which is certain where a term costs one rounding (a kernel that
           rounds more has a companion). So |err| <= allowance + half the distance of
           `store` numbers around the result, which is at most u(store) * |golden| but for the
           allowance itself.
companion  The same, where allowance = slack * magnitude.

Headroom is the share of the allowance, or of the ulps, that was used: 1 is the limit. Rounding to
`store` does not count, because it is the same for every right kernel and would hide all else.

In an exact-regime case every sum is representable, so dot, companion and ulp allow no error at all
there; a zero may have either sign, because that depends on how an empty sum started.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from harness.golden import CHUNK, Golden, numerics, rounded
from harness.report import Result, Status
from harness.spec import FLOATS, Case, Output, Spec

FEW = 16  # terms


@dataclass(frozen=True)
class Actual:
    """What a launcher left in its outputs. Flat masks mark what only two runs can show."""

    outputs: Mapping[str, np.ndarray]
    device: str
    time_us: float | None = None
    unwritten: Mapping[str, np.ndarray] = field(default_factory=dict)
    unstable: Mapping[str, np.ndarray] = field(default_factory=dict)


def compare(spec: Spec, case: Case, golden: Golden, actual: Actual) -> list[Result]:
    """One Result for every output of the spec, in its order."""
    return [_compare(spec, case, golden, actual, output) for output in spec.outputs.values()]


def lax(spec: Spec, case: Case, golden: Golden) -> list[str]:
    """The outputs whose match zeros would pass: it holds nothing, or the golden says nothing."""
    found = []
    for name, output in spec.outputs.items():
        judge, want = _Judge(spec, case, output), golden.expected[name].reshape(-1)
        if judge.exact or not want.size:
            continue
        magnitude = golden.magnitudes.get(name)
        flat = None if magnitude is None else magnitude.reshape(-1)

        def passes(start: int, judge: _Judge = judge, want: Any = want, flat: Any = flat) -> bool:
            part = slice(start, start + CHUNK)
            zeros = np.zeros(want[part].size, judge.output.numpy_dtype)
            with np.errstate(all="ignore"):
                odd, ratio = judge(zeros, want[part], None if flat is None else flat[part])
            return not odd.any() and not (ratio > 1).any()

        if all(map(passes, range(0, want.size, CHUNK))):
            found.append(name)
    return found


def rule(spec: Spec, case: Case, output: Output) -> str:
    """An output's match in words, as failures and reports print it."""
    match = output.match
    if match.kind == "exact":
        return "exact"
    if case.exact:
        return "no error, the inputs make every sum exact"
    if match.kind == "ulp":
        return f"within {match.ulp} ulp of {output.dtype}"
    if match.kind == "dot":
        terms = spec.terms(output, case)
        return (
            f"within {_roundings(match.slack, terms):.3g} * u({match.accumulate}) * magnitude for"
            f" {terms} terms, then rounded to {match.store}"
        )
    return f"within {match.slack:g} * magnitude, then rounded to {match.store}"


def _compare(spec: Spec, case: Case, golden: Golden, actual: Actual, output: Output) -> Result:
    name, shape = output.name, spec.shape(output, case)
    base = Result(name, Status.PASSED, 0, math.prod(shape), rule(spec, case, output))
    got, want = actual.outputs.get(name), golden.expected[name]
    if got is None:
        return replace(base, status=Status.UNWRITTEN, message="it is missing")
    if got.shape != shape:
        return replace(
            base, status=Status.WRONG_SHAPE, message=f"got shape {got.shape}, want {shape}"
        )
    if got.dtype != output.numpy_dtype:
        return replace(
            base, status=Status.WRONG_DTYPE, message=f"got {got.dtype}, want {output.dtype}"
        )
    if not got.flags.c_contiguous:
        message = f"got strides {got.strides}, want C-contiguous"
        return replace(base, status=Status.WRONG_SHAPE, message=message)
    base = replace(base, bits=hashlib.sha256(got.reshape(-1).view(np.uint8).data).hexdigest()[:16])

    unwritten, nonfinite, wrong = _Tally(shape), _Tally(shape), _Tally(shape)
    judge = _Judge(spec, case, output)
    never = actual.unwritten.get(name)
    flat_got, flat_want = got.reshape(-1), want.reshape(-1)
    magnitude = golden.magnitudes.get(name)
    flat_magnitude = None if magnitude is None else magnitude.reshape(-1)
    for start in range(0, flat_got.size, CHUNK):
        part = slice(start, start + CHUNK)
        w, g = flat_want[part], flat_got[part]
        m = None if flat_magnitude is None else flat_magnitude[part]
        skip = np.zeros(g.size, bool) if never is None else never[part]
        unwritten.add(start, skip)
        with np.errstate(all="ignore"):
            odd, ratio = judge(g, w, m)
        nonfinite.add(start, odd & ~skip)
        ratio[odd | skip] = 0.0
        wrong.add(start, ratio > 1.0, ratio)

    headroom = None if judge.exact else wrong.worst
    base = replace(base, headroom=headroom)
    for status, tally in (
        (Status.UNWRITTEN, unwritten),
        (Status.NONFINITE, nonfinite),
        (Status.WRONG, wrong),
    ):
        if tally.count:
            result = _failed(base, status, tally, judge, got, want, magnitude)
            if status is not Status.WRONG and wrong.count:
                result = replace(result, message=f"{result.message}; {wrong.count} more are wrong")
            return result
    unstable = actual.unstable.get(name)
    if unstable is not None and unstable.any():
        tally = _Tally(shape)
        tally.add(0, unstable)
        return _failed(base, Status.NONDETERMINISTIC, tally, judge, got, want, magnitude)
    return base


def _failed(
    base: Result,
    status: Status,
    tally: "_Tally",
    judge: "_Judge",
    got: np.ndarray,
    want: np.ndarray,
    magnitude: np.ndarray | None,
) -> Result:
    """The Result that says where, how far, and what the wrong elements have in common."""
    at = tally.first
    assert at is not None
    g, w = got[at].reshape(1), want[at].reshape(1)
    m = None if magnitude is None else magnitude[at].reshape(1)
    bound = judge.bound(g, m)
    with np.errstate(all="ignore"):
        said = {
            Status.UNWRITTEN: lambda: ["the poison survived both runs"],
            Status.NONFINITE: lambda: ["the golden has no NaN or infinity there, or another"],
            Status.NONDETERMINISTIC: lambda: [
                "a second run, on other values in outputs and scratch, gave other bits"
            ],
            Status.WRONG: lambda: [
                judge.how_far(g, w, m, tally.worst), *judge.likeness(got, want, magnitude, tally)
            ],
        }[status]()  # fmt: skip
    return replace(
        base,
        status=status,
        wrong=tally.count,
        within=tally.box(),
        first=at,
        got=_value(g[0]),
        want=_value(rounded(w, judge.output)[0] if judge.exact else w[0]),
        bound=None if bound is None else float(bound[0]),
        message="; ".join(said),
    )


def _roundings(slack: float, terms: int) -> float:
    """How many roundings, all one way and of the whole magnitude, a sum's error may look like."""
    return min(terms, slack * math.sqrt(max(terms, FEW)))


class _Judge:
    """Error over bound, element by element, for one output in one case."""

    def __init__(self, spec: Spec, case: Case, output: Output):
        match = output.match
        self.output = output
        self.bits = match.kind == "exact"  # otherwise +0 and -0 are one
        self.exact = self.bits or case.exact or output.dtype not in FLOATS
        self.ulp = match.ulp if match.kind == "ulp" else 0
        self.factor = 0.0
        if match.kind == "dot" and not case.exact:
            u = float(ml_dtypes.finfo(match.accumulate).eps) / 2
            self.factor = _roundings(match.slack, spec.terms(output, case)) * u
        elif match.kind == "companion" and not case.exact:
            self.factor = match.slack

    def __call__(
        self, got: np.ndarray, want: np.ndarray, magnitude: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(NaN or infinity out of place, error over bound); 1-D arrays in, 1-D arrays out."""
        if self.output.dtype not in FLOATS:
            same = _bits(got) == _bits(rounded(want, self.output))
            return np.zeros(got.size, bool), np.where(same, 0.0, math.inf)
        near = rounded(want, self.output)
        if self.output.match.nonfinite:
            odd = np.isnan(got) != np.isnan(near)
            odd |= (np.isinf(got) | np.isinf(near)) & (got != near)
            finite = np.isfinite(near)
        else:
            odd = ~np.isfinite(got)
            finite = np.ones(got.size, bool)
        if self.bits:
            ratio = np.where(_bits(got) == _bits(near), 0.0, math.inf)
        elif self.exact:
            ratio = np.where(numerics().ulp_distance(got, near) == 0, 0.0, math.inf)
        elif self.ulp:
            ratio = numerics().ulp_distance(got, near).astype(np.float64) / self.ulp
        else:
            assert magnitude is not None
            beyond = np.abs(got.astype(np.float64) - want) - self.store_error(got)
            allowance = self.factor * magnitude
            ratio = np.where(beyond <= 0, 0.0, beyond / allowance)  # 0 / 0 is no error
        return odd, np.where(finite, ratio, 0.0)

    def store_error(self, got: np.ndarray) -> np.ndarray:
        """What rounding to the store format may have moved, float64: half an ulp of the result."""
        return numerics().ulp(got, self.output.match.store) / 2

    def bound(self, got: np.ndarray, magnitude: np.ndarray | None) -> np.ndarray | None:
        """Largest error allowed, in float64; None where the match is not a bound."""
        if not self.factor or magnitude is None:
            return None
        return self.factor * magnitude + self.store_error(got)

    def how_far(
        self, got: np.ndarray, want: np.ndarray, magnitude: np.ndarray | None, worst: float
    ) -> str:
        error = abs(_value(got[0]) - _value(want[0]))
        if self.output.dtype not in FLOATS:
            return f"off by {error}"
        if self.exact or self.ulp:
            ulps = int(numerics().ulp_distance(got, rounded(want, self.output))[0])
            said = f"off by {ulps} ulp" if ulps < 1000 else f"off by {error:.3g}"
            return said if self.exact else f"{said}, the worst by {worst * self.ulp:.3g} ulp"
        _, ratio = self(got, want, magnitude)
        return (
            f"off by {error:.3g}, {ratio[0]:.3g} times the allowance, the worst {worst:.3g} times"
        )

    def likeness(
        self, got: np.ndarray, want: np.ndarray, magnitude: np.ndarray | None, tally: "_Tally"
    ) -> list[str]:
        """What the wrong elements look like: a constant, a factor, another element's value."""
        if got.size > 1 and (got == got.flat[0]).all():
            return [f"got {_value(got.flat[0])} everywhere"]
        some = np.concatenate(tally.some)
        g, w = (a.reshape(-1)[some].astype(np.float64) for a in (got, want))
        factor = g / w
        typical = np.median(factor)
        alike = np.ptp(factor) < 1e-2 * abs(typical) and abs(typical - 1) > 1e-2
        if len(some) > 2 and np.isfinite(typical) and alike:
            return [f"got is about {typical:.4g} * want in the wrong elements"]
        if got.size > CHUNK or not g[0]:
            return []
        here = np.broadcast_to(got.reshape(-1)[some[0]], want.size)
        every = None if magnitude is None else magnitude.reshape(-1)
        odd, ratio = self(here, want.reshape(-1), every)
        places = np.flatnonzero(~odd & (ratio <= 1))
        if places.size != 1:
            return []
        place = tuple(int(i) for i in np.unravel_index(places[0], want.shape))
        return [f"got is what belongs at {place}"]


class _Tally:
    """Counts wrong elements, keeps the first one, the worst ratio, and the box that holds them."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.count, self.worst = 0, 0.0
        self.first: tuple[int, ...] | None = None
        self.some: list[np.ndarray] = []  # flat indices of about a thousand of them
        self.low = self.high = np.zeros(len(shape), int)

    def add(self, start: int, wrong: np.ndarray, ratio: np.ndarray | None = None) -> None:
        if ratio is not None and ratio.size:
            self.worst = max(self.worst, float(ratio.max()))
        at = np.flatnonzero(wrong)
        if not at.size:
            return
        where = np.stack(np.unravel_index(at + start, self.shape), axis=-1)
        low, high = where.min(axis=0), where.max(axis=0)
        if self.first is None:
            self.first, self.low, self.high = tuple(where[0].tolist()), low, high
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        if self.count < 1000:
            self.some.append(at[:1000] + start)
        self.count += at.size

    def box(self) -> str:
        sides = (
            str(a) if a == b else f"{a}:{b + 1}" for a, b in zip(self.low, self.high, strict=True)
        )
        return f"[{', '.join(sides)}]"


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _value(number: np.generic) -> float | int | bool:
    """A numpy scalar as the Python number that JSON and people can read."""
    if number.dtype.kind in "iu":
        return int(number)
    return bool(number) if number.dtype == bool else float(number)
