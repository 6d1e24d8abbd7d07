"""fp32 GEMM for FP32 models: y[m, n] = sum_k x[m, k] w[n, k] without tensor cores.

Every y is one chain of fused multiply-adds over ascending k, whatever the batch: a row's bits
depend on its own x, w and k alone. A thread computes 4 tokens x 4 rows of w straight from global
memory: FP32 models are there to be exact, and small.
"""

from engine.device import cdiv, check, cuda, f32, function, kernel, ptr, static_range, u32, u64
from engine.ptx import address, fma_dot4, load_global_v4, pdl_launch_dependents, pdl_wait, zeros

TILE = 4  # tokens, and rows of w, of a thread
THREADS = 32
STAGE_K = 128  # parts are whole multiples of this, as in gemm_bf16

_no_sums, _dot4 = zeros(f32, TILE * TILE), fma_dot4(TILE, TILE)


@function
def _four(base, row, rows, pitch):
    """Addresses of rows row..row + 3; past the end the last one, whose sums nobody stores."""
    last = u32(rows - u32(1))
    return (
        u64(base + u64(u64(min(row, last)) * u64(pitch))),
        u64(base + u64(u64(min(u32(row + u32(1)), last)) * u64(pitch))),
        u64(base + u64(u64(min(u32(row + u32(2)), last)) * u64(pitch))),
        u64(base + u64(u64(min(u32(row + u32(3)), last)) * u64(pitch))),
    )


@function
def _sixteen(rows, skip):
    """Four f32, as bits, of each of four rows."""
    low = load_global_v4(u64(rows[0] + skip)) + load_global_v4(u64(rows[1] + skip))
    return low + load_global_v4(u64(rows[2] + skip)) + load_global_v4(u64(rows[3] + skip))


@kernel(threads=THREADS, registers=128, dependent_launch=True)
def _gemm_f32(
    x: ptr[f32],  # [m, batch, x_width]
    w: ptr[f32],  # [batch, n, k]
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    x_width: u32,
    y_width: u32,
    part_columns: u32,
    y: ptr[f32],  # [parts, m, batch, y_width], out
):
    pdl_launch_dependents()
    pdl_wait()
    first_token = u32(u32(cuda.blockIdx.x) * u32(TILE))
    lane_row = u32(u32(cuda.threadIdx.x) * u32(TILE))
    first_row = u32(u32(u32(cuda.blockIdx.y) * u32(THREADS * TILE)) + lane_row)
    member = u32(u32(cuda.blockIdx.z) % batch)
    part = u32(u32(cuda.blockIdx.z) // batch)
    column = u32(part * part_columns)
    last = min(k, u32(column + part_columns))
    if first_row < n:
        x_base = address(x, u64(u64(member) * u64(x_width)))
        x_rows = _four(x_base, first_token, m, u64(u64(4) * u64(batch) * u64(x_width)))
        w_base = address(w, u64(u64(member) * u64(u64(n) * u64(k))))
        w_rows = _four(w_base, first_row, n, u64(u64(4) * u64(k)))
        sums = _no_sums()
        while column < last:
            skip = u64(u64(column) * u64(4))
            sums = _dot4(sums, _sixteen(x_rows, skip), _sixteen(w_rows, skip))
            column = u32(column + u32(4))
        for i in static_range(TILE):
            token = u32(first_token + u32(i))
            to = u64(u64(u64(part) * u64(m)) + u64(token))
            to = u64(u64(u64(to * u64(batch)) + u64(member)) * u64(y_width))
            for j in static_range(TILE):
                row = u32(first_row + u32(j))
                if token < m and row < n:
                    y[u64(to + u64(row))] = sums[TILE * i + j]


def parts(n: int, k: int) -> int:
    """Ranges of K that are summed apart: one, since nothing about FP32 models is in a hurry."""
    return 1


def gemm_f32(x, w, *, y, stream=None) -> None:
    """y = x w^T, as engine.kernels.gemm_bf16.gemm_bf16 does in bf16.

    x [m, x_width >= k]; w [n, k]; y [m, y_width >= n], its first n columns are written. With a
    batch: x [m, batch, x_width], w [batch, n, k], y [m, batch, y_width]. All fp32.
    """
    batched = len(w.shape) == 3
    dims = check(
        "gemm_f32",
        x=(x, "m batch x_width" if batched else "m x_width", "float32"),
        w=(w, "batch n k" if batched else "n k", "float32"),
        y=(y, "m batch y_width" if batched else "m y_width", "float32"),
    )
    _launch(x, w, y, dims, 1, stream)


def gemm_f32_parts(x, w, *, parts: int, y, stream=None) -> None:
    """y[p] = x w^T over the p-th of `parts` ranges of K: engine.kernels.gemm_bf16.gemm_bf16_parts
    for x [m, x_width], w [n, k], y [parts, m, n] fp32."""
    dims = check(
        "gemm_f32_parts",
        x=(x, "m x_width", "float32"),
        w=(w, "n k", "float32"),
        y=(y, f"{parts} m n", "float32"),
    )
    stages = cdiv(dims["k"], STAGE_K)
    if not 1 <= parts <= stages or parts != cdiv(stages, cdiv(stages, parts)):
        raise ValueError(f"gemm_f32_parts: {parts} parts of {stages} stages of {STAGE_K} columns")
    _launch(x, w, y, dims, parts, stream)


def _launch(x, w, y, dims: dict[str, int], count: int, stream) -> None:
    m, n, k, batch = dims["m"], dims["n"], dims["k"], dims.get("batch", 1)
    x_width, y_width = dims["x_width"], dims.get("y_width", n)
    if x_width < k or y_width < n:
        raise ValueError(f"gemm_f32: x has {x_width} columns for k = {k}, y {y_width} for n = {n}")
    if k % 4 or x_width % 4:
        raise NotImplementedError(
            f"gemm_f32: k {k} and the width of x {x_width} must be multiples of 4"
        )
    part_columns = STAGE_K * cdiv(cdiv(k, STAGE_K), count)
    _gemm_f32.launch(
        (cdiv(m, TILE), cdiv(n, THREADS * TILE), batch * count),
        x, w, m, n, k, batch, x_width, y_width, part_columns, y, stream=stream,
    )  # fmt: skip
