"""Residual add and RMSNorm: x += delta, then y = x / sqrt(mean(x^2) + eps) * weight.

delta comes in parts (the ranges of K of a GEMM, or routed experts and shared expert), which are
added in ascending order in fp32 before the one addition to x. x stays fp32; y is rounded once. One
block a row: a thread holds every 256th group of four columns in registers, all its loads in flight
at once, and the block adds its warps in ascending order. The bits of a row depend on `hidden` and
`parts` alone.
"""

import math

from engine import activation
from engine.device import cdiv, check, cuda, f32, family, kernel, ptr, static_range, u32, u64
from engine.ptx import address, pdl_launch_dependents, pdl_wait
from engine.warp import block_sum

THREADS = 256
WARPS = THREADS // 32
MAX_HIDDEN = 8192  # columns; more would not fit the registers


@family(
    *({"bf16": True, "parts": p, "hidden": h} for p in (1, 2) for h in (192, 256)),
    *({"bf16": True, "parts": p, "hidden": 7168} for p in (2, 3)),
    *({"bf16": False, "parts": p, "hidden": h} for p in (1, 2) for h in (192, 256)),
)
def _add_rms_norm(*, bf16: bool, parts: int, hidden: int):
    load4, store4 = activation.load4(bf16), activation.store4(bf16)
    read4, write4 = activation.load4(False), activation.store4(False)
    QUADS = cdiv(hidden, 4 * THREADS)  # of a thread
    VALUES = 4 * QUADS

    @kernel(threads=THREADS, registers=128, dependent_launch=True)
    def add_rms_norm(
        delta: ptr[f32],  # [parts, rows, hidden]
        weight: ptr[activation.element(bf16)],  # [hidden]
        eps: f32,
        part_size: u32,  # rows * hidden
        x: ptr[f32],  # [rows, hidden], in and out
        y: ptr[activation.element(bf16)],  # [rows, hidden], out
    ):
        pdl_launch_dependents()
        values = cuda.local.array(VALUES, f32)
        factors = cuda.local.array(VALUES, f32)
        partial = cuda.shared.array(WARPS, f32)
        start = u64(u64(cuda.blockIdx.x) * u64(hidden))
        thread = u32(cuda.threadIdx.x)
        for q in static_range(QUADS):  # weights: known before the previous kernel is done
            column = u32(u32(thread + u32(THREADS * q)) * u32(4))
            if 4 * THREADS * (q + 1) > hidden:
                column = min(column, u32(hidden - 4))
            w = load4(address(weight, u64(column)))
            for i in static_range(4):
                factors[4 * q + i] = w[i]
        pdl_wait()
        delta_row, x_row = address(delta, start), address(x, start)
        for q in static_range(QUADS):
            column = u32(u32(thread + u32(THREADS * q)) * u32(4))
            for i in static_range(4):
                values[4 * q + i] = f32(0)
            if 4 * THREADS * (q + 1) <= hidden or column < u32(hidden):  # known but for the last
                here = u64(u64(column) * u64(4))
                change = read4(u64(delta_row + here))
                for part in static_range(1, parts):
                    more = read4(u64(delta_row + here + u64(u64(part_size) * u64(4 * part))))
                    change = (
                        f32(change[0] + more[0]),
                        f32(change[1] + more[1]),
                        f32(change[2] + more[2]),
                        f32(change[3] + more[3]),
                    )
                old = read4(u64(x_row + here))
                for i in static_range(4):
                    values[4 * q + i] = f32(old[i] + change[i])
        squares = f32(0)
        for i in static_range(VALUES):
            squares = f32(squares + values[i] * values[i])
        squares = block_sum(squares, partial, WARPS)
        scale = f32(f32(1) / f32(math.sqrt(f32(squares / f32(hidden) + eps))))
        for q in static_range(QUADS):
            column = u32(u32(thread + u32(THREADS * q)) * u32(4))
            if 4 * THREADS * (q + 1) <= hidden or column < u32(hidden):  # known but for the last
                a, b = values[4 * q], values[4 * q + 1]
                c, d = values[4 * q + 2], values[4 * q + 3]
                write4(u64(x_row + u64(u64(column) * u64(4))), a, b, c, d)
                store4(
                    address(y, u64(start + u64(column))),
                    f32(f32(a * scale) * factors[4 * q]),
                    f32(f32(b * scale) * factors[4 * q + 1]),
                    f32(f32(c * scale) * factors[4 * q + 2]),
                    f32(f32(d * scale) * factors[4 * q + 3]),
                )

    return add_rms_norm


def add_rms_norm(delta, weight, *, eps: float, x, y, stream=None) -> None:
    """delta [parts, rows, hidden] fp32, parts >= 1; weight [hidden] and y [rows, hidden] both bf16
    or both fp32; x [rows, hidden] fp32, changed in place. hidden is a multiple of 4, at most 8192
    (NotImplementedError)."""
    dims = check(
        "add_rms_norm",
        delta=(delta, "parts rows hidden", "float32"),
        weight=(weight, "hidden", activation.ACTIVATIONS),
        x=(x, "rows hidden", "float32"),
        y=(y, "rows hidden", str(weight.dtype)),
    )
    parts, rows, hidden = dims["parts"], dims["rows"], dims["hidden"]
    if not parts:
        raise ValueError("add_rms_norm: delta has no parts")
    if hidden % 4 or hidden > MAX_HIDDEN or rows * hidden >= 2**32:
        raise NotImplementedError(
            f"add_rms_norm: {rows} rows of {hidden}; a row is a multiple of 4 up to 8192"
        )
    _add_rms_norm(bf16=activation.is_bf16(weight), parts=parts, hidden=hidden).launch(
        rows, delta, weight, eps, rows * hidden, x, y, stream=stream
    )
