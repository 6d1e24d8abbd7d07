"""Addresses, loads and stores of global and of shared memory.

An address (`address`, `shared_address`) is an integer on the GPU and an object in the simulator;
adding bytes to one works in both. Source: PTX ISA 9.0, "ld", "ld.global.nc", "st".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.device import SIMULATED, u32, u64
from engine.ptx.intrinsic import assembly, composed, instruction, simulator

if SIMULATED:

    def address(pointer: np.ndarray, index: int) -> Any:
        """Global address of element `index` of a pointer parameter."""
        return simulator.Address(pointer.view(np.uint8), int(index) * pointer.itemsize)

    shared_address = address

    def advance(pointer: np.ndarray, count: int) -> np.ndarray:
        """The pointer moved by `count` elements."""
        if int(count) > len(pointer):
            raise IndexError(f"a pointer to {len(pointer)} elements was advanced by {int(count)}")
        return pointer[int(count) :]

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from engine.ptx.intrinsic import LLVM

    def _is_unsigned(kind: Any) -> bool:
        return isinstance(kind, types.Integer) and not kind.signed

    def _element(builder: Any, pointer: Any, index: Any) -> Any:
        wide = LLVM[u64]
        return builder.gep(pointer, [builder.zext(index, wide) if index.type != wide else index])

    def _number(builder: Any, pointer: Any, space: int, kind: Any) -> Any:
        pointer = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))
        return builder.ptrtoint(pointer, LLVM[kind])

    @intrinsic
    def address(context: Any, pointer: Any, index: Any) -> Any:
        """Global address (u64) of element `index` of a pointer parameter."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _number(builder, _element(builder, *args), 1, u64)

        return (types.uint64(pointer, index), codegen) if _is_unsigned(index) else None

    @intrinsic
    def advance(context: Any, pointer: Any, count: Any) -> Any:
        """The pointer moved by `count` elements; with a u64 count, past 2^32 of them."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _element(builder, *args)

        return (pointer(pointer, count), codegen) if _is_unsigned(count) else None

    @intrinsic
    def shared_address(context: Any, array: Any, index: Any) -> Any:
        """Address (u32, in the shared window) of element `index` of a shared array."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return _number(builder, _element(builder, data, args[1]), 3, u32)

        return types.uint32(array, types.uint32), codegen


def _read(count: int, dtype: Any = np.uint32) -> Callable:
    def read(place: Any) -> Any:
        values = tuple(place.view(dtype, count).tolist())
        return values if count > 1 else values[0]

    return read


def _write(count: int, dtype: Any = np.uint32) -> Callable:
    mask = (1 << 8 * np.dtype(dtype).itemsize) - 1

    def write(place: Any, *values: int) -> None:
        place.view(dtype, count)[:] = [int(v) & mask for v in values]

    return write


load_global_u16 = instruction(
    "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }",
    [u32],
    [u64],
    _read(1, np.uint16),
    memory=True,
)
load_global_u32 = instruction("ld.global.b32 $0, [$1];", [u32], [u64], _read(1), memory=True)
load_global_v2 = instruction(
    "ld.global.v2.b32 {$0, $1}, [$2];", [u32] * 2, [u64], _read(2), memory=True
)
load_global_v4 = instruction(
    "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", [u32] * 4, [u64], _read(4), memory=True
)
# (address, wanted): zeros where wanted is 0, and nothing is read.
load_global_v4_or_zero = instruction(
    "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
    " mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
    [u32] * 4,
    [u64, u32],
    lambda place, wanted: load_global_v4(place) if wanted else (0, 0, 0, 0),
    memory=True,
)
store_global_u16 = instruction(
    "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }",
    [],
    [u64, u32],
    _write(1, np.uint16),
    memory=True,
)
store_global_u32 = instruction("st.global.b32 [$0], $1;", [], [u64, u32], _write(1), memory=True)
store_global_v2 = instruction(
    "st.global.v2.b32 [$0], {$1, $2};", [], [u64, u32, u32], _write(2), memory=True
)
store_global_v4 = instruction(
    "st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [u64] + [u32] * 4, _write(4), memory=True
)
load_shared_v2 = instruction(
    "ld.shared.v2.b32 {$0, $1}, [$2];", [u32] * 2, [u32], _read(2), memory=True
)
load_shared_v4 = instruction(
    "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [u32] * 4, [u32], _read(4), memory=True
)
store_shared_u32 = instruction("st.shared.b32 [$0], $1;", [], [u32, u32], _write(1), memory=True)
store_shared_v2 = instruction(
    "st.shared.v2.b32 [$0], {$1, $2};", [], [u32] * 3, _write(2), memory=True
)
store_shared_v4 = instruction(
    "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [u32] * 5, _write(4), memory=True
)


def load_rows(rows: int, stride: int) -> Callable:
    """Makes an intrinsic: 16 bytes from each of `rows` places `stride` bytes apart, past L1; of
    weights, which no kernel writes (.nc: the load may come before a wait for the kernels before).

    (address, wanted, old) -> tuple of 4 rows u32, word j of row r at j rows + r; where wanted
    is 0 nothing is read and `old` comes back. The old value is an operand because a register
    that a predicated load only half defines would stay live around its loop.
    """
    count = 4 * rows
    load = "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32"
    places = [[f"${j * rows + r}" for j in range(4)] for r in range(rows)]
    text = "".join(
        f" {load} {{{', '.join(registers)}}}, [${count} + {r * stride}];"
        for r, registers in enumerate(places)
    )

    def stand_in(place: Any, wanted: int, old: tuple) -> tuple:
        if not wanted:
            return old
        words = [(place + r * stride).view(np.uint32, 4).tolist() for r in range(rows)]
        return tuple(words[r][j] for j in range(4) for r in range(rows))

    return _predicated(text, count, stand_in)


def load_rows_u16(rows: int, stride: int) -> Callable:
    """Makes an intrinsic like `load_rows`: one u16 from each place, in a u32."""
    text = "".join(f" @p ld.global.nc.u16 ${r}, [${rows} + {r * stride}];" for r in range(rows))

    def stand_in(place: Any, wanted: int, old: tuple) -> tuple:
        if not wanted:
            return old
        return tuple(int((place + r * stride).view(np.uint16, 1)[0]) for r in range(rows))

    return _predicated(text, rows, stand_in)


def _predicated(text: str, count: int, stand_in: Callable) -> Callable:
    """(address, wanted, old) -> old, where `text` has changed it under predicate p."""
    text = f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, 0;{text} }}"

    def emit(builder: Any, place: Any, wanted: Any, old: list) -> list:
        call = assembly(text, [u32] * count, [u64, u32, *range(count)], volatile=True)
        return call(builder, [place, wanted, *old])

    values = (u32, count)
    return composed(values, [u64, u32, values], emit, stand_in)
