"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, mean over the last axis.

One block a token. x may be the fp32 residual stream or bf16; the sum of squares is fp32, y is
rounded once, at the store. Threads stride over the row and the block adds its warps in ascending
order, so the bits of a row depend on `hidden` alone, never on its neighbours.
"""

import math

from engine.device import check, cuda, f32, family, kernel, ptr, u16, u32
from engine.ptx import bf16_to_f32, f32_to_bf16, pdl_launch_dependents, pdl_wait
from engine.warp import block_sum

THREADS = 256  # 7168 / 256 = 28 elements a thread
WARPS = THREADS // 32


@family(
    {"x_bf16": False, "y_bf16": True},
    {"x_bf16": True, "y_bf16": True},
    {"x_bf16": False, "y_bf16": False},
)
def _rms_norm(*, x_bf16: bool, y_bf16: bool):
    x_type, y_type = u16 if x_bf16 else f32, u16 if y_bf16 else f32

    @kernel(threads=THREADS, registers=40, dependent_launch=True)
    def rms_norm(
        x: ptr[x_type],  # [tokens, hidden]
        weight: ptr[y_type],  # [hidden]
        eps: f32,
        hidden: u32,
        y: ptr[y_type],  # [tokens, hidden], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        partial = cuda.shared.array(WARPS, f32)
        start = u32(u32(cuda.blockIdx.x) * hidden)
        squares = f32(0)
        i = u32(cuda.threadIdx.x)
        while i < hidden:
            if x_bf16:
                value = bf16_to_f32(u32(x[u32(start + i)]))
            else:
                value = x[u32(start + i)]
            squares = f32(squares + value * value)
            i = u32(i + u32(THREADS))
        squares = block_sum(squares, partial, WARPS)
        scale = f32(f32(1) / f32(math.sqrt(f32(squares / f32(hidden) + eps))))
        i = u32(cuda.threadIdx.x)
        while i < hidden:
            if x_bf16:
                value = bf16_to_f32(u32(x[u32(start + i)]))
            else:
                value = x[u32(start + i)]
            if y_bf16:
                scaled = f32(f32(value * scale) * bf16_to_f32(u32(weight[i])))
                y[u32(start + i)] = u16(f32_to_bf16(scaled))
            else:
                y[u32(start + i)] = f32(f32(value * scale) * weight[i])
            i = u32(i + u32(THREADS))

    return rms_norm


def rms_norm(x, weight, *, eps: float, y, stream=None) -> None:
    """x [tokens, hidden] bf16 or fp32; weight [hidden], y [tokens, hidden] both bf16 or both fp32.

    bf16 x with fp32 y is refused (NotImplementedError): no layer of the engine needs it.
    """
    either = ("bfloat16", "float32")
    dims = check(
        "rms_norm",
        x=(x, "tokens hidden", either),
        weight=(weight, "hidden", either),
        y=(y, "tokens hidden", str(weight.dtype)),
    )
    x_bf16, y_bf16 = x.dtype != "float32", y.dtype != "float32"
    if x_bf16 and not y_bf16:
        raise NotImplementedError("rms_norm: x is bfloat16 and y float32; y must be bfloat16 too")
    launch = _rms_norm(x_bf16=x_bf16, y_bf16=y_bf16).launch
    launch(dims["tokens"], x, weight, eps, dims["hidden"], y, stream=stream)
