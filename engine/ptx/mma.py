"""The warp's tensor core product m16n8k16, its fragments, and tuples of registers.

bfloat16 values are their 16 bits, two in a u32. Source: PTX ISA 9.0, "mma.m16n8k16", "ldmatrix".
Not alike to the bit: a tensor core adds sixteen products in an order and width of its own, the
simulator exactly and with one rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.device import f32, u32
from engine.ptx.intrinsic import (
    LITERAL,
    assembly,
    composed,
    constant,
    instruction,
    registers,
    simulator,
)
from engine.ptx.scalar import MASK

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
MMA_ARGUMENTS = (
    f"{MMA} {registers(0, 4)}, {registers(4, 4)}, {registers(8, 2)}, {registers(10, 4)};",
    [f32] * 4,
    [u32] * 6 + [f32] * 4,
)


def unpacked(words: np.ndarray) -> np.ndarray:
    """u32 [...] -> two bfloat16 values [..., 2] as float64."""
    halves = words[..., None].view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32).astype(np.float64)


def of_lanes(sums: Sequence[Sequence[np.float32]], rows: int, columns: int) -> np.ndarray:
    """Sums of m16n8 tiles, a lane's 4 of tile (i, j) at 4 (i columns + j) -> the float32 matrix.

    Lane 4 g + t has columns 2 t and 2 t + 1 of rows g and g + 8.
    """
    lanes = np.array(sums, np.float32).reshape(8, 4, rows, columns, 2, 2)
    return lanes.transpose(2, 4, 0, 3, 1, 5).reshape(16 * rows, 8 * columns)


def to_lanes(matrix: np.ndarray, rows: int, columns: int) -> dict[int, tuple]:
    """The other way round: lane -> its sums."""
    tiles = matrix.reshape(rows, 2, 8, columns, 4, 2)
    return dict(enumerate(map(tuple, tiles.transpose(2, 4, 0, 3, 1, 5).reshape(32, -1))))


def zeros(kind: Any, count: int) -> Callable:
    """Makes an intrinsic that returns `count` zeros, f32 or u32, in a tuple of registers."""

    def emit(builder: Any) -> list:
        return [constant(kind, 0)] * count

    return composed((kind, count), [], emit, lambda: (kind(0),) * count)


def scale_rows(tiles: int) -> Callable:
    """Makes an intrinsic: (sums, low, high) -> sums of `tiles` m16n8 tiles, each lane's upper
    row times `low` and its lower row (8 below) times `high`."""

    def emit(builder: Any, sums: list, low: Any, high: Any) -> list:
        return [builder.fmul(v, high if n & 2 else low) for n, v in enumerate(sums)]

    def stand_in(sums: tuple, low: np.float32, high: np.float32) -> tuple:
        return tuple(np.float32(v * (high if n & 2 else low)) for n, v in enumerate(sums))

    sums = (f32, 4 * tiles)
    return composed(sums, [sums, f32, f32], emit, stand_in)


def add_f32(count: int) -> Callable:
    """Makes an intrinsic: the sums of two tuples of `count` f32, element by element."""

    def emit(builder: Any, a: list, b: list) -> list:
        return [builder.fadd(x, y) for x, y in zip(a, b, strict=True)]

    def stand_in(a: tuple, b: tuple) -> tuple:
        return tuple(np.float32(x + y) for x, y in zip(a, b, strict=True))

    values = (f32, count)
    return composed(values, [values, values], emit, stand_in)


def fma_dot4(rows: int, columns: int) -> Callable:
    """Makes an intrinsic that extends rows x columns dot products by four terms each.

    (sums, a, b) -> sums; a and b hold f32 bits, four consecutive terms a row or column:
    sums[i columns + j] = fma(a[4i+3], b[4j+3], ... fma(a[4i], b[4j], sums[i columns + j])).
    """
    text = "{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; fma.rn.f32 $0, x, y, $3; }"

    def emit(builder: Any, sums: list, a: list, b: list) -> list:
        fma = assembly(text, [f32], [u32, u32, f32])
        for term in range(4):
            for n in range(rows * columns):
                x, y = a[4 * (n // columns) + term], b[4 * (n % columns) + term]
                (sums[n],) = fma(builder, [x, y, sums[n]])
        return sums

    def stand_in(sums: tuple, a: tuple, b: tuple) -> tuple:
        x, y = (np.array(v, np.uint32).view(np.float32).reshape(-1, 4) for v in (a, b))
        total = np.array(sums, np.float32).reshape(rows, columns)
        products = x.astype(np.float64)[:, None] * y.astype(np.float64)  # exact
        for term in range(4):
            total = (products[..., term] + total).astype(np.float32)
        return tuple(total.ravel())

    sums = (f32, rows * columns)
    return composed(sums, [sums, (u32, 4 * rows), (u32, 4 * columns)], emit, stand_in)


def _ldmatrix(transposed: bool) -> Callable:
    """Four tiles of 8 x 8: lane l gives the address of row l % 8 of tile l // 8, eight 16-bit
    values, and has in register m the pair of tile m that is its own."""

    def combine(rows: dict[int, bytes]) -> dict[int, tuple]:
        tiles = np.frombuffer(b"".join(rows[n] for n in range(32)), np.uint16).reshape(4, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(1, 2))
        pairs = tiles.view(np.uint32).reshape(4, 32)  # [register, lane]
        return dict(enumerate(map(tuple, pairs.T.tolist())))

    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
    return instruction(
        f"{text} {registers(0, 4)}, [$4];",
        [u32] * 4,
        [u32],
        lambda row: simulator.collective(MASK, row.view(np.uint16, 8).tobytes(), combine),
        memory=True,
    )


ldmatrix_x4, ldmatrix_x4_trans = _ldmatrix(False), _ldmatrix(True)


def mma_bf16_tiles(rows: int, columns: int) -> Callable:
    """Makes an intrinsic: `rows` A fragments times `columns` B fragments, in one call.

    (sums, a, b) -> sums; tuples of 4 rows columns f32, 4 rows u32, 2 columns u32. The sums of
    tile (i, j) start at 4 (i columns + j). One call instead of rows x columns keeps Numba's
    compile time linear in their number.
    """

    def emit(builder: Any, sums: list, a: list, b: list) -> list:
        mma = assembly(*MMA_ARGUMENTS)
        for i in range(rows):
            for j in range(columns):
                at = 4 * (i * columns + j)
                operands = a[4 * i : 4 * i + 4] + b[2 * j : 2 * j + 2] + sums[at : at + 4]
                sums[at : at + 4] = mma(builder, operands)
        return sums

    combine = _product(rows, columns)

    def stand_in(sums: tuple, a: tuple, b: tuple) -> tuple:
        return simulator.collective(MASK, (sums, a, b), combine)

    sums = (f32, 4 * rows * columns)
    return composed(sums, [sums, (u32, 4 * rows), (u32, 2 * columns)], emit, stand_in)


def mma_bf16_slice(total: int, columns: int) -> Callable:
    """Makes an intrinsic: one A fragment times `columns` B fragments, into some of the sums.

    (place, sums, a, b) -> sums; a literal, and tuples of 4 total f32, 4 u32 and 2 columns u32.
    Tile place columns + j of the sums gets the product of a with fragment j.
    """

    def emit(builder: Any, place: int, sums: Any, a: Any, b: Any) -> Any:
        mma = assembly(*MMA_ARGUMENTS)
        a = [builder.extract_value(a, n) for n in range(4)]
        b = [builder.extract_value(b, n) for n in range(2 * columns)]
        for j in range(columns):
            at = range(4 * (columns * place + j), 4 * (columns * place + j) + 4)
            before = [builder.extract_value(sums, n) for n in at]
            for n, value in zip(at, mma(builder, a + b[2 * j : 2 * j + 2] + before), strict=True):
                sums = builder.insert_value(sums, value, n)
        return sums

    combine = _product(1, columns)

    def stand_in(place: int, sums: tuple, a: tuple, b: tuple) -> tuple:
        low, high = 4 * columns * place, 4 * columns * (place + 1)
        product = simulator.collective(MASK, (sums[low:high], a, b), combine)
        return sums[:low] + product + sums[high:]

    sums = (f32, 4 * total)
    operands = [LITERAL, sums, (u32, 4), (u32, 2 * columns)]
    return composed(sums, operands, emit, stand_in, unpacked=False)


def _product(rows: int, columns: int) -> Callable:
    """Fragments of m16n8k16 in the ISA's layout; products exact, one rounding of each sum."""

    def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
        sums, fragments_a, fragments_b = zip(*(slots[n] for n in range(32)), strict=True)
        # Lane 4 g + t has pair t of eight k and of the next eight: rows g and g + 8, column g.
        a = unpacked(np.array(fragments_a, np.uint32)).reshape(8, 4, rows, 2, 2, 2)
        a = a.transpose(2, 4, 0, 3, 1, 5).reshape(16 * rows, 16)
        b = unpacked(np.array(fragments_b, np.uint32)).reshape(8, 4, columns, 2, 2)
        b = b.transpose(3, 1, 4, 2, 0).reshape(16, 8 * columns)
        d = np.einsum("ik,kj->ij", a, b) + of_lanes(sums, rows, columns)
        return to_lanes(d.astype(np.float32), rows, columns)

    return combine
