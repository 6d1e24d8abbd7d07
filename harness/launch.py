"""A launcher, its arguments, one launch of it and what is looked at afterwards.

Works on whatever `numba.cuda` stands for: a GPU, or Numba's simulator (NUMBA_ENABLE_CUDASIM=1).
"""

import contextlib
import importlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.alarm import time_limit
from harness.golden import Golden
from harness.memory import GUARD, Buffer, flat_bits, simulated
from harness.report import Fault, Status, told, told_where
from harness.spec import Case, Spec

Launcher = Callable[..., Any]


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
        said = f"{module} cannot be imported: {told_where(error)}"
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


# -- one launch ------------------------------------------------------------------------------------


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
                n: Buffer(n, shapes[n], t.numpy_dtype, guard) for n, t in spec.tensors().items()
            }
            self.weights = {
                n: Buffer(n, a.shape, a.dtype, guard) for n, a in (golden.weights or {}).items()
            }
            self.load(golden)
        except Exception as error:
            raise Fault(
                Status.CRASHED,
                f"the case's tensors cannot be put on the device: {told_where(error)}",
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
                raise Fault(Status.OUT_OF_BOUNDS, told_where(error)) from error
            if isinstance(error, NotImplementedError):
                raise Fault(
                    Status.CRASHED,
                    f"the launcher refuses the case: {error}; if it should, the case says "
                    'unsupported = "why"',
                ) from error
            raise Fault(Status.CRASHED, told_where(error), lost=lost) from error
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
                changed = np.flatnonzero(flat_bits(now) != flat_bits(content))
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


def _overlap(a: Any, b: Any) -> bool:
    if hasattr(a, "_ary") and hasattr(b, "_ary"):
        return np.shares_memory(a._ary, b._ary)
    try:
        x, y = a.__cuda_array_interface__, b.__cuda_array_interface__
    except Exception:  # it is whatever a launcher returned
        return False
    size = math.prod(y["shape"]) * np.dtype(y["typestr"]).itemsize
    return y["data"][0] <= x["data"][0] < y["data"][0] + size


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
