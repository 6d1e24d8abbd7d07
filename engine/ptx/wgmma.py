"""The product of a warpgroup (Hopper): operands in shared memory, or a left one in registers.

Source: PTX ISA 9.0, "wgmma", "Matrix descriptor". The simulator adds sixteen products exactly and
rounds once, as in engine/ptx/mma.py.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from engine.device import SIMULATED, f32, u32, u64
from engine.ptx.intrinsic import LLVM, assembly, composed, constant, registers, simulator
from engine.ptx.mma import of_lanes, to_lanes
from engine.ptx.scalar import MASK


@cache
def has_wgmma() -> bool:
    """Hopper alone has it; the GPUs of a machine are taken to be alike."""
    if SIMULATED:
        return True
    from cuda.core import Device

    return Device().compute_capability[0] == 9


def _descriptor(builder: Any, place: Any, leading: Any, stride: Any) -> Any:
    def field(value: Any, shift: int) -> Any:
        value = builder.lshr(builder.and_(value, constant(u32, 0x3FFFF)), constant(u32, 4))
        return builder.shl(builder.zext(value, LLVM[u64]), constant(u64, shift))

    parts = field(place, 0), field(leading, 16), field(stride, 32)
    swizzled = constant(u64, 1 << 62)
    return builder.or_(builder.or_(parts[0], parts[1]), builder.or_(parts[2], swizzled))


# (place, leading, stride) -> what wgmma calls a matrix: rows of 128 bytes, swizzled (16-byte unit ^
# row % 8). place: shared address, on 1024 bytes but for the offset of a step. stride: bytes from 8
# rows to the next 8. leading: bytes from 64 columns to the next 64, of a transposed B; else 0.
matrix_descriptor = composed(
    u64,
    [u32, u32, u32],
    _descriptor,
    lambda place, leading, stride: (place, int(leading), int(stride)),
)


def matrix(descriptor: tuple, skip: int, rows: range, columns: range, by_rows: bool) -> Any:
    """[rows, columns] float64 of a swizzled matrix in the simulator's shared memory.

    by_rows: columns run along its rows.
    """
    place, leading, stride = descriptor
    at, end = _places(place.offset + skip, leading, stride, rows, columns, by_rows)
    if end > len(place.base):
        raise IndexError(f"wgmma reads {end} of {len(place.base)} bytes")
    halves = place.base.view(np.uint16)[at].astype(np.uint32)
    return (halves << 16).view(np.float32).astype(np.float64)


@cache
def _places(
    start: int, leading: int, stride: int, rows: range, columns: range, by_rows: bool
) -> tuple[np.ndarray, int]:
    """Where the elements of `matrix` are, in units of two bytes; and the byte behind the last."""
    row, column = np.array(rows)[:, None], np.array(columns)
    if not by_rows:
        row, column = column, row
    at = start + row // 8 * stride + row % 8 * 128 + column // 64 * leading + column % 64 * 2
    at = at ^ (at >> 7 & 7) << 4
    return at >> 1, int(at.max()) + 2


def wgmma_bf16(
    columns: int, steps: Sequence[tuple[int, int]], *, accumulate: bool, transposed: bool
) -> Callable:
    """Makes an intrinsic: a chain of wgmma m64n<columns>k16, waited for.

    (a, b) -> sums, or (sums, a, b) -> sums; sums are columns / 2 f32 in a tuple, as of m16n8
    tiles of a warp's 16 rows. a, b: descriptors; `steps` lists what each step adds to their
    addresses, in bytes. transposed: rows of B are k and its columns n.
    """
    count = columns // 2
    first = 2 * count if accumulate else count
    lines = ["{", ".reg .b64 a, b;", ".reg .b32 one;", ".reg .pred p;"]
    lines += ["mov.b32 one, 1;", f"setp.ne.b32 p, one, {int(not accumulate)};"]
    lines += ["wgmma.fence.sync.aligned;"]
    for i, (a_bytes, b_bytes) in enumerate(steps):
        lines += [
            f"add.s64 a, ${first}, {a_bytes // 16};",
            f"add.s64 b, ${first + 1}, {b_bytes // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
            f"{registers(0, count)}, a, b, p, 1, 1, 0, {int(transposed)};",
        ]
        if i == 0 and not accumulate:
            lines += ["setp.ne.b32 p, one, 0;"]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]

    def emit(builder: Any, *operands: Any) -> list:
        start = list(range(count)) if accumulate else []
        call = assembly("\n".join(lines), [f32] * count, [*start, u64, u64], memory=True)
        before = operands[0] if accumulate else []
        return call(builder, [*before, *operands[-2:]])

    def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
        warp, _, a, b = slots[0]
        own = range(16 * (warp % 4), 16 * (warp % 4) + 16)
        sums = np.zeros((16, columns), np.float32)
        if accumulate:
            sums = of_lanes([slots[n][1] for n in range(32)], 1, columns // 8)
        for a_skip, b_skip in steps:
            left = matrix(a, a_skip, own, range(16), True)
            right = matrix(b, b_skip, range(16), range(columns), transposed)
            sums = (np.einsum("ik,kj->ij", left, right) + sums).astype(np.float32)
        return to_lanes(sums, 1, columns // 8)

    def stand_in(*arguments: Any) -> tuple:
        sums = arguments[0] if accumulate else None
        warp = simulator.current().thread_id // 32
        return simulator.collective(MASK, (warp, sums, *arguments[-2:]), combine)

    sums = (f32, count)
    return composed(sums, [*([sums] if accumulate else []), u64, u64], emit, stand_in)
