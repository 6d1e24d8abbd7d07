"""fp32 GEMM for FP32 models: y[m, n] = sum_k x[m, k] w[n, k] without tensor cores.

Every y is one chain of fused multiply-adds over ascending k, whatever the batch: a row's bits
depend on its own x, w and k alone. A block computes 16 tokens x 32 rows of w, a thread 4 x 4 of
them, with 32 columns of K at a time in shared memory.
"""

from engine.device import cdiv, check, cuda, f32, kernel, ptr, static_range, u32, u64
from engine.ptx import (
    advance,
    bits_to_f32,
    fma_outer,
    load_shared_v4,
    shared_address,
    zeros_f32,
)

TOKENS, ROWS, STEP_K = 16, 32, 32
STAGE_K = 128  # parts are whole multiples of this, as in gemm_bf16
THREADS = TOKENS * ROWS // 16
X_PITCH, W_PITCH = TOKENS + 4, ROWS + 4  # words; 16-byte rows, apart in the banks
TILES = (X_PITCH + W_PITCH) * STEP_K

_zeros, _outer = zeros_f32(16), fma_outer(4, 4)


@kernel(threads=THREADS, registers=192)
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
    tiles = cuda.shared.array(TILES, f32)  # x [k][token], then w [k][row]
    shared = shared_address(tiles, u32(0))
    thread = u32(cuda.threadIdx.x)
    first_token = u32(u32(cuda.blockIdx.x) * u32(TOKENS))
    first_row = u32(u32(cuda.blockIdx.y) * u32(ROWS))
    member = u32(u32(cuda.blockIdx.z) % batch)
    part = u32(u32(cuda.blockIdx.z) // batch)
    x_from = advance(x, u64(u64(member) * u64(x_width)))
    w_from = advance(w, u64(u64(member) * u64(u64(n) * u64(k))))
    my_token = u32(u32(thread & u32(3)) * u32(4))
    my_row = u32(u32(thread >> u32(2)) * u32(4))
    sums = _zeros()
    k0 = u32(part * part_columns)
    k_last = min(k, u32(k0 + part_columns))
    while k0 < k_last:
        column = u32(k0 + thread)
        for i in static_range(TOKENS):
            value = f32(0)
            if column < k_last and u32(first_token + u32(i)) < m:
                row = u64(u64(u32(first_token + u32(i))) * u64(u32(batch * x_width)))
                value = x_from[u64(row + u64(column))]
            tiles[u32(u32(thread * u32(X_PITCH)) + u32(i))] = value
        for i in static_range(ROWS):
            value = f32(0)
            if column < k_last and u32(first_row + u32(i)) < n:
                value = w_from[u64(u64(u64(u32(first_row + u32(i))) * u64(k)) + u64(column))]
            tiles[u32(u32(thread * u32(W_PITCH)) + u32(X_PITCH * STEP_K + i))] = value
        cuda.syncthreads()
        count = min(u32(STEP_K), u32(k_last - k0))
        a_from = u32(shared + u32(my_token * u32(4)))
        b_from = u32(shared + u32(u32(my_row * u32(4)) + u32(4 * X_PITCH * STEP_K)))
        j = u32(0)
        while j < count:
            a = load_shared_v4(u32(a_from + u32(j * u32(4 * X_PITCH))))
            b = load_shared_v4(u32(b_from + u32(j * u32(4 * W_PITCH))))
            a = (bits_to_f32(a[0]), bits_to_f32(a[1]), bits_to_f32(a[2]), bits_to_f32(a[3]))
            b = (bits_to_f32(b[0]), bits_to_f32(b[1]), bits_to_f32(b[2]), bits_to_f32(b[3]))
            sums = _outer(sums, a, b)
            j = u32(j + u32(1))
        cuda.syncthreads()
        k0 = u32(k0 + u32(STEP_K))
    for i in static_range(4):
        token = u32(u32(first_token + my_token) + u32(i))
        to = u64(u64(u64(part) * u64(m)) + u64(token))
        to = u64(u64(u64(to * u64(batch)) + u64(member)) * u64(y_width))
        for j in static_range(4):
            row = u32(u32(first_row + my_row) + u32(j))
            if token < m and row < n:
                y[u64(to + u64(row))] = sums[4 * i + j]


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
    part_columns = STAGE_K * cdiv(cdiv(k, STAGE_K), count)
    _gemm_f32.launch(
        (cdiv(m, TOKENS), cdiv(n, ROWS), batch * count),
        x, w, m, n, k, batch, x_width, y_width, part_columns, y, stream=stream,
    )  # fmt: skip
