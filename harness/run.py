"""A case becomes what the kernel really did: poison, guards, launch, synchronise, look.

Works on whatever `numba.cuda` stands for: a GPU, or Numba's simulator (NUMBA_ENABLE_CUDASIM=1).
"""

import contextlib
import functools
import importlib
import inspect
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from harness import golden as goldens
from harness import sources
from harness.alarm import time_limit
from harness.compare import Actual, compare, lax
from harness.golden import Golden
from harness.report import Fault, Result, Status, Verdict, printable, result_lines, told
from harness.spec import DTYPES, Case, Spec

GUARD = 1 << 16  # bytes before and after every tensor
_BAND = ((np.arange(GUARD) * 167 + 13) & 0xFF).astype(np.uint8)  # no kernel writes that by chance

# Bit patterns an element size: what outputs and scratch hold before the first run, and before the
# second in the first half of a tensor and in the second. First NaNs that no arithmetic makes, which
# sums and products keep, then huge numbers of both signs, because max, min and a test for NaN drop
# those; or senseless integers. An element was never written if both runs left what was there.
_POISON_FLOAT = {
    "bfloat16": (0x7FE5, 0x7E5A, 0xFE5A),
    "float16": (0x7EE5, 0x7A5A, 0xFA5A),
    "float32": (0x7FE5A5E5, 0x7E5A5ADA, 0xFE5A5ADA),
    "float64": (0x7FFCA5A5A5A5A5A5, 0x7FAC5A5A5A5A5A5A, 0xFFAC5A5A5A5A5A5A),
}
_POISON_INTEGER = {
    1: (0xA5, 0x5A, 0x03),
    2: (0xA5A5, 0x5A5A, 0x0003),
    4: (0xA5A5A5A5, 0x5A5A5A5A, 0x00000003),
    8: (0xA5A5A5A5A5A5A5A5, 0x5A5A5A5A5A5A5A5A, 0x0000000000000003),
}

# The first of these that any output has is the status of the case.
_GRAVITY = (
    Status.WRONG_SHAPE,
    Status.WRONG_DTYPE,
    Status.UNWRITTEN,
    Status.NONFINITE,
    Status.WRONG,
    Status.NONDETERMINISTIC,
)

Launcher = Callable[..., Any]


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
        digest=sources.case_digest(spec, case, kernel=name or None),
        kernel=name,
        reference=spec.reference,
        replaced=kernel is not None and not on_host,
    )
    try:
        verdict = replace(verdict, digest=sources.digest(spec, kernel=name or None))
        if drawn:
            golden = goldens.build(spec, case)
        else:
            golden = goldens.make(spec, case, cache_dir=cache_dir)
        if not drawn and case.name == next(iter(spec.cases)):  # it answers for all of them
            inputs_matter(spec, cache_dir)
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


def inputs_matter(spec: Spec, cache_dir: Path | None) -> None:
    """Raise VACUOUS if there is an input or a scalar that no golden of the spec depends on.

    SPEC_ERROR for a scalar that is declared to change nothing and does.
    """
    found = goldens.insensitive(spec, cache_dir=cache_dir)
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
        raise Fault(Status.GOLDEN_ERROR, f"{spec.reference}.witness: {_told(error)}") from error
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
        n: _flat_bits(first[n]) == poison(o.dtype, first[n].size, False)
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
        one, two = _flat_bits(first[name]), _flat_bits(second[name])
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


# -- the launcher --------------------------------------------------------------------------------


def kernel_name(kernel: str | Launcher) -> str:
    if isinstance(kernel, str):
        return kernel
    return f"{kernel.__module__}:{getattr(kernel, '__qualname__', type(kernel).__name__)}"


def load_launcher(spec: Spec, kernel: str | Launcher | None = None) -> Launcher:
    """The launcher that a spec names, or the one given in its place."""
    if kernel is not None and not isinstance(kernel, str):
        return kernel
    name = kernel or spec.kernel or ""
    module, _, function = name.partition(":")
    try:
        launcher = getattr(importlib.import_module(module), function, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and pytest.skip, which would be no failure
        said = f"{module} cannot be imported: {_told(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            said += "; it is looked for in this folder and on PYTHONPATH"
        raise Fault(Status.CRASHED, said) from error
    if not callable(launcher):
        raise Fault(Status.SPEC_ERROR, f"kernel {name!r}: {module} has no function {function!r}")
    return launcher


def check_signature(spec: Spec, case: Case, launcher: Launcher) -> None:
    """A launcher's parameters are the spec's names, and what it writes to is keyword-only."""
    parameters = dict(inspect.signature(launcher).parameters)
    parameters.pop("stream", None)
    if case.weights:
        parameters.pop("config", None)
    written = {**spec.outputs, **spec.scratch}
    wanted = {*spec.inputs, *case.scalars, *written, *(["weights"] if case.weights else [])}
    said = []
    if missing := sorted(wanted - parameters.keys()):
        said.append(f"it lacks {', '.join(missing)}")
    if unknown := sorted(parameters.keys() - wanted):
        said.append(f"the spec does not have {', '.join(unknown)}")
    said += [
        f"{name} is written to and must be keyword-only"
        for name in written
        if name in parameters and parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    if said:
        raise Fault(
            Status.SPEC_ERROR,
            f"the parameters of {kernel_name(launcher)} are not the names of the spec: "
            + "; ".join(said),
        )


# -- device memory -------------------------------------------------------------------------------


class _Buffer:
    """One tensor in device memory, between two guard bands in one allocation."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, guard: int):
        from numba import cuda

        self.name, self.shape, self.dtype, self.guard = name, shape, dtype, guard
        self.size = math.prod(shape) * dtype.itemsize
        self.pool: _Pool | None = None
        self.bytes = cuda.device_array(guard + self.size + guard, np.uint8)
        if self.size:
            self.inner = self.bytes[guard : guard + self.size]
            self.array = self.inner.view(dtype).reshape(shape)
        else:
            self.array = cuda.device_array(shape, dtype)

    def fill(self, content: np.ndarray) -> None:
        """Set the guard bands and, from a host array of the tensor's dtype and shape, the rest."""
        self.fill_guards()
        if not self.size:
            return
        if isinstance(content, goldens.numerics().Gathered) and not simulated():
            self.pool = _Pool(content)
            self.pool.gather(self.inner)
        else:
            self.inner.copy_to_device(np.ascontiguousarray(content).reshape(-1).view(np.uint8))

    def fill_with_poison(self, dtype: str, second: bool) -> None:
        """Set the guard bands, and every element to poison; scratch can be gigabytes."""
        item = self.dtype.itemsize
        count = self.size // item
        if simulated() or item == 8 or not count:
            self.fill(poison(dtype, count, second))
            return
        from cuda.bindings import driver

        self.fill_guards()
        fill = {1: driver.cuMemsetD8, 2: driver.cuMemsetD16, 4: driver.cuMemsetD32}[item]
        start, half = self.inner.device_ctypes_pointer.value, count // 2
        for bits, first, end in zip(_halves(dtype, second), (0, half), (half, count), strict=True):
            (status,) = fill(start + first * item, bits, end - first) if end > first else (0,)
            if int(status):
                raise RuntimeError(f"{self.name} cannot be filled: {status}")

    def fill_guards(self) -> None:
        if self.guard:
            self.bytes[: self.guard].copy_to_device(_BAND)
            self.bytes[self.guard + self.size :].copy_to_device(_BAND)

    def host(self) -> np.ndarray:
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return self.inner.copy_to_host().view(self.dtype).reshape(self.shape)

    def differs(self, content: np.ndarray) -> bool:
        """Whether it no longer holds `content`, with which it was filled."""
        if self.pool is not None:
            return self.pool.differs(self.inner)
        return not np.array_equal(_flat_bits(self.host()), _flat_bits(content))

    def trespass(self) -> str | None:
        """Where a guard band was written to, in words."""
        if not self.guard:
            return None
        item = self.dtype.itemsize
        after = np.flatnonzero(self.bytes[GUARD + self.size :].copy_to_host() != _BAND) // item
        if after.size:
            n = len(set(after))
            return f"behind the end of {self.name}: {n} elements, first at end + {after[0]}"
        before = (GUARD - 1 - np.flatnonzero(self.bytes[:GUARD].copy_to_host() != _BAND)) // item
        if before.size:
            n = len(set(before))
            return (
                f"before the start of {self.name}: {n} elements, last at start - {1 + before[-1]}"
            )
        return None


class _Pool:
    """The rows of a gathered array on the device, where all of it is made of them and compared."""

    def __init__(self, content: Any):
        from numba import cuda

        rows = content.pool.reshape(len(content.pool), -1)
        words = rows.view(np.uint32 if rows.strides[0] % 4 == 0 else np.uint8)
        self.unit = words.dtype
        self.rows, self.index = cuda.to_device(words), cuda.to_device(content.index)

    def gather(self, inner: Any) -> None:
        """Fill `inner`, the bytes of the whole array."""
        _gathering().gather[self._grid()](self.rows, self.index, self._whole(inner))

    def differs(self, inner: Any) -> bool:
        from numba import cuda

        found = cuda.to_device(np.zeros(1, np.int32))
        _gathering().compare[self._grid()](self.rows, self.index, self._whole(inner), found)
        return bool(found.copy_to_host()[0])

    def _whole(self, inner: Any) -> Any:
        return inner.view(self.unit).reshape(len(self.index), self.rows.shape[1])

    def _grid(self) -> tuple[tuple[int, int], int]:
        """Rows in x; several blocks in y share a long row."""
        return (len(self.index), min(64, 1 + self.rows.shape[1] // 65536)), 256


@functools.cache
def _gathering() -> SimpleNamespace:
    """The judge's own two kernels, compiled when the first gathered array comes."""
    from numba import cuda

    @cuda.jit
    def gather(rows: Any, index: Any, whole: Any) -> None:
        row = cuda.blockIdx.x
        source = index[row]
        i = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        while i < rows.shape[1]:
            whole[row, i] = rows[source, i]
            i += cuda.blockDim.x * cuda.gridDim.y

    @cuda.jit
    def compare(rows: Any, index: Any, whole: Any, found: Any) -> None:
        row = cuda.blockIdx.x
        source = index[row]
        i = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        while i < rows.shape[1]:
            if whole[row, i] != rows[source, i]:
                found[0] = 1
            i += cuda.blockDim.x * cuda.gridDim.y

    return SimpleNamespace(gather=gather, compare=compare)


def poison(dtype: str, size: int, second: bool) -> np.ndarray:
    """The bits, as unsigned integers, that `size` elements of `dtype` hold before a run."""
    first, last = _halves(dtype, second)
    bits = np.full(size, last, f"u{DTYPES[dtype].itemsize}")
    bits[: size // 2] = first
    return bits


def _halves(dtype: str, second: bool) -> tuple[int, int]:
    """The bit patterns of the two halves of a poisoned tensor."""
    if dtype == "bool":
        return int(not second), int(not second)
    patterns = _POISON_FLOAT.get(dtype) or _POISON_INTEGER[DTYPES[dtype].itemsize]
    return patterns[1:] if second else (patterns[0], patterns[0])


class Prepared:
    """A case's tensors on the device, and what is looked at around a launch.

    guard: bytes of guard band on either side of each tensor, GUARD or 0. A tool that watches
    memory itself wants none: what lies behind a tensor must not be memory that can be read.
    """

    def __init__(self, spec: Spec, case: Case, golden: Golden, *, guard: int = GUARD):
        self.spec, self.case = spec, case
        self.device, self.time_us = device_name(), 0.0
        shapes = spec.shapes(case)
        try:
            self.buffers = {
                n: _Buffer(n, shapes[n], t.numpy_dtype, guard) for n, t in spec.tensors().items()
            }
            self.weights = {
                n: _Buffer(n, a.shape, a.dtype, guard) for n, a in (golden.weights or {}).items()
            }
            self.load(golden)
        except Exception as error:
            raise Fault(
                Status.CRASHED,
                f"the case's tensors cannot be put on the device: {_told(error)}",
                lost=_context_lost(),
            ) from error

    def load(self, golden: Golden) -> None:
        """Fill inputs and weights from a golden of the case's sizes."""
        self.golden = golden
        self.constant = {n: (self.buffers[n], golden.inputs[n]) for n in self.spec.inputs}
        self.constant |= {
            f"weights[{n!r}]": (b, (golden.weights or {})[n]) for n, b in self.weights.items()
        }
        for buffer, content in self.constant.values():
            buffer.fill(content)

    def arguments(
        self, launcher: Launcher, *, second: bool, poisoned: bool = True
    ) -> dict[str, Any]:
        """The launcher's keywords, with outputs and scratch freshly poisoned (or as they are)."""
        for name, tensor in {**self.spec.outputs, **self.spec.scratch}.items():
            buffer = self.buffers[name]
            if getattr(tensor, "inout", False):
                buffer.fill(self.golden.inputs[name])
            elif poisoned:
                buffer.fill_with_poison(tensor.dtype, second)
        given: dict[str, Any] = {n: b.array for n, b in self.buffers.items()}
        given |= self.case.scalars
        if self.golden.weights is not None:
            given["weights"] = {n: b.array for n, b in self.weights.items()}
            if "config" in inspect.signature(launcher).parameters:
                given["config"] = self.golden.config
        return given

    def run(self, launcher: Launcher, case: Case, *, second: bool) -> None:
        """One launch on fresh poison, looked at afterwards. Raises Fault."""
        keywords = self.arguments(launcher, second=second)
        returned = self._launch(launcher, keywords, case.timeout_s, second)
        self.look_at_guards()
        if returned is not None:
            raise Fault(Status.ALIASED, self._describe(returned, keywords))
        self.look_at_inputs()

    def _launch(self, launcher: Launcher, keywords: dict, limit_s: float, second: bool) -> Any:
        launch = _launch_simulated if simulated() else _launch_on_gpu
        try:
            returned, self.time_us = launch(launcher, keywords, limit_s, second)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, and pytest.skip, which would be no failure
            if isinstance(error, Fault) and error.status is Status.TIMEOUT:
                raise
            lost = _context_lost()
            if _inside_a_block(error) and isinstance(error, IndexError):
                raise Fault(Status.OUT_OF_BOUNDS, _told(error)) from error
            if isinstance(error, NotImplementedError):
                raise Fault(
                    Status.CRASHED,
                    f"the launcher refuses the case: {error}; if it should, the case says "
                    'unsupported = "why"',
                ) from error
            raise Fault(Status.CRASHED, _told(error), lost=lost) from error
        return returned

    def look_at_guards(self) -> None:
        """Raise OUT_OF_BOUNDS if a launch wrote outside a tensor."""
        found = [t for b in (*self.buffers.values(), *self.weights.values()) if (t := b.trespass())]
        if found:
            raise Fault(Status.OUT_OF_BOUNDS, "written outside: " + "; ".join(found))

    def look_at_inputs(self) -> None:
        """Raise MUTATED_INPUT if a launch changed what it may only read."""
        for name, (buffer, content) in self.constant.items():
            if buffer.differs(content):
                now, content = buffer.host(), np.asarray(content)
                changed = np.flatnonzero(_flat_bits(now) != _flat_bits(content))
                at = tuple(int(i) for i in np.unravel_index(changed[0], buffer.shape))
                raise Fault(
                    Status.MUTATED_INPUT,
                    f"{name} was changed by the launcher: {changed.size} of {now.size} elements\n"
                    f"first at {at}: it was {content[at]} and is {now[at]}",
                )

    def _describe(self, returned: Any, keywords: Mapping[str, Any]) -> str:
        said = f"the launcher returned a {type(returned).__name__}"
        for name, array in keywords.items():
            if _overlap(returned, array):
                said += f" that is the memory of {name}"
        return said + "; it must write into the outputs that it is given, and return None"

    def outputs(self) -> dict[str, np.ndarray]:
        """Host copies of what the last launch left."""
        return {n: self.buffers[n].host() for n in self.spec.outputs}

    def free(self) -> None:
        """Give the device memory back at once: Numba keeps it for later, and others wait for it."""
        self.buffers, self.weights, self.constant = {}, {}, {}
        if not simulated():
            from numba import cuda

            cuda.current_context().memory_manager.deallocations.clear()


def _flat_bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def _overlap(a: Any, b: Any) -> bool:
    if hasattr(a, "_ary") and hasattr(b, "_ary"):
        return np.shares_memory(a._ary, b._ary)
    try:
        x, y = a.__cuda_array_interface__, b.__cuda_array_interface__
    except Exception:  # it is whatever a launcher returned
        return False
    size = math.prod(y["shape"]) * np.dtype(y["typestr"]).itemsize
    return y["data"][0] <= x["data"][0] < y["data"][0] + size


# -- launching -----------------------------------------------------------------------------------


def simulated() -> bool:
    from numba.cuda.core import config

    return bool(config.ENABLE_CUDASIM)


def device_name() -> str:
    """ "simulator", or the name of the current GPU."""
    if simulated():
        return "simulator"
    from numba import cuda

    try:
        name = cuda.get_current_device().name
    except Exception as error:
        return f"no GPU ({type(error).__name__})"
    return name.decode() if isinstance(name, bytes) else str(name)


def _launch_simulated(
    launcher: Launcher, keywords: dict, limit_s: float, second: bool
) -> tuple[Any, float]:
    """Run in the simulator; the second time with each block's threads in the opposite order."""
    simulator = sys.modules.get("engine.simulator")
    order = simulator.schedule(-1) if simulator and second else contextlib.nullcontext()
    with time_limit(limit_s, f"the launcher was not done after {limit_s:g} s"), order:
        start = time.perf_counter()
        returned = launcher(**keywords)
        return returned, (time.perf_counter() - start) * 1e6


def _launch_on_gpu(
    launcher: Launcher, keywords: dict, limit_s: float, second: bool
) -> tuple[Any, float]:
    """Launch between two events and wait for them, but not for ever."""
    from numba import cuda

    event: Any = cuda.event  # its types are those of the simulator
    start, end = event(timing=True), event(timing=True)
    deadline = time.monotonic() + limit_s
    start.record()
    with time_limit(limit_s, f"the launcher was not done after {limit_s:g} s"):
        returned = launcher(**keywords)
    end.record()
    while not end.query():
        if time.monotonic() > deadline:
            raise Fault(Status.TIMEOUT, f"the GPU was not done after {limit_s:g} s", lost=True)
        time.sleep(20e-6)
    cuda.synchronize()
    return returned, cuda.event_elapsed_time(start, end) * 1e3


def _context_lost() -> bool:
    """Whether an error has made the process's GPU context unusable."""
    if simulated():
        return False
    from numba import cuda

    try:
        cuda.synchronize()
    except Exception:
        return True
    return False


def _inside_a_block(error: BaseException) -> bool:
    """Whether a simulated thread raised it, and not the launcher's host code."""
    notes = getattr(error, "__notes__", ())
    return any("of block" in n for n in notes) or "ctaid=" in told(error)


def _told(error: BaseException) -> str:
    """Type, text, notes and the innermost line of an error that is not some library's."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if "site-packages" not in f.filename), frames[-1])
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return f"{told(error)}{notes} ({where})"
