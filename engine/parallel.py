"""One model on several GPUs: ranks that run the same program on their shares of the weights.

Heads, experts and rows of large matrices are split; activations are gathered, and partial sums are
never added across ranks. So every element is summed by one rank in the order of one GPU, and the
bits are those of one GPU at every number of ranks.

A group is this process's or turn's place among the ranks. It has `rank`, `world`, `captured`
(whether its launches may be captured into a CUDA graph), `tell(what)` and

    all_gather(part, whole)   whole[r] = rank r's part
    exchange(parts, others)   others[r] = what rank r had in parts[this rank]

all with `stream`, and with a word on what was written, so that nobody need read the rest: `rows`,
how many of the part's first rows this rank has; `experts` int32 and `share`: slot i of the
flattened `parts` is choice i's, and was written by rank experts[i] // share.

Two kinds: `Nccl`, processes with a GPU each (`Ranks` starts them), and `Turns`, ranks in one
process on one device or in the simulator, which run one after another from one collective to the
next (`in_turns`).
"""

import contextlib
import contextvars
import importlib
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

VISIBLE = "CUDA_VISIBLE_DEVICES"
SILENCE_S = 600.0  # a rank may be silent that long: loading a large model, compiling
NCCL = "engine.parallel:Nccl"

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank failed, was lost or is silent. The others have been stopped."""


# -- NCCL ------------------------------------------------------------------------------------------


class Nccl:
    """A group over NCCL, on the one GPU that this process sees."""

    captured = True

    def __init__(
        self, rank: int, world: int, agree: Callable[[Any], Any], tell: Callable[[Any], None]
    ):
        """agree(value) returns rank 0's value on every rank. Blocks until all ranks are here.
        ImportError without CuPy."""
        from numba import cuda

        from engine import device  # here: processes that run no kernel do without Numba

        cuda.current_context()
        self._device = device
        self._nccl = _nccl()
        self.rank, self.world, self.tell = rank, world, tell
        key = agree(self._nccl.get_unique_id() if rank == 0 else None)
        self._communicator = self._nccl.NcclCommunicator(world, key, rank)

    def all_gather(
        self, part: Any, whole: Any, *, rows: int | None = None, stream: Any = None
    ) -> None:
        """Whole rooms move, whatever is in them: their size is fixed when a graph is captured."""
        _check_gather(part, whole, self.world)
        pointer, handle = self._device.device_pointer, self._device.stream_handle(stream)
        self._communicator.allGather(
            pointer(part), pointer(whole), _nbytes(part), self._nccl.NCCL_UINT8, handle
        )

    def exchange(
        self, parts: Any, others: Any, *, experts: Any = None, share: int = 0, stream: Any = None
    ) -> None:
        """Whole rooms move, as in `all_gather`."""
        _check_exchange(parts, others, self.world)
        pointer, handle = self._device.device_pointer, self._device.stream_handle(stream)
        size = _nbytes(parts) // self.world
        byte = self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for peer in range(self.world):
            self._communicator.send(pointer(parts) + peer * size, size, byte, peer, handle)
            self._communicator.recv(pointer(others) + peer * size, size, byte, peer, handle)
        self._nccl.groupEnd()


def _nccl() -> Any:
    """CuPy's binding, with the library of the nvidia-nccl wheel where there is no other."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    with contextlib.suppress(DynamicLibNotFoundError):  # CuPy says what it misses
        load_nvidia_dynamic_lib("nccl")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(f"{error}; several GPUs need pip install 'kdtree-engine[nccl]'") from None
    if not getattr(nccl, "available", True):
        raise ImportError("CuPy was built without NCCL: pip install 'kdtree-engine[nccl]'")
    return nccl


def _nbytes(array: Any) -> int:
    return int(array.size) * np.dtype(array.dtype).itemsize


def _check_gather(part: Any, whole: Any, world: int) -> None:
    fits = part.shape and tuple(whole.shape) == (world, *part.shape)
    if not fits or whole.dtype != part.dtype:
        raise ValueError(
            f"all_gather: {part.dtype}{list(part.shape)} of {world} ranks into "
            f"{whole.dtype}{list(whole.shape)}"
        )


def _check_exchange(parts: Any, others: Any, world: int) -> None:
    same = parts.shape == others.shape and parts.dtype == others.dtype
    if not same or len(parts.shape) < 2 or parts.shape[0] != world:
        raise ValueError(
            f"exchange: {parts.dtype}{list(parts.shape)} of {world} ranks into "
            f"{others.dtype}{list(others.shape)}"
        )


# -- turns -----------------------------------------------------------------------------------------


class Turns:
    """A group of ranks that take turns in one process. Made by `in_turns`."""

    captured = False  # a graph would hold one rank's launches without the others' between them

    def __init__(self, rank: int, world: int, waiting: dict[int, tuple], hub: Any):
        self.rank, self.world = rank, world
        self._waiting, self._hub = waiting, hub

    def tell(self, what: Any) -> None:
        """Nobody listens: the caller of `in_turns` is in the same process."""

    def all_gather(
        self, part: Any, whole: Any, *, rows: int | None = None, stream: Any = None
    ) -> None:
        """Of each part, its first `rows` move."""
        _check_gather(part, whole, self.world)
        written = np.arange(part.shape[0]) < (part.shape[0] if rows is None else rows)
        self._meet("all_gather", part, whole, written)

    def exchange(
        self, parts: Any, others: Any, *, experts: Any = None, share: int = 0, stream: Any = None
    ) -> None:
        """Of each part, the slots move that this rank's experts made."""
        _check_exchange(parts, others, self.world)
        written = np.full(parts.shape[:2], experts is None)
        if experts is not None:
            made_by = experts.copy_to_host().reshape(-1) // share
            written.reshape(-1)[: len(made_by)] = made_by == self.rank
        self._meet("exchange", parts, others, written)

    def _meet(self, what: str, given: Any, taken: Any, written: np.ndarray) -> None:
        """The last rank that comes moves the data of all. written: which rows of a part are."""
        self._waiting[self.rank] = (what, given, taken, written)
        if len(self._waiting) < self.world:
            self._hub.switch()
            return
        calls = [self._waiting[rank] for rank in range(self.world)]
        self._waiting.clear()
        if len({(what, tuple(given.shape), str(given.dtype)) for what, given, *_ in calls}) > 1:
            raise RankError(f"the ranks meet for different things: {[c[:1] for c in calls]}")
        for receiver, (_, _, into, _) in enumerate(calls):
            for sender, (_, sent, _, written) in enumerate(calls):
                piece = sent if what == "all_gather" else sent[receiver]
                of_piece = written if what == "all_gather" else written[receiver]
                for rows in _runs(of_piece):
                    _bytes(into[sender][rows]).copy_to_device(_bytes(piece[rows]))


def _runs(written: np.ndarray) -> list[slice]:
    """The stretches of a bool [rows] that are true."""
    edges = np.flatnonzero(np.diff(written, prepend=False, append=False)).tolist()
    return [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _bytes(array: Any) -> Any:
    return array.reshape(int(array.size)).view(np.uint8)


def in_turns(world: int, function: Callable[[Turns], T]) -> list[T]:
    """function(group) of every rank, their results by rank. On a GPU launches must go to the
    default stream. RankError if a rank ends while others wait for it."""
    import greenlet

    waiting: dict[int, tuple] = {}
    results: dict[int, T] = {}
    hub = greenlet.getcurrent()

    def run(rank: int) -> None:
        results[rank] = function(Turns(rank, world, waiting, hub))

    ranks = []
    for rank in range(world):
        context = contextvars.copy_context()  # a greenlet starts with none, and so without errstate
        ranks.append(greenlet.greenlet(lambda c=context, r=rank: c.run(run, r)))
    while len(results) < world:
        ready = [rank for rank in range(world) if rank not in results and rank not in waiting]
        if not ready:
            raise RankError(f"ranks {sorted(waiting)} wait for {sorted(results)}, which have ended")
        for rank in ready:
            ranks[rank].switch()
    return [results[rank] for rank in range(world)]


# -- processes -------------------------------------------------------------------------------------


class Ranks:
    """A process a device, which run functions of the form f(group, *arguments) in step.

    devices: what CUDA_VISIBLE_DEVICES shall be in each (a UUID, an ordinal). connect: how a rank
    gets its group. A rank that fails, is lost or says nothing for `silence_s` ends all of them:
    RankError names it. So does the end of this process, however it ends.
    """

    def __init__(
        self, devices: Sequence[str], *, connect: str = NCCL, silence_s: float = SILENCE_S
    ):
        context = multiprocessing.get_context("spawn")
        self.devices, self.silence_s = list(devices), silence_s
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank, device in enumerate(self.devices):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, len(self.devices), theirs, connect), daemon=True
            )
            with _environment({VISIBLE: device, "NCCL_NVLS_ENABLE": "0"}):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        agreed = self._each("value")[0]
        self._send(agreed)
        self._each("ready")

    def call(
        self, function: str, *arguments: Any, on_word: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """function ("module:name") of every rank, their results by rank. on_word(rank, what) is
        called for what ranks tell."""
        self._send((function, arguments))
        return self._each("done", on_word)

    def close(self) -> None:
        """End all ranks, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _send(self, what: Any) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(what)
            except OSError:
                self._lost(rank)

    def _each(self, wanted: str, on_word: Callable[[int, Any], None] | None = None) -> list[Any]:
        """One message of kind `wanted` from every rank."""
        found: dict[int, Any] = {}
        heard = time.monotonic()
        while len(found) < len(self._pipes):
            left = [rank for rank in range(len(self._pipes)) if rank not in found]
            ends = [self._processes[rank].sentinel for rank in left]
            ready = wait([*(self._pipes[rank] for rank in left), *ends], timeout=1.0)
            for rank in left:
                if self._pipes[rank] in ready:
                    heard = time.monotonic()
                    try:
                        kind, what = self._pipes[rank].recv()
                    except (EOFError, OSError):
                        self._lost(rank)
                    if kind == "word":
                        if on_word:
                            on_word(rank, what)
                    elif kind == wanted:
                        found[rank] = what
                    else:
                        self._stop(f"rank {rank} on {self.devices[rank]} failed: {what}")
                elif self._processes[rank].sentinel in ready:
                    self._lost(rank)
            if time.monotonic() - heard > self.silence_s:
                self._stop(
                    f"ranks {left} said nothing for {self.silence_s:g} s; "
                    f"{sorted(found)} had done their part"
                )
        return [found[rank] for rank in range(len(self._pipes))]

    def _lost(self, rank: int) -> None:
        process = self._processes[rank]
        process.join(5)
        self._stop(f"rank {rank} on {self.devices[rank]} ended with exit code {process.exitcode}")

    def _stop(self, why: str) -> None:
        self.close()
        raise RankError(f"{why}; all ranks were stopped")


class _environment:
    """Variables as a process that is started inside shall see them."""

    def __init__(self, changes: dict[str, str]):
        self.changes = changes

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.changes}
        os.environ.update(self.changes)

    def __exit__(self, *_: Any) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, world: int, pipe: Connection, connect: str) -> None:
    """A rank's process: connect, then call what it is told to, until the pipe ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def agree(value: Any) -> Any:
        pipe.send(("value", value))
        return pipe.recv()

    try:
        group = _named(connect)(rank, world, agree, lambda what: pipe.send(("word", what)))
        pipe.send(("ready", None))
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                break
            pipe.send(("done", _named(function)(group, *arguments)))
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        with contextlib.suppress(OSError):  # nobody is there to read it
            pipe.send(("failed", f"{type(error).__name__}: {error} ({where})"))
    os._exit(1)  # a communicator whose peers are gone cannot be taken down


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
