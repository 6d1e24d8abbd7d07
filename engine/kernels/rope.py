"""Rotary position of the query: its last columns, rotated in interleaved pairs.

(a, b) = q[.., nope + 2i], q[.., nope + 2i + 1] becomes (a cos - b sin, b cos + a sin) with the
fp32 tables' row `position`, and lands in the last columns of `query`, beside the absorbed part.
Rotated in fp32, rounded once. status[row] is 0, or 1 for a position outside the tables; that row's
columns are zero. A thread a pair.
"""

import math

from engine import activation
from engine.device import cdiv, check, cuda, f32, family, i32, kernel, ptr, u32
from engine.ptx import fma, pdl_launch_dependents, pdl_wait

THREADS = 128
NO_SUCH_POSITION = 1


@family({"bf16": True}, {"bf16": False})
def _rope(*, bf16: bool):
    load, store = activation.load(bf16), activation.store(bf16)

    @kernel(threads=THREADS, registers=40, dependent_launch=True)
    def rope(
        q: ptr[activation.element(bf16)],  # [rows, heads, q_width]
        cos: ptr[f32],  # [positions, pairs]
        sin: ptr[f32],  # [positions, pairs]
        position: ptr[i32],  # [rows]
        heads: u32,
        q_width: u32,
        positions: u32,
        pairs: u32,
        width: u32,
        query: ptr[activation.element(bf16)],  # [rows, heads, width], in and out
        status: ptr[i32],  # [rows], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        row = u32(cuda.blockIdx.x)
        place = u32(position[row])
        known = place < positions
        table = u32((place if known else u32(0)) * pairs)
        i = u32(u32(u32(cuda.blockIdx.y) * u32(THREADS)) + u32(cuda.threadIdx.x))
        if i == u32(0):
            status[row] = i32(0) if known else i32(NO_SUCH_POSITION)
        if i < u32(heads * pairs):
            head = u32(u32(row * heads) + u32(i // pairs))
            pair = u32(i % pairs)
            source = u32(u32(u32(head + u32(1)) * q_width) - u32(u32(pairs - pair) * u32(2)))
            target = u32(u32(u32(head + u32(1)) * width) - u32(u32(pairs - pair) * u32(2)))
            a, b = load(q, source), load(q, u32(source + u32(1)))
            c, s = cos[u32(table + pair)], sin[u32(table + pair)]
            first = fma(a, c, f32(-f32(b * s)))
            second = fma(b, c, f32(a * s))
            store(query, target, first if known else f32(0))
            store(query, u32(target + u32(1)), second if known else f32(0))

    return rope


def rope(q, cos, sin, position, *, query, status, stream=None) -> None:
    """q [rows, heads, nope + 2 pairs] and query [rows, heads, width >= 2 pairs], both bf16 or both
    fp32: the last 2 pairs columns of q go, rotated, to the last of query. cos, sin
    [positions, pairs] fp32; position, status [rows] int32. NotImplementedError for 2^32 elements
    of an array."""
    dims = check(
        "rope",
        q=(q, "rows heads q_width", activation.ACTIVATIONS),
        cos=(cos, "positions pairs", "float32"),
        sin=(sin, "positions pairs", "float32"),
        position=(position, "rows", "int32"),
        query=(query, "rows heads width", str(q.dtype)),
        status=(status, "rows", "int32"),
    )
    if min(dims["q_width"], dims["width"]) < 2 * dims["pairs"]:
        raise ValueError(
            f"rope: tables rotate {2 * dims['pairs']} columns, "
            f"q has {dims['q_width']} and query {dims['width']}"
        )
    if not dims["positions"]:
        raise ValueError("rope: cos has no position")
    for name, array in (("q", q), ("query", query), ("cos", cos)):
        if math.prod(array.shape) >= 2**32:
            raise NotImplementedError(
                f"rope: {name} {tuple(array.shape)} has 2^32 elements or more"
            )
    grid = (dims["rows"], cdiv(dims["heads"] * dims["pairs"], THREADS))
    _rope(bf16=activation.is_bf16(q)).launch(
        grid, q, cos, sin, position, dims["heads"], dims["q_width"], dims["positions"],
        dims["pairs"], dims["width"], query, status, stream=stream,
    )  # fmt: skip
