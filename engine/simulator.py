"""Numba's CUDA simulator, made fast and made strict.

Numba simulates a block with one operating-system thread a CUDA thread and a polling barrier. Here a
CUDA thread is a greenlet that runs until it blocks, so that

* a barrier or a warp collective costs microseconds, and the order of threads is fixed by
  `schedule`: warps in step, or in the opposite order and each as far ahead as it gets. The two
  give different bits where a barrier is missing;
* a barrier or collective that can never complete is reported at once, with the threads that wait;
* warp collectives (shfl, ballot, any, all, syncwarp, mma, ldmatrix) exist, and lanes that diverge
  around one are an error;
* shared and local memory start as NaN or 0xCD, never as a lucky zero;
* cp.async (engine/ptx/copies.py) lands only when its issuing thread waits for it.

Importing this module patches the simulator once. It models neither memory order between blocks nor
the promotion of int32 and float32 to 64 bits: the compile gate looks for the latter.
"""

import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import greenlet
import numpy as np
from numba.cuda import types
from numba.cuda.np import numpy_support
from numba.cuda.simulator import kernel as _kernel
from numba.cuda.simulator import kernelapi as _api

WARP = 32
FULL_MASK = 0xFFFFFFFF

_order = 1
_current: "Thread | None" = None


@contextmanager
def schedule(order: int) -> Iterator[None]:
    """Run the threads of every block in ascending order, warps in step (1), or in descending order,
    a warp ahead of the others until a barrier stops it (-1)."""
    global _order
    if order not in (1, -1):
        raise ValueError(f"schedule: order is 1 or -1, got {order}")
    before, _order = _order, order
    try:
        yield
    finally:
        _order = before


def current() -> "Thread":
    """The simulated CUDA thread that is running."""
    if _current is None:
        raise RuntimeError("a device function was called outside a simulated kernel")
    return _current


class Thread:
    """One simulated CUDA thread; the attributes are those that Numba's fake `cuda` module reads."""

    def __init__(self, block: "Block", index: tuple[int, ...], run: Callable[[], None]):
        self.block = block
        self.threadIdx = _api.Dim3(*index)
        self.blockIdx = block.index
        x, y, _ = block.dim
        self.thread_id = index[0] + x * (index[1] + y * index[2])
        self.waits_for: str | int = ""  # what for; of a warp collective, its mask
        self.result: Any = None  # of the collective that it waited for
        self.async_copies: list[list[Callable[[], None]]] = [[]]
        self.glet = greenlet.greenlet(run)

    def block_until_woken(self, reason: str | int) -> None:
        """Give the processor to the other threads of the block."""
        self.waits_for = reason
        self.block.hub.switch()
        self.waits_for = ""

    @property
    def place(self) -> str:
        """What the thread waits for, in words."""
        mask = self.waits_for
        return mask if isinstance(mask, str) else f"warp collective with mask {mask:#010x}"

    def syncthreads(self) -> None:
        self.block.barrier(self)

    def _vote(self, value: Any, fold: Callable[[list[bool]], Any]) -> Any:
        votes = self.block.votes
        votes.append(bool(value))
        self.syncthreads()
        result = fold(votes)
        self.syncthreads()
        votes.clear()
        self.syncthreads()
        return result

    def syncthreads_count(self, value: Any) -> int:
        return self._vote(value, sum)

    def syncthreads_and(self, value: Any) -> int:
        return int(self._vote(value, all))

    def syncthreads_or(self, value: Any) -> int:
        return int(self._vote(value, any))


class Transfer:
    """An mbarrier: a phase ends when `count` threads and all announced bytes have arrived.

    Bytes land when some thread waits for them, so that reading without waiting shows.
    """

    def __init__(self, block: "Block", count: int):
        self.block, self.count = block, count
        self.phase, self.arrived, self.announced = 0, 0, 0
        self.copies: list[tuple[int, Callable[[], None]]] = []
        self.waiting: list[Thread] = []

    def arrive(self, announced: int = 0) -> None:
        self.arrived += 1
        self.announced += announced
        if self.arrived > self.count:
            raise RuntimeError(f"{self.arrived} arrivals at an mbarrier of {self.count}")
        if self.waiting:
            self._advance()

    def copy(self, nbytes: int, land: Callable[[], None]) -> None:
        self.copies.append((nbytes, land))
        if self.waiting:
            self._advance()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity has ended."""
        self._advance()
        while self.phase & 1 == parity:
            self.waiting.append(current())
            current().block_until_woken(f"mbarrier, phase {self.phase}")

    def _advance(self) -> None:
        if self.arrived < self.count or sum(n for n, _ in self.copies) < self.announced:
            return
        for _, land in self.copies:
            land()
        self.phase, self.arrived, self.announced, self.copies = self.phase + 1, 0, 0, []
        self.block.ready.extend(sorted(self.waiting, key=lambda t: t.thread_id * _order))
        self.waiting.clear()


class Block:
    """Runs one thread block to completion."""

    def __init__(self, fn: Callable, dim: tuple[int, ...], index: tuple[int, ...]):
        self.fn, self.dim, self.index = fn, dim, _api.Dim3(*index)
        self.votes: list[bool] = []
        self.waiting: list[Thread] = []
        self.ready: deque[Thread] = deque()
        self.live = 0
        # By warp and mask, of the lanes that have arrived: their threads, and what they gave.
        self.warps: dict[tuple[int, int], tuple[dict[int, Thread], dict[int, Any]]] = {}
        self.transfers: dict[int, Transfer] = {}  # by address in shared memory
        self.hub = greenlet.getcurrent()

    def barrier(self, thread: Thread) -> None:
        self.waiting.append(thread)
        self._release_if_complete()
        thread.block_until_woken("syncthreads")

    def _release_if_complete(self) -> None:
        """Threads that have returned count as arrived, as on the GPU."""
        if self.waiting and len(self.waiting) == self.live:
            self.ready.extend(sorted(self.waiting, key=lambda t: t.thread_id * _order))
            self.waiting.clear()

    def collective(
        self, thread: Thread, mask: int, value: Any, combine: Callable[[dict[int, Any]], dict]
    ) -> Any:
        lane = thread.thread_id % WARP
        if not mask >> lane & 1:
            raise RuntimeError(f"lane {lane} is not in its own mask {mask:#010x}")
        key = (thread.thread_id // WARP, mask)
        if key not in self.warps:
            self.warps[key] = {}, {}
        threads, values = self.warps[key]
        if lane in threads:
            raise RuntimeError(f"lane {lane} arrived twice at one warp collective: lanes diverged")
        threads[lane], values[lane] = thread, value
        if len(threads) == mask.bit_count():
            del self.warps[key]
            results = combine(values)
            for n, other in threads.items():
                other.result = results[n]
            woken = [threads[n] for n in sorted(threads)]
            if _order > 0:
                self.ready.extend(woken)
            else:  # this warp runs ahead of the others, as far as barriers let it
                self.ready.extendleft(woken)
        thread.block_until_woken(mask)
        return thread.result

    def run(self, *args: Any) -> None:
        global _current
        x, y, z = self.dim

        def body() -> None:
            self.fn(*args)

        threads = [
            Thread(self, (i, j, k), body) for k in range(z) for j in range(y) for i in range(x)
        ]
        self.live = len(threads)
        self.ready.extend(threads[::_order])
        context = contextvars.copy_context()  # a greenlet starts with none, and so without errstate
        for thread in threads:
            thread.glet.gr_context = context.copy()
        try:
            while self.ready:
                thread = _current = self.ready.popleft()
                thread.glet.switch()
                if thread.glet.dead:
                    _current = None
                    self.live -= 1
                    self._release_if_complete()
        except Exception as error:
            i = tuple(_current.threadIdx) if _current else ()
            error.add_note(f"in thread {i} of block {tuple(self.index)}")
            raise
        finally:
            _current = None
            for thread in threads:
                if thread.glet and not thread.glet.dead:
                    thread.glet.throw(greenlet.GreenletExit)
        stuck = [t for t in threads if not t.glet.dead or t.waits_for]
        if self.live:
            raise RuntimeError(
                f"deadlock in block {tuple(self.index)}: {self.live} threads wait, e.g. "
                + "; ".join(f"thread {tuple(t.threadIdx)} at {t.place}" for t in stuck[:3])
            )


_SIZES = {np.uint8: 1, np.uint16: 2, np.uint32: 4}


class Address:
    """A device address in the simulator: a place in the bytes of one array. Adding moves it."""

    __slots__ = ("base", "offset")

    def __init__(self, base: np.ndarray, offset: int):
        self.base, self.offset = base, offset

    def __add__(self, nbytes: Any) -> "Address":
        return Address(self.base, self.offset + int(nbytes))

    __radd__ = __add__

    def view(self, dtype: Any, count: int) -> np.ndarray:
        """`count` elements at the address; reaching outside the array is an IndexError."""
        at, nbytes = self.offset, _SIZES[dtype] * count
        if at < 0 or at + nbytes > len(self.base):
            raise IndexError(
                f"{nbytes} bytes at offset {at} reach outside the {len(self.base)} bytes"
                " of their array"
            )
        if at % nbytes:
            raise ValueError(f"a {nbytes}-byte access at offset {at} is misaligned")
        return self.base[at : at + nbytes].view(dtype)


def collective(mask: int, value: Any, combine: Callable[[dict[int, Any]], dict]) -> Any:
    """One warp collective: every lane in `mask` gives a value, `combine` maps lane -> result."""
    thread = current()
    return thread.block.collective(thread, int(mask) & FULL_MASK, value, combine)


def launch(
    fn: Callable, grid: tuple[int, ...], block: tuple[int, ...], args: tuple, shared_bytes: int = 0
) -> None:
    """Run `fn` over the grid, block after block. Pointer arguments are flat numpy arrays."""
    grid = tuple(grid) + (1,) * (3 - len(grid))
    block = tuple(block) + (1,) * (3 - len(block))
    module = _api.FakeCUDAModule(grid, block, shared_bytes)
    with _kernel._push_kernel_context(module), _device_arithmetic():
        for k in range(grid[2]):
            for j in range(grid[1]):
                for i in range(grid[0]):
                    module.shared.reset()
                    Block(fn, block, (i, j, k)).run(*args)


def _device_arithmetic() -> np.errstate:
    """Integers wrap and floats overflow silently, as on the device."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")


class _Cuda:
    """The `cuda` that kernels of engine/device.py see: the module of the launch in progress."""

    @property
    def threadIdx(self) -> Any:
        return current().threadIdx

    @property
    def blockIdx(self) -> Any:
        return current().blockIdx

    def __getattr__(self, name: str) -> Any:
        module = _kernel._get_kernel_context()
        if module is None:
            raise RuntimeError(f"cuda.{name} was used outside a simulated kernel")
        return getattr(module, name)


cuda = _Cuda()


class _Manager:
    """Stands in for Numba's BlockManager, for kernels that are plain @cuda.jit functions."""

    def __init__(self, fn: Callable, grid_dim: tuple, block_dim: tuple, debug: bool):
        self._fn, self._block_dim = fn, tuple(block_dim)

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        context = _kernel._get_kernel_context()
        context.shared.reset()
        with _device_arithmetic():
            Block(self._fn, self._block_dim, grid_point).run(*args)


def _poisoned(shape: Any, dtype: Any) -> np.ndarray:
    if isinstance(dtype, types.Type):
        dtype = numpy_support.as_dtype(dtype)
    array = np.empty(shape, dtype)
    if array.dtype.kind == "f":
        array.fill(np.nan)
    else:
        array.view(np.uint8).fill(0xCD)
    return array


def _caller() -> tuple[str, int]:
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


class _Shared:
    """Shared memory of a block: one array a source line, poisoned when a block starts."""

    def __init__(self, dynamic_bytes: int):
        self._dynamic_bytes = dynamic_bytes
        self.reset()

    def reset(self) -> None:
        self._arrays: dict[tuple[str, int], np.ndarray] = {}
        self._dynamic = _poisoned(self._dynamic_bytes, np.uint8)

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        if shape == 0:
            if isinstance(dtype, types.Type):
                dtype = numpy_support.as_dtype(dtype)
            size = np.dtype(dtype).itemsize
            return self._dynamic[: len(self._dynamic) // size * size].view(dtype)
        key = _caller()
        if key not in self._arrays:
            self._arrays[key] = _poisoned(shape, dtype)
        return self._arrays[key]


class _Local:
    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        return _poisoned(shape, dtype)


def _shuffle(source: Callable[[int, int], int]) -> Callable:
    def shuffle(self: Any, mask: int, value: Any, arg: int) -> Any:
        def combine(slots: dict) -> dict:
            picked = {lane: source(lane, int(a)) for lane, (_, a) in slots.items()}
            return {n: slots[s][0] if s in slots else slots[n][0] for n, s in picked.items()}

        return collective(mask, (value, arg), combine)

    return shuffle


def _ballot(self: Any, mask: int, predicate: Any) -> int:
    return collective(
        mask,
        bool(predicate),
        lambda s: dict.fromkeys(s, sum(1 << lane for lane, v in s.items() if v)),
    )


def _install() -> None:
    module = _api.FakeCUDAModule
    module.shfl_sync = _shuffle(lambda lane, a: a % WARP)
    module.shfl_up_sync = _shuffle(lambda lane, a: lane - a)
    module.shfl_down_sync = _shuffle(lambda lane, a: lane + a)
    module.shfl_xor_sync = _shuffle(lambda lane, a: lane ^ a)
    module.ballot_sync = _ballot
    module.any_sync = lambda self, m, p: _ballot(self, m, p) != 0
    module.all_sync = lambda self, m, p: collective(
        m, bool(p), lambda s: dict.fromkeys(s, all(s.values()))
    )
    module.syncwarp = lambda self, mask=FULL_MASK: collective(mask, None, dict.fromkeys)
    module.nanosleep = lambda self, ns: None
    _api.FakeCUDAShared = _Shared
    _api.FakeCUDALocal = _Local
    _api.threading = SimpleNamespace(current_thread=current, Lock=threading.Lock)
    _kernel.BlockManager = _Manager


_install()
