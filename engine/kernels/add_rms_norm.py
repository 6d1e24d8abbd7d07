"""Residual add and RMSNorm: x += delta, then y = x / sqrt(mean(x^2) + eps) * weight.

delta comes in parts (the ranges of K of a GEMM, or routed experts and shared expert), which are
added in ascending order in fp32 before the one addition to x. x stays fp32; y is rounded once. One
block a row, sums as in rms_norm, so the bits of a row depend on `hidden` and `parts` alone.
"""

import math

from engine import activation
from engine.device import check, cuda, f32, family, kernel, ptr, static_range, u32
from engine.ptx import pdl_launch_dependents, pdl_wait
from engine.warp import block_sum

FLIGHT = 4  # elements a thread loads before it uses the first: one latency for four
WIDE = 2048  # from this hidden on a block has 1024 threads: 7168 / 1024 = 7 elements each


@family(
    {"bf16": True, "threads": 256},
    {"bf16": True, "threads": 1024},
    {"bf16": False, "threads": 256},
    {"bf16": False, "threads": 1024},
)
def _add_rms_norm(*, bf16: bool, threads: int):
    load, store = activation.load(bf16), activation.store(bf16)
    warps = threads // 32
    step = FLIGHT * threads

    @kernel(threads=threads, registers=64, dependent_launch=True)
    def add_rms_norm(
        delta: ptr[f32],  # [parts, rows, hidden]
        weight: ptr[activation.element(bf16)],  # [hidden]
        eps: f32,
        parts: u32,
        part_size: u32,  # rows * hidden
        hidden: u32,
        x: ptr[f32],  # [rows, hidden], in and out
        y: ptr[activation.element(bf16)],  # [rows, hidden], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        partial = cuda.shared.array(warps, f32)
        values = cuda.local.array(FLIGHT, f32)
        changes = cuda.local.array(FLIGHT, f32)
        start = u32(u32(cuda.blockIdx.x) * hidden)
        squares = f32(0)
        i = u32(cuda.threadIdx.x)
        while i < hidden:
            for j in static_range(FLIGHT):
                values[j] = f32(0)
                changes[j] = f32(0)
                if u32(i + u32(j * threads)) < hidden:
                    values[j] = x[u32(u32(start + i) + u32(j * threads))]
                    changes[j] = delta[u32(u32(start + i) + u32(j * threads))]
            part = u32(1)
            while part < parts:
                at = u32(u32(start + i) + u32(part * part_size))
                for j in static_range(FLIGHT):
                    if u32(i + u32(j * threads)) < hidden:
                        changes[j] = f32(changes[j] + delta[u32(at + u32(j * threads))])
                part = u32(part + u32(1))
            for j in static_range(FLIGHT):
                value = f32(values[j] + changes[j])
                if u32(i + u32(j * threads)) < hidden:
                    x[u32(u32(start + i) + u32(j * threads))] = value
                squares = f32(squares + value * value)
            i = u32(i + u32(step))
        squares = block_sum(squares, partial, warps)
        scale = f32(f32(1) / f32(math.sqrt(f32(squares / f32(hidden) + eps))))
        i = u32(cuda.threadIdx.x)
        while i < hidden:
            for j in static_range(FLIGHT):
                if u32(i + u32(j * threads)) < hidden:
                    values[j] = x[u32(u32(start + i) + u32(j * threads))]
                    changes[j] = load(weight, u32(i + u32(j * threads)))
            for j in static_range(FLIGHT):
                if u32(i + u32(j * threads)) < hidden:
                    at = u32(u32(start + i) + u32(j * threads))
                    store(y, at, f32(f32(values[j] * scale) * changes[j]))
            i = u32(i + u32(step))

    return add_rms_norm


def add_rms_norm(delta, weight, *, eps: float, x, y, stream=None) -> None:
    """delta [parts, rows, hidden] fp32, parts >= 1; weight [hidden] and y [rows, hidden] both bf16
    or both fp32; x [rows, hidden] fp32, changed in place."""
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
    if parts * rows * hidden >= 2**32:
        raise NotImplementedError(f"add_rms_norm: delta {delta.shape} has 2^32 elements or more")
    threads = 1024 if hidden >= WIDE else 256
    _add_rms_norm(bf16=activation.is_bf16(weight), threads=threads).launch(
        rows, delta, weight, eps, parts, rows * hidden, hidden, x, y, stream=stream
    )
