"""Copies that run beside the code, from global to shared memory, and the barriers they arrive at.

Source: PTX ISA 9.0, "cp.async", "cp.async.bulk", "mbarrier", "fence.proxy.async".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.device import u32, u64
from engine.ptx.intrinsic import instruction, simulator


def _copy_16(shared: Any, source: Any, nbytes: int) -> None:
    """Copy `nbytes` and fill the rest of the 16 with zeros; bytes are read when they land."""
    target = shared.view(np.uint8, 16)
    taken = source.view(np.uint8, 16)[: int(nbytes)] if nbytes else np.empty(0, np.uint8)

    def land() -> None:
        target[: len(taken)] = taken
        target[len(taken) :] = 0

    target.fill(0xFF)  # what is read before the wait is NaN, never the old tile
    simulator.current().async_copies[-1].append(land)


# (shared, source, nbytes): so many bytes, and zeros up to 16.
cp_async_16_zfill = instruction(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [u32, u64, u32], _copy_16, memory=True
)
cp_async_commit = instruction(
    "cp.async.commit_group;",
    [],
    [],
    lambda: simulator.current().async_copies.append([]),
    memory=True,
)


def cp_async_wait(pending: int) -> Callable:
    """Makes an intrinsic that waits until at most `pending` groups of this thread are open."""

    def stand_in() -> None:
        groups = simulator.current().async_copies
        while len(groups) - 1 > pending:
            for land in groups.pop(0):
                land()

    return instruction(f"cp.async.wait_group {pending};", [], [], stand_in, memory=True)


def _one_memory() -> None:
    """The simulator has one memory: there is nothing to wait for."""


def _transfer(place: Any) -> Any:
    return simulator.current().block.transfers[place.offset]


def _init(place: Any, count: int) -> None:
    block = simulator.current().block
    block.transfers[place.offset] = simulator.Transfer(block, int(count))


def _copy_bulk(shared: Any, source: Any, nbytes: int, barrier: Any) -> None:
    count = int(nbytes)
    if count % 16 or shared.offset % 16 or source.offset % 16:
        raise ValueError(f"copy_bulk: {count} bytes, {source.offset} to {shared.offset}")
    target = shared.base[shared.offset : shared.offset + count]
    taken = source.base[source.offset : source.offset + count]
    if len(target) != count or len(taken) != count:
        raise IndexError(f"copy_bulk: {count} bytes reach outside their arrays")

    def land() -> None:
        target[:] = taken

    target.fill(0xFF)  # what is read before the wait is NaN, never the old tile
    _transfer(barrier).copy(count, land)


# What this thread wrote to shared memory is seen by wgmma and by bulk copies.
fence_async = instruction("fence.proxy.async.shared::cta;", [], [], _one_memory, memory=True)
# (barrier, count): a barrier of 8 bytes in shared memory for `count` arrivals.
mbarrier_init = instruction(
    "mbarrier.init.shared::cta.b64 [$0], $1;", [], [u32, u32], _init, memory=True
)
mbarrier_init_fence = instruction(
    "fence.mbarrier_init.release.cluster;", [], [], _one_memory, memory=True
)
mbarrier_arrive = instruction(
    "{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [$0]; }",
    [],
    [u32],
    lambda place: _transfer(place).arrive(),
    memory=True,
)
# (barrier, nbytes): arrive, and announce so many bytes of this phase.
mbarrier_expect = instruction(
    "{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [$0], $1; }",
    [],
    [u32, u32],
    lambda place, nbytes: _transfer(place).arrive(int(nbytes)),
    memory=True,
)
mbarrier_wait = instruction(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra again; }",
    [],
    [u32, u32],
    lambda place, parity: _transfer(place).wait(int(parity)),
    memory=True,
)
# (shared, source, nbytes, barrier): nbytes, a multiple of 16, arrive at the barrier.
copy_bulk = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    [],
    [u32, u64, u32, u32],
    _copy_bulk,
    memory=True,
)
