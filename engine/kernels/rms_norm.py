"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, mean over the last axis.

One block a token. x may be the fp32 residual stream or bf16; the sum of squares is fp32, y is
rounded once, at the store. A thread holds every 256th or 1024th column in registers, all its loads
in flight at once, and the block adds its warps in ascending order, so the bits of a row depend on
`hidden` alone, never on its neighbours.
"""

import math

from engine import activation
from engine.device import cdiv, check, cuda, f32, family, kernel, ptr, static_range, u32
from engine.ptx import pdl_launch_dependents, pdl_wait
from engine.warp import block_sum

WIDE = 2048  # from this hidden on a block has 1024 threads: 7168 / 1024 = 7 elements each
MAX_HIDDEN = 16384  # more would not fit the registers


@family(
    *(
        {"x_bf16": x_bf16, "y_bf16": y_bf16, "threads": threads, "turns": turns}
        for x_bf16, y_bf16 in ((False, True), (True, True), (False, False))
        for threads, turns in ((256, 1), (256, 2), (256, 6), (1024, 5), (1024, 7))
    )
)
def _rms_norm(*, x_bf16: bool, y_bf16: bool, threads: int, turns: int):
    load_x, load_y = activation.load(x_bf16), activation.load(y_bf16)
    store = activation.store(y_bf16)
    warps = threads // 32

    @kernel(threads=threads, registers=64, dependent_launch=True)
    def rms_norm(
        x: ptr[activation.element(x_bf16)],  # [tokens, hidden]
        weight: ptr[activation.element(y_bf16)],  # [hidden]
        eps: f32,
        hidden: u32,  # at most threads * turns
        y: ptr[activation.element(y_bf16)],  # [tokens, hidden], out
    ):
        pdl_launch_dependents()
        partial = cuda.shared.array(warps, f32)
        values = cuda.local.array(turns, f32)
        factors = cuda.local.array(turns, f32)
        thread = u32(cuda.threadIdx.x)
        start = u32(u32(cuda.blockIdx.x) * hidden)
        for j in static_range(turns):  # weights: known before the previous kernel is done
            i = min(u32(thread + u32(j * threads)), u32(hidden - u32(1)))
            factors[j] = load_y(weight, i)
        pdl_wait()
        for j in static_range(turns):
            i = u32(thread + u32(j * threads))
            values[j] = f32(0)
            if i < hidden:
                values[j] = load_x(x, u32(start + i))
        squares = f32(0)
        for j in static_range(turns):
            squares = f32(squares + values[j] * values[j])
        squares = block_sum(squares, partial, warps)
        scale = f32(f32(1) / f32(math.sqrt(f32(squares / f32(hidden) + eps))))
        for j in static_range(turns):
            i = u32(thread + u32(j * threads))
            if i < hidden:
                store(y, u32(start + i), f32(f32(values[j] * scale) * factors[j]))

    return rms_norm


def rms_norm(x, weight, *, eps: float, y, stream=None) -> None:
    """x [tokens, hidden] bf16 or fp32; weight [hidden], y [tokens, hidden] both bf16 or both fp32.

    bf16 x with fp32 y is refused (NotImplementedError): no layer of the engine needs it. So are
    2^32 elements and more, and rows longer than 16384.
    """
    dims = check(
        "rms_norm",
        x=(x, "tokens hidden", activation.ACTIVATIONS),
        weight=(weight, "hidden", activation.ACTIVATIONS),
        y=(y, "tokens hidden", str(weight.dtype)),
    )
    x_bf16, y_bf16 = activation.is_bf16(x), activation.is_bf16(y)
    if x_bf16 and not y_bf16:
        raise NotImplementedError("rms_norm: x is bfloat16 and y float32; y must be bfloat16 too")
    if dims["tokens"] * dims["hidden"] >= 2**32:
        raise NotImplementedError(f"rms_norm: x {tuple(x.shape)} has 2^32 elements or more")
    if not 1 <= dims["hidden"] <= MAX_HIDDEN:
        raise NotImplementedError(f"rms_norm: rows of {dims['hidden']}, 1 to {MAX_HIDDEN} work")
    threads = 1024 if dims["hidden"] >= WIDE else 256
    turns = cdiv(dims["hidden"], threads)
    _rms_norm(x_bf16=x_bf16, y_bf16=y_bf16, threads=threads, turns=turns).launch(
        dims["tokens"], x, weight, eps, dims["hidden"], y, stream=stream
    )
