"""The residual stream after a tap layer, copied beside the other taps for the drafter.

taps[row, tap * hidden + i] = bf16(x[row, i]), rounded once. The other columns stay as they are.
"""

from engine.device import cdiv, check, cuda, f32, kernel, ptr, u16, u32
from engine.ptx import f32_to_bf16, pdl_launch_dependents, pdl_wait

THREADS = 256


@kernel(threads=THREADS, registers=32, dependent_launch=True)
def _tap(
    x: ptr[f32],  # [rows, hidden]
    hidden: u32,
    width: u32,
    first: u32,  # tap * hidden
    taps: ptr[u16],  # [rows, width], in and out
):
    pdl_launch_dependents()
    pdl_wait()
    row = u32(cuda.blockIdx.y)
    i = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if i < hidden:
        value = f32_to_bf16(x[u32(u32(row * hidden) + i)])
        taps[u32(u32(u32(row * width) + first) + i)] = u16(value)


def tap(x, *, tap: int, taps, stream=None) -> None:
    """x [rows, hidden] fp32; taps [rows, width] bf16, width a multiple of hidden and more than
    tap * hidden. NotImplementedError for 2^32 elements."""
    dims = check("tap", x=(x, "rows hidden", "float32"), taps=(taps, "rows width", "bfloat16"))
    rows, hidden, width = dims["rows"], dims["hidden"], dims["width"]
    if not hidden or width % hidden or not 0 <= tap < width // hidden:
        raise ValueError(f"tap: number {tap} of taps of {width} columns, x has {hidden}")
    if rows * width >= 2**32:
        raise NotImplementedError(f"tap: taps {taps.shape} has 2^32 elements or more")
    _tap.launch((cdiv(hidden, THREADS), rows), x, hidden, width, tap * hidden, taps, stream=stream)
