"""W4A16 GEMM: y[m, n] = sum_k x[m, k] W[n, k], W = RN_bf16(q s), fp32 accumulation.

q and s are the packed words and the scales of a checkpoint, as they are on disk (engine/int4.py
has the inner loop and the order of K). A block computes 32 or 48 rows of W for up to 64 tokens.
Its warps take the slices of K, which are added through shared memory in ascending order; y is
rounded once, at the store. K is a compile-time constant: row strides are then immediates of the
loads. `w4a16_gemm_many` first copies x into the order of the fragments; W is fetched meanwhile.

A row's bits depend on K alone: SLICES is one number for every M, and a token is a column of an mma.
"""

import numpy as np

from engine.device import cdiv, check, cuda, f32, family, kernel, ptr, static_range, u16, u32, u64
from engine.int4 import (
    FRAGMENT,
    GROUP,
    add_slices,
    keep_slice,
    multiply_rows,
    padded,
    permute_chunk,
)
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

SLICES = 8  # of K, a warp each
THREADS = 32 * SLICES
MAX_TOKENS = 256
KS = (32, 96, 128, 160, 192, 256, 384, 512, 1056, 2048, 7168, 18432)  # of tails, tiny, tiny2, K2.6
# (column tiles, row tiles) of a warp: blocks an SM, words of activations in flight
SHAPES = {
    (1, 2): (3, 4),
    (2, 2): (2, 2),
    (2, 3): (2, 2),
    (4, 2): (2, 1),
    (8, 2): (1, 1),
}


PERMUTED = {32: (2,), 96: (2, 8), 128: (2, 4), 160: (2,), 256: (8,)}
PERMUTED |= dict.fromkeys((384, 2048, 7168), (2, 4, 8))


@family(
    *({"k": k, "columns": c, "tiles": 2, "plain": True} for k in KS for c in (1, 2)),
    *(
        {"k": k, "columns": c, "tiles": 2, "plain": False}
        for k, columns in PERMUTED.items()
        for c in columns
    ),
    *({"k": k, "columns": 2, "tiles": 3, "plain": False} for k in (96, 384, 7168)),
)
def _w4a16_gemm(*, k: int, columns: int, tiles: int, plain: bool):
    FRAGMENTS = tiles * columns
    PITCH = FRAGMENTS * FRAGMENT  # bytes of a slice
    SUMS = SLICES * FRAGMENTS * FRAGMENT // 4
    X_ROW = k if plain else padded(k)
    BLOCKS_PER_SM, AHEAD = SHAPES[columns, tiles]
    multiply = multiply_rows(
        k=k,
        slices=SLICES,
        tiles=tiles,
        matrices=1,
        columns=columns,
        ahead=AHEAD,
        plain=plain,
        gathered=plain,
        early=True,
    )
    keep, add = keep_slice(FRAGMENTS), add_slices(SLICES, FRAGMENTS)

    @kernel(
        threads=THREADS,
        blocks_per_sm=BLOCKS_PER_SM,
        registers=min(255, 65536 // THREADS // BLOCKS_PER_SM),
        dynamic_shared=4 * SUMS,
        dependent_launch=True,
        sass=("HMMA", "HFMA2", "LDG"),
    )
    def w4a16_gemm(
        x: ptr[u16],  # [m, k] bf16; unless plain, x_permuted
        qw: ptr[u32],  # [n, k/8]
        sc: ptr[u16],  # [n, k/32] bf16
        m: u32,
        n: u32,
        y_is_f32: u32,
        y: ptr[u16],  # [m, n] bf16 or fp32, out
    ):
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        part = u32(thread >> u32(5))
        g = u32(lane >> u32(2))
        t = u32(lane & u32(3))
        first_row = u32(u32(cuda.blockIdx.x) * u32(16 * tiles))
        first_token = u32(u32(cuda.blockIdx.y) * u32(8 * columns))
        row = u64(u32(first_row + g))
        words = address(qw, u64(row * u64(k // 8)))
        scales = address(sc, u64(row * u64(k // GROUP)))
        token = u32(first_token + g)
        other = u32(token + u32(8))
        if plain:  # the last token fills the tile
            token = u32(min(token, u32(m - u32(1))))
            other = u32(min(other, u32(m - u32(1))))
        x_0 = address(x, u64(u64(token) * u64(X_ROW)))
        x_1 = address(x, u64(u64(other) * u64(X_ROW)))
        sums = multiply(words, scales, words, scales, x_0, x_1, part, t)

        sums_of = cuda.shared.array(0, f32)
        shared = u32(u32(shared_address(sums_of, u32(0))) + u32(lane * u32(16)))
        keep(u32(shared + u32(part * u32(PITCH))), sums)
        cuda.syncthreads()
        for turn in static_range(cdiv(FRAGMENTS, SLICES)):
            pair = u32(part + u32(turn * SLICES))
            if pair < u32(FRAGMENTS):
                total = add(u32(shared + u32(pair * u32(FRAGMENT))))
                token = u32(u32(u32(pair % u32(columns)) * u32(8)) + u32(t * u32(2)))
                row = u64(u32(first_row + u32(u32(pair // u32(columns)) * u32(16)) + g))
                for i in static_range(4):
                    to = u32(first_token + token + u32(i & 1))
                    if to < m:
                        at = u64(u64(to) * u64(n) + row + u64(8 * (i >> 1)))
                        if y_is_f32 != u32(0):
                            store_global_u32(address(y, u64(at * u64(2))), f32_to_bits(total[i]))
                        else:
                            store_global_u16(address(y, at), f32_to_bf16(total[i]))

    return w4a16_gemm


@kernel(threads=THREADS, registers=40, dependent_launch=True)
def _permute(
    x: ptr[u16],  # [rows, 32 groups] bf16
    rows: u32,
    groups: u32,
    chunks: u32,  # of x_permuted
    x_permuted: ptr[u16],  # out
):
    pdl_wait()
    pdl_launch_dependents()
    chunk = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if chunk < chunks:
        permute_chunk(x, rows, groups, x_permuted, chunk)


def w4a16_gemm(x, qw, sc, *, y, stream=None) -> None:
    """y = x W^T with W = RN_bf16(q s). For few rows: W is read once for every 16 of x.

    x [m, k] bf16; qw [n, k/8] int32 and sc [n, k/32] bf16 as in a pack-quantized checkpoint, with
    scales that are 0 or 2^-106 <= |s| < 2^14; y [m, n] bf16 or fp32. n and k are multiples of 32,
    m is at most 256 (NotImplementedError). A row's bits follow from k alone.
    """
    m, n, k = _check("w4a16_gemm", x, qw, sc, y)
    columns = min(_columns(m), 2)
    _w4a16_gemm(k=k, columns=columns, tiles=2, plain=True).launch(
        (n // 32, cdiv(m, 8 * columns)),
        x, qw, sc, m, n, y.dtype == np.float32, y, stream=stream,
    )  # fmt: skip


def w4a16_gemm_many(x, qw, sc, *, x_permuted, y, stream=None) -> None:
    """`w4a16_gemm`, the same bits, for many rows: W is read once for every 64 of x.

    x_permuted: scratch as `scratch_shapes` says. Up to 8 rows it is not used.
    """
    m, n, k = _check("w4a16_gemm_many", x, qw, sc, y)
    ((tokens, width), _) = scratch_shapes(m=m, k=k)["x_permuted"]
    check("w4a16_gemm_many", x_permuted=(x_permuted, f"{tokens} {width}", "bfloat16"))
    columns = _columns(m)
    if columns == 1:
        w4a16_gemm(x, qw, sc, y=y, stream=stream)
        return
    chunks = tokens * width // 8
    _permute.launch(cdiv(chunks, THREADS), x, m, k // GROUP, chunks, x_permuted, stream=stream)
    tiles = 3 if (columns, 3) in SHAPES and n % 48 == 0 else 2
    _w4a16_gemm(k=k, columns=columns, tiles=tiles, plain=False).launch(
        (n // (16 * tiles), cdiv(m, 8 * columns)),
        x_permuted, qw, sc, m, n, y.dtype == np.float32, y, stream=stream,
    )  # fmt: skip


def scratch_shapes(*, m: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype name of each scratch array of `w4a16_gemm_many`."""
    tokens = 8 * _columns(m)
    return {"x_permuted": ((tokens * cdiv(m, tokens), padded(k)), "bfloat16")}


def _columns(m: int) -> int:
    return next((c for c in (1, 2, 4) if m <= 8 * c), 8)


def _check(op: str, x, qw, sc, y) -> tuple[int, int, int]:
    dims = check(
        op,
        x=(x, "m k", "bfloat16"),
        qw=(qw, "n words", "int32"),
        sc=(sc, "n groups", "bfloat16"),
        y=(y, "m n", ("bfloat16", "float32")),
    )
    m, n, k = dims["m"], dims["n"], dims["k"]
    if k % GROUP:
        raise ValueError(f"{op}: x has {k} columns, expected a multiple of {GROUP}")
    if dims["words"] * 8 != k or dims["groups"] * GROUP != k:
        raise ValueError(
            f"{op}: qw {tuple(qw.shape)} and sc {tuple(sc.shape)} "
            f"do not hold [{n}, {k}] weights in groups of {GROUP}"
        )
    if n % 32 or m > MAX_TOKENS or k == 0:
        raise NotImplementedError(
            f"{op}: n {n} must be a multiple of 32, m {m} at most {MAX_TOKENS} and k {k} not 0"
        )
    return m, n, k
