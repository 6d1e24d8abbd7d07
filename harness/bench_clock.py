"""GPU time, and what the GPU does at most: CUDA graphs replayed between two events."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

BUFFER = 1 << 30  # bytes read by a launch that measures the ceiling: 20 times an H200's L2
THREADS, WORDS = 256, 8  # of 8 bytes a thread, all in flight at once
SHORT_S = 2e-3  # of a graph; the host takes a hundredth of that to launch it


class Clock:
    """pytest-benchmark's timer: stands still but for what the events measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Ceiling:
    """What the GPU did at most in this run."""

    copy_bytes_per_s: float  # read and written by a copying kernel
    read_bytes_per_s: float  # by a kernel that only reads; a little more
    matrix_flops_per_s: float | None  # bf16; None: no library here that multiplies matrices


def driver(name: str, *arguments: Any) -> Any:
    """A call of the CUDA driver's API. RuntimeError with the status it gives."""
    from cuda.bindings import driver

    status, *values = getattr(driver, name)(*arguments)
    if int(status):
        raise RuntimeError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else values


class Replay:
    """`launches` calls recorded once as a CUDA graph; `seconds()` is the GPU time of one call."""

    def __init__(self, call: Callable[[int, Any], None], launches: int):
        from cuda.core import Device

        device = Device()
        device.set_current()
        self.launches, self.stream = launches, device.create_stream()
        builder = device.create_graph_builder()
        builder.begin_building()
        for i in range(launches):
            call(i, builder)
        self.graph = builder.end_building().complete()
        self.start, self.end = driver("cuEventCreate", 0), driver("cuEventCreate", 0)
        self.short = True
        self.short = self.seconds() * launches < SHORT_S

    def seconds(self) -> float:
        """A short graph is launched before as well: the GPU is then still busy when the start is
        recorded, and the host's way from there to the launch does not count."""
        handle = self.stream.handle
        if self.short:
            self.graph.launch(self.stream)
        driver("cuEventRecord", self.start, handle)
        self.graph.launch(self.stream)
        driver("cuEventRecord", self.end, handle)
        driver("cuEventSynchronize", self.end)
        return driver("cuEventElapsedTime", self.start, self.end) * 1e-3 / self.launches


def ceiling() -> Ceiling:
    """Measure the copy and read bandwidth and the bf16 matrix rate of this GPU.

    By kernels: cuMemcpyDtoD reaches three quarters of what a copying kernel does on an H200.
    """
    from numba import cuda

    from harness import peers

    @cuda.jit
    def copy(source: Any, target: Any) -> None:
        i = cuda.blockIdx.x * (THREADS * WORDS) + cuda.threadIdx.x
        a, b = source[i], source[i + THREADS]
        c, d = source[i + 2 * THREADS], source[i + 3 * THREADS]
        e, f = source[i + 4 * THREADS], source[i + 5 * THREADS]
        g, h = source[i + 6 * THREADS], source[i + 7 * THREADS]
        target[i], target[i + THREADS] = a, b
        target[i + 2 * THREADS], target[i + 3 * THREADS] = c, d
        target[i + 4 * THREADS], target[i + 5 * THREADS] = e, f
        target[i + 6 * THREADS], target[i + 7 * THREADS] = g, h

    @cuda.jit
    def read(source: Any, target: Any) -> None:
        i = cuda.blockIdx.x * (THREADS * WORDS) + cuda.threadIdx.x
        low = source[i] | source[i + THREADS] | source[i + 2 * THREADS] | source[i + 3 * THREADS]
        i += 4 * THREADS
        high = source[i] | source[i + THREADS] | source[i + 2 * THREADS] | source[i + 3 * THREADS]
        if low | high == 7:  # no word is 7: this keeps the loads
            target[0] = low

    source = cuda.to_device(np.zeros(BUFFER // 8, np.uint64))
    target = cuda.device_array(BUFFER // 8, np.uint64)
    blocks = BUFFER // 8 // (THREADS * WORDS)
    rates = []
    for kernel, moved in ((copy, 2 * BUFFER), (read, BUFFER)):
        launch: Any = kernel
        launch[blocks, THREADS](source, target)  # compiles, which a graph could not hold

        def call(_: int, stream: Any, launch: Any = launch) -> None:
            launch[blocks, THREADS, stream](source, target)

        replay = Replay(call, 8)
        rates.append(moved / median(replay.seconds() for _ in range(15)))
    return Ceiling(rates[0], rates[1], peers.matrix_rate())


def gpu() -> tuple[str, str, str]:
    """Name, UUID and driver version of the current GPU."""
    from numba import cuda

    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    return name, str(device.uuid), str(driver("cuDriverGetVersion"))


def architecture() -> str:
    """The current GPU's compile target as kernels name it, "sm_90a"."""
    from numba import cuda

    major, minor = cuda.get_current_device().compute_capability
    return f"sm_{major}{minor}" + ("a" if major == 9 else "")
