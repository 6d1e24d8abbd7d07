"""W4A16 GEMM: y[m, n] = sum_k x[m, k] W[n, k], W = RN_bf16(q s), fp32 accumulation.

q and s are the packed words and the scales of a checkpoint, as they are on disk (engine/int4.py
has the inner loop and the order of K). A block computes 32 rows of W for 8 or 16 tokens; its warps
take the slices of K, which are added through shared memory in ascending order. y is rounded once,
at the store. K is a compile-time constant: row strides are then immediates of the loads.

A row's bits depend on K alone: SLICES is one number for every M, and a token is a column of an mma.
"""

import numpy as np

from engine.device import cdiv, check, cuda, f32, family, kernel, ptr, static_range, u16, u32, u64
from engine.int4 import FRAGMENT, GROUP, add_slices, keep_slice, multiply_rows
from engine.ptx import (
    address,
    f32_to_bf16,
    f32_to_bits,
    pdl_launch_dependents,
    pdl_wait,
    shared_address,
    store_global_u16,
    store_global_u32,
)

SLICES = 8  # warps of a block
ROW_TILES = 2
ROWS = 16 * ROW_TILES
MAX_TOKENS = 256
KS = (32, 96, 128, 160, 192, 256, 384, 512, 1056, 2048, 7168, 18432)  # of tails, tiny, tiny2, K2.6


@family(*({"k": k, "columns": columns} for k in KS for columns in (1, 2)))
def _w4a16_gemm(*, k: int, columns: int):
    PAIRS = ROW_TILES * columns  # fragments of a warp
    PITCH = PAIRS * FRAGMENT  # bytes of a slice's sums
    SUMS = SLICES * PAIRS * 128
    multiply = multiply_rows(
        k=k,
        slices=SLICES,
        tiles=ROW_TILES,
        matrices=1,
        columns=columns,
        ahead=4 // columns,
        plain=True,
    )
    keep, add = keep_slice(PAIRS), add_slices(SLICES, PAIRS)

    @kernel(
        threads=32 * SLICES,
        blocks_per_sm=3 if columns == 1 else 2,
        registers=80 if columns == 1 else 128,
        dependent_launch=True,
        sass=("HMMA", "HFMA2", "LDG"),
    )
    def w4a16_gemm(
        x: ptr[u16],  # [m, k] bf16
        qw: ptr[u32],  # [n, k/8]
        sc: ptr[u16],  # [n, k/32] bf16
        m: u32,
        n: u32,
        y_is_f32: u32,
        y: ptr[u16],  # [m, n] bf16 or fp32, out
    ):
        sums_of = cuda.shared.array(SUMS, f32, alignment=16)
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        part = u32(thread >> u32(5))
        g = u32(lane >> u32(2))
        t = u32(lane & u32(3))
        first_row = u32(u32(cuda.blockIdx.x) * u32(ROWS))
        first_token = u32(u32(cuda.blockIdx.y) * u32(8 * columns))
        row = u64(u32(first_row + g))
        words = address(qw, u64(row * u64(k // 8)))
        scales = address(sc, u64(row * u64(k // GROUP)))
        pdl_wait()
        token = u32(min(u32(first_token + g), u32(m - u32(1))))  # the last one fills the tile
        x_0 = address(x, u64(u64(token) * u64(k)))
        token = u32(min(u32(first_token + u32(8) + g), u32(m - u32(1))))
        x_1 = address(x, u64(u64(token) * u64(k)))
        sums = multiply(words, scales, words, scales, x_0, x_1, part, t)
        pdl_launch_dependents()

        shared = u32(shared_address(sums_of, u32(0)))
        keep(u32(shared + u32(part * u32(PITCH)) + u32(lane * u32(16))), sums)
        cuda.syncthreads()
        if thread < u32(32 * PAIRS):
            total = add(u32(shared + u32(thread * u32(16))))
            pair = u32(thread >> u32(5))
            row = u32(first_row + u32(u32(pair // u32(columns)) * u32(16)) + g)
            token = u32(first_token + u32(u32(pair % u32(columns)) * u32(8)) + u32(t * u32(2)))
            for i in static_range(4):
                if u32(token + u32(i & 1)) < m:
                    at = u64(
                        u64(u32(token + u32(i & 1))) * u64(n) + u64(u32(row + u32(8 * (i >> 1))))
                    )
                    if y_is_f32 != u32(0):
                        store_global_u32(address(y, u64(at * u64(2))), f32_to_bits(total[i]))
                    else:
                        store_global_u16(address(y, at), f32_to_bf16(total[i]))

    return w4a16_gemm


def w4a16_gemm(x, qw, sc, *, y, stream=None) -> None:
    """y = x W^T with W = RN_bf16(q s).

    x [m, k] bf16; qw [n, k/8] int32 and sc [n, k/32] bf16 as in a pack-quantized checkpoint, with
    scales that are 0 or 2^-106 <= |s| < 2^14; y [m, n] bf16 or fp32. n and k are multiples of 32,
    m is at most 256 (NotImplementedError). A row's bits follow from k alone.
    """
    dims = check(
        "w4a16_gemm",
        x=(x, "m k", "bfloat16"),
        qw=(qw, "n words", "int32"),
        sc=(sc, "n groups", "bfloat16"),
        y=(y, "m n", ("bfloat16", "float32")),
    )
    m, n, k = dims["m"], dims["n"], dims["k"]
    if k % GROUP:
        raise ValueError(f"w4a16_gemm: x has {k} columns, expected a multiple of {GROUP}")
    if dims["words"] * 8 != k or dims["groups"] * GROUP != k:
        raise ValueError(
            f"w4a16_gemm: qw {tuple(qw.shape)} and sc {tuple(sc.shape)} "
            f"do not hold [{n}, {k}] weights in groups of {GROUP}"
        )
    if n % ROWS or m > MAX_TOKENS or k == 0:
        raise NotImplementedError(
            f"w4a16_gemm: n {n} must be a multiple of {ROWS}, "
            f"m {m} at most {MAX_TOKENS} and k {k} not 0"
        )
    columns = 1 if m <= 8 else 2
    _w4a16_gemm(k=k, columns=columns).launch(
        (n // ROWS, cdiv(m, 8 * columns)),
        x, qw, sc, m, n, y.dtype == np.float32, y, stream=stream,
    )  # fmt: skip
