"""A fixed list of launches, in stages: one CUDA graph on a GPU, and the time of each stage.

    staged = Staged({"build": [...], "verify": [...]})
    staged.load()       # once, before it is timed: run it launch by launch, then capture it
    staged.launch()     # queue all of it
    staged.wait()       # the one wait; {"build": seconds, "verify": seconds}

Between stages the graph records an event, so that their times are the device's own and cost no
wait. In the simulator launches run where they are queued, and times are the host's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from engine.device import (
    SIMULATED,
    copy_to_device,
    cuda,
    device_pointer,
    empty,
    stream_handle,
    to_host,
)
from engine.layers import Launch


def pinned(size: int) -> np.ndarray:
    """int32 [size] of zeros in page-locked memory: what a graph can copy from and to."""
    host = np.zeros(size, np.int32) if SIMULATED else cuda.pinned_array(size, np.int32)
    host[:] = 0
    return host


def upload(host: np.ndarray, device: Any, *, stream: Any = None) -> None:
    """Queue a copy of a `pinned` array, which must stay as it is until that is done."""
    if SIMULATED:
        copy_to_device(host, device)
        return
    from cuda.bindings import driver

    _sound(
        driver.cuMemcpyHtoDAsync(
            device_pointer(device), host.ctypes.data, host.nbytes, stream_handle(stream)
        )
    )


def download(device: Any, host: np.ndarray, *, stream: Any = None) -> None:
    """Queue a copy into a `pinned` array."""
    if SIMULATED:
        host[:] = to_host(device)
        return
    from cuda.bindings import driver

    _sound(
        driver.cuMemcpyDtoHAsync(
            host.ctypes.data, device_pointer(device), host.nbytes, stream_handle(stream)
        )
    )


class Packed:
    """int32 or fp32 arrays side by side, in one device buffer and in page-locked host memory: one
    copy moves them all."""

    def __init__(self, **shapes: tuple[tuple[int, ...], str]):
        sizes = [int(np.prod(shape)) for shape, _ in shapes.values()]
        self.flat = empty((sum(sizes),), "int32")
        self.host = pinned(sum(sizes))
        self.device, self.array = {}, {}
        for (name, (shape, dtype)), size, end in zip(
            shapes.items(), sizes, np.cumsum(sizes).tolist(), strict=True
        ):
            part = slice(end - size, end)
            self.device[name] = self.flat[part].view(np.dtype(dtype)).reshape(shape)
            self.array[name] = self.host[part].view(dtype).reshape(shape)


class Staged:
    """Launches by stage. They read and write the same memory every time."""

    def __init__(self, stages: Mapping[str, Sequence[Launch]], *, direct: bool = False):
        """direct: never as a graph."""
        self.stages, self.direct = stages, direct
        self._graph: Any = None
        self._seconds: dict[str, float] = {}

    def load(self) -> None:
        """Run it once without a graph, which loads every kernel, capture it, and run that once. In
        the simulator, where there is nothing to load, nothing runs."""
        if SIMULATED or self.direct or self._graph is not None:
            return
        from cuda.core import LEGACY_DEFAULT_STREAM

        self._queue(LEGACY_DEFAULT_STREAM, captured=False)
        self.wait()
        self._graph = recorded(partial(self._queue, captured=True))
        self._graph.launch(LEGACY_DEFAULT_STREAM)  # the first launch uploads it
        self.wait()

    def launch(self) -> None:
        """Queue all stages on the default stream."""
        if SIMULATED:
            for stage, launches in self.stages.items():
                since = time.perf_counter()
                for launch in launches:
                    launch.call(stream=None)
                self._seconds[stage] = time.perf_counter() - since
            return
        from cuda.core import LEGACY_DEFAULT_STREAM

        if self.direct:
            self._queue(LEGACY_DEFAULT_STREAM, captured=False)
            return
        self.load()
        self._graph.launch(LEGACY_DEFAULT_STREAM)

    def wait(self) -> dict[str, float]:
        """Wait until everything that was queued is done; seconds of each stage of the last run."""
        if SIMULATED:
            return dict(self._seconds)
        from cuda.core import LEGACY_DEFAULT_STREAM

        LEGACY_DEFAULT_STREAM.sync()
        ends = self._events
        return {stage: (ends[i + 1] - ends[i]) / 1000 for i, stage in enumerate(self.stages)}

    @cached_property
    def _events(self) -> list[Any]:
        from cuda.core import Device, EventOptions

        options = EventOptions(timing_enabled=True)
        return [Device().create_event(options) for _ in range(len(self.stages) + 1)]

    def _queue(self, stream: Any, *, captured: bool) -> None:
        self._record(0, stream, captured)
        for i, launches in enumerate(self.stages.values()):
            queue(launches, stream)
            self._record(i + 1, stream, captured)

    def _record(self, event: int, stream: Any, captured: bool) -> None:
        """An event of the graph's own if captured: without the flag it would only be an edge."""
        from cuda.bindings import driver

        flags = driver.CUevent_record_flags
        flag = flags.CU_EVENT_RECORD_EXTERNAL if captured else flags.CU_EVENT_RECORD_DEFAULT
        _sound(
            driver.cuEventRecordWithFlags(self._events[event].handle, stream_handle(stream), flag)
        )


def queue(launches: Sequence[Launch], stream: Any) -> None:
    """Launch them in order, or put them on a graph that is being built."""
    for launch in launches:
        launch.call(stream=stream)


def recorded(put: Callable[[Any], None]) -> Any:
    """The CUDA graph of what `put` puts on the builder that it is given."""
    from cuda.core import Device

    builder = Device().create_graph_builder()
    builder.begin_building()
    put(builder)
    return builder.end_building().complete()


def _sound(answer: tuple) -> None:
    if int(answer[0]):
        raise RuntimeError(f"graph: {answer[0]}")
