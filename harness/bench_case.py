"""One case under the clock: judged, copied until the L2 cache is cold, captured, judged again."""

import importlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from harness import golden as goldens
from harness import launch
from harness.bench_clock import Replay
from harness.compare import Actual, compare
from harness.golden import Golden
from harness.report import Fault
from harness.spec import Case, Spec

COLD_BYTES = 256 << 20  # that a round of copies moves before one comes again: 4 times an H200's L2
MOST_COPIES = 64
COPIES_BYTES = 40 << 30  # of device memory for copies, at most
LAUNCHES = 20  # in a graph, at least, so that its own start does not count
LARGE_LAUNCHES = 4  # where one launch moves more than COLD_BYTES


class WrongResult(Exception):
    """A case that must not be timed, or whose outputs were wrong after timing."""


class Timed:
    """A case whose outputs are right, with its launches recorded."""

    def __init__(self, spec: Spec, case: Case, golden: Golden):
        self.spec, self.case, self.golden = spec, case, golden
        self.id = spec.case_id(case)
        try:
            self.launcher = launch.load_launcher(spec)
            launch.check_signature(spec, case, self.launcher)
            self.prepared = launch.Prepared(spec, case, golden)
            self.first = self._once()
        except Fault as fault:
            raise WrongResult(f"{self.id} is {fault.status}: {fault.message}") from fault
        results = compare(spec, case, golden, Actual(self.first, self.prepared.device))
        if bad := [r for r in results if not r.status.ok]:
            raise WrongResult(f"{self.id} is {bad[0].status}: {bad[0].message or bad[0].output}")
        self.bytes, self.flops, self.sizes = work(spec, case, golden)
        held = sum(b.size for b in self.prepared.buffers.values())
        self.copies = copies(self.bytes, held)
        keywords = self.prepared.arguments(self.launcher, second=False)
        self.twins = [self._twin(keywords) for _ in range(self.copies - 1)]
        all_keywords = [keywords, *self.twins]

        def call(i: int, stream: Any) -> None:
            self.launcher(**all_keywords[i % self.copies], stream=stream)

        at_least = LARGE_LAUNCHES if self.bytes > COLD_BYTES else LAUNCHES
        self.launches = self.copies * -(-at_least // self.copies)
        self.replay = Replay(call, self.launches)

    def _once(self) -> dict[str, np.ndarray]:
        """Outputs of one launch on fresh poison, whose guard bands were looked at."""
        from numba import cuda

        self.launcher(**self.prepared.arguments(self.launcher, second=False))
        cuda.synchronize()
        self.prepared.look_at_guards()
        return self.prepared.outputs()

    def _twin(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The same arguments in other memory."""
        from numba import cuda

        twin = dict(keywords)
        for name, buffer in self.prepared.buffers.items():
            if buffer.size:
                other = cuda.device_array(buffer.size, np.uint8)
                other.copy_to_device(buffer.inner)
                twin[name] = other.view(buffer.dtype).reshape(buffer.shape)
        return twin

    def judge(self) -> None:
        """What the timed launches wrote has the bits that were judged before, in every copy.

        Outputs changed in place differ from launch to launch: there, once more from the start.
        """
        self.prepared.look_at_guards()
        if any(o.inout for o in self.spec.outputs.values()):
            self._same(self._once(), "once more")
            return
        self._same(self.prepared.outputs(), "copy 0")
        for i, twin in enumerate(self.twins):
            outputs = {}
            for name in self.spec.outputs:
                array = twin[name]
                flat = array.reshape(array.size).view(np.uint8).copy_to_host()
                outputs[name] = flat.view(array.dtype).reshape(array.shape)
            self._same(outputs, f"copy {i + 1}")

    def _same(self, outputs: Mapping[str, np.ndarray], where: str) -> None:
        for name, first in self.first.items():
            if first.tobytes() != outputs[name].tobytes():
                raise WrongResult(f"{self.id}: {name} of {where} has other bits after timing")

    def release(self) -> None:
        """Give the device memory back now: the next case may need all of it."""
        from numba import cuda

        self.prepared.free()
        del self.replay, self.twins, self.prepared, self.golden
        cuda.current_context().deallocations.clear()


def copies(moved: int, held: int) -> int:
    """How many sets of a case's tensors (held bytes each, moved bytes of them touched) to use."""
    cold = -(-COLD_BYTES // max(moved, 1))
    room = max(1, COPIES_BYTES // max(held, 1))
    return max(1, min(cold, room, MOST_COPIES))


def work(spec: Spec, case: Case, golden: Golden) -> tuple[int, int, dict[str, int]]:
    """Bytes that must move, operations that must be done, and the sizes that cost grows with.

    The oracle's `work` says so, as "bytes", "flops" and any other name for a size; without one,
    every input is read once, every output written once, and arithmetic is free.
    """
    told: dict[str, Any] = {}
    if hasattr(importlib.import_module(spec.reference), "work"):
        told = dict(goldens.reference(spec, case, golden, "work"))
    shapes = spec.shapes(case)
    written = sum(
        int(np.prod(shapes[n])) * o.numpy_dtype.itemsize
        for n, o in spec.outputs.items()
        if not o.inout
    )
    read = sum(golden.inputs[n].nbytes for n in spec.inputs)
    moved, flops = int(told.pop("bytes", read + written)), int(told.pop("flops", 0))
    return moved, flops, {name: int(value) for name, value in told.items()}


def input_bytes(spec: Spec, case: Case) -> int:
    """Bytes of a case's inputs, from the spec alone."""
    shapes = spec.shapes(case)
    return sum(int(np.prod(shapes[n])) * t.numpy_dtype.itemsize for n, t in spec.tensors().items())


class Ahead:
    """Goldens too large for the cache, made in threads before their turn; a few at a time."""

    def __init__(self, pairs: list[tuple[Spec, Case]], workers: int):
        self.left = list(pairs)
        self.pool = ThreadPoolExecutor(workers)
        self.made: dict[str, Future[Golden]] = {}
        for _ in range(workers):
            self._start()

    def _start(self) -> None:
        if self.left:
            spec, case = self.left.pop(0)
            self.made[spec.case_id(case)] = self.pool.submit(goldens.build, spec, case)

    def golden(self, spec: Spec, case: Case) -> Golden:
        """The golden of a case, waited for; or from the cache, where it is not one of these."""
        future = self.made.pop(spec.case_id(case), None)
        if future is None:
            self.left = [p for p in self.left if p[1] is not case]
            return goldens.make(spec, case)
        self._start()
        return future.result()
