"""A case becomes its verdict: golden, two runs of the launcher, compare.

What a launch is, and what is looked at around one, is in harness/launch.py; poison and guard bands
in harness/memory.py.
"""

import contextlib
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from harness import golden as goldens
from harness import sources, vacuity
from harness.compare import Actual, compare, lax
from harness.golden import Golden
from harness.launch import (
    Launcher,
    Prepared,
    check_signature,
    device_name,
    kernel_name,
    load_launcher,
)
from harness.memory import flat_bits, poison
from harness.report import Fault, Result, Status, Verdict, printable, result_lines, told, told_where
from harness.spec import Case, Spec

# The first of these that any output has is the status of the case.
_GRAVITY = (
    Status.WRONG_SHAPE,
    Status.WRONG_DTYPE,
    Status.UNWRITTEN,
    Status.NONFINITE,
    Status.WRONG,
    Status.NONDETERMINISTIC,
)


def run_case(
    spec: Spec,
    case: Case,
    *,
    kernel: str | Launcher | None = None,
    cache_dir: Path | None = None,
    turn: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    drawn: bool = False,
) -> Verdict:
    """Golden, run, compare. Never raises for a fault of spec, oracle or kernel.

    `kernel` ("module:function" or a launcher) runs in place of the spec's. `turn()` is entered
    while the device is used, and at no other time: neighbours share it. `drawn` says that the case
    is no case of the spec but one of `kdtr fuzz`: its golden is not kept, and the launcher may
    refuse it with NotImplementedError, which is UNSUPPORTED then.
    """
    on_host = spec.stage == "golden"
    name = "" if on_host else kernel_name(kernel or spec.kernel or "")
    verdict = Verdict(
        id=spec.case_id(case),
        stage=spec.stage,
        spec=spec.stem,
        case=case.name,
        status=Status.PASSED,
        device="host" if on_host else device_name(),
        kernel=name,
        reference=spec.reference,
        replaced=kernel is not None and not on_host,
    )
    try:
        verdict = replace(verdict, digest=sources.case_digest(spec, case, kernel=name or None))
        if drawn:
            golden = goldens.build(spec, case)
        else:
            golden = goldens.make(spec, case, cache_dir=cache_dir)
        if not drawn and case.name == next(iter(spec.cases)):  # it answers for all of them
            vacuity.inputs_matter(spec, cache_dir)
        verdict = replace(verdict, notes=golden.notes)
        if on_host:
            actual = witness(spec, case, golden)
        else:
            other = None if drawn else another(spec, case)
            with turn():
                actual = execute(spec, case, golden, kernel=kernel, other=other)
        verdict = judged(verdict, compare(spec, case, golden, actual), actual.time_us)
        if verdict.ok and not case.constant and (names := lax(spec, case, golden)):
            raise Fault(
                Status.VACUOUS,
                f"zeros would pass for {', '.join(names)}: the match allows more than the golden "
                'holds. If this is wanted, the case says constant = "why"',
            )
        return verdict
    except Fault as fault:
        refused = drawn and isinstance(fault.__cause__, NotImplementedError)
        status = Status.UNSUPPORTED if refused else fault.status
        return replace(verdict, status=status, message=fault.message, lost=fault.lost)
    except Exception as error:  # something that a launcher or an oracle handed over, or a bug here
        frames = "".join(traceback.format_tb(error.__traceback__))
        message = printable(f"the judge could not go on: {told(error)}\n{frames}")
        return replace(verdict, status=Status.CRASHED, message=message)


def another(spec: Spec, case: Case) -> Golden | None:
    """Other inputs, of the same sizes, for the kernel spec's smallest case; None for all others.

    A launcher that knows an array by its address, or the answer by heart, is wrong on them.
    """
    sizes = {
        c.name: sum(map(math.prod, spec.shapes(c).values()))
        for c in spec.cases.values()
        if c.sim and not (c.unsupported or c.constant or c.weights)
    }
    if spec.stage != "kernel" or case.name != min(sizes, key=lambda n: sizes[n], default=None):
        return None
    try:
        return goldens.build(spec, replace(case, draw=(case.draw or 0) + 1))
    except Fault:  # this draw makes no golden
        return None


def judged(verdict: Verdict, results: list[Result], time_us: float | None = None) -> Verdict:
    """The verdict on a case from those on its outputs."""
    found = {r.status for r in results}
    status = next((s for s in _GRAVITY if s in found), Status.PASSED)
    rooms = [r.headroom for r in results if r.headroom is not None]
    return replace(
        verdict,
        status=status,
        outputs=tuple(results),
        headroom=max(rooms, default=None),
        time_us=time_us,
    )


def witness(spec: Spec, case: Case, golden: Golden) -> Actual:
    """Stage golden: what the oracle's independent second source says, in the outputs' dtypes."""
    values = goldens.reference(spec, case, golden, "witness")
    try:
        outputs = {
            n: goldens.rounded(np.asarray(values[n]), o)
            for n, o in spec.outputs.items()
            if n in values
        }
    except (TypeError, ValueError) as error:
        raise Fault(
            Status.GOLDEN_ERROR, f"{spec.reference}.witness: {told_where(error)}"
        ) from error
    return Actual(outputs, "host")


def execute(
    spec: Spec,
    case: Case,
    golden: Golden,
    *,
    kernel: str | Launcher | None = None,
    enough: Callable[[Actual], bool] = lambda _: False,
    other: Golden | None = None,
) -> Actual:
    """Run the launcher twice on poisoned outputs. Raises Fault for what it did wrong on the way.

    enough: whether what the first run left decides the case, so that the second can be spared.
    other: inputs to run on once more, in the same memory, if it was right before.
    """
    launcher = load_launcher(spec, kernel)
    check_signature(spec, case, launcher)
    prepared = Prepared(spec, case, golden)
    if case.unsupported:
        _refused(case, launcher, prepared)
    prepared.run(launcher, case, second=False)
    first = prepared.outputs()
    poisoned = {
        n: flat_bits(first[n]) == poison(o.dtype, first[n].size, False)
        for n, o in spec.outputs.items()
        if not o.inout
    }
    once = Actual(first, prepared.device, prepared.time_us, poisoned)
    if enough(once):
        prepared.free()
        return once
    prepared.run(launcher, case, second=True)
    second = prepared.outputs()
    unwritten, unstable = {}, {}
    for name, output in spec.outputs.items():
        one, two = flat_bits(first[name]), flat_bits(second[name])
        survived = np.zeros(one.size, bool)
        if not output.inout:
            survived = poisoned[name] & (two == poison(output.dtype, two.size, True))
        unwritten[name] = survived
        unstable[name] = (one != two) & ~survived
    actual = Actual(first, prepared.device, prepared.time_us, unwritten, unstable)
    if other is not None and all(r.status.ok for r in compare(spec, case, golden, actual)):
        prepared.load(other)
        prepared.run(launcher, case, second=False)
        _right_again(spec, case, other, Actual(prepared.outputs(), prepared.device))
    prepared.free()
    return actual


def _right_again(spec: Spec, case: Case, other: Golden, actual: Actual) -> None:
    wrong = [r for r in compare(spec, case, other, actual) if not r.status.ok]
    if wrong:
        raise Fault(
            Status.WRONG,
            "right at first, wrong on other inputs in the same memory: what does the launcher "
            "remember?\n" + "\n".join(line for r in wrong for line in result_lines(r)),
        )


def _refused(case: Case, launcher: Launcher, prepared: "Prepared") -> NoReturn:
    try:
        launcher(**prepared.arguments(launcher, second=False))
    except NotImplementedError as error:
        raise Fault(Status.UNSUPPORTED, f"{case.unsupported} ({error})") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Fault(
            Status.CRASHED,
            f"the case is declared unsupported, which a launcher says with NotImplementedError; "
            f"it raised {told(error)}",
        ) from error
    raise Fault(Status.SPEC_ERROR, "the case is declared unsupported, but the launcher ran it")
