"""Columns of several ranks side by side: whole[row] = part[0, row], part[1, row], ...

An all-gather leaves one block of memory a rank; what comes next reads whole rows. A copy, so exact.
One thread moves 16 bytes, or 4 where the rows of a part are no multiple of 16.
"""

import numpy as np

from engine.device import cdiv, check, cuda, family, kernel, ptr, u32, u64
from engine.ptx import address, load_global_v4, store_global_v4

THREADS = 256


@family({"wide": True}, {"wide": False})
def _join_columns(*, wide: bool):
    WORDS = 4 if wide else 1

    @kernel(threads=THREADS, registers=32)
    def join_columns(
        parts: ptr[u32],  # [ranks, rows, chunks of a part]
        ranks: u32,
        rows: u32,
        chunks: u32,  # of a row of a part
        total: u32,  # ranks * rows * chunks
        whole: ptr[u32],  # [rows, ranks, chunks], out
    ):
        at = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
        if at < total:
            chunk = u32(at % chunks)
            rank = u32(u32(at // chunks) % ranks)
            row = u32(u32(at // chunks) // ranks)
            source = u64(u64(u64(rank) * u64(rows) + u64(row)) * u64(chunks) + u64(chunk))
            if wide:
                four = load_global_v4(address(parts, u64(source * u64(WORDS))))
                to = address(whole, u64(u64(at) * u64(WORDS)))
                store_global_v4(to, four[0], four[1], four[2], four[3])
            else:
                whole[at] = parts[source]

    return join_columns


def join_columns(parts, *, whole, stream=None) -> None:
    """parts [ranks, rows, width] and whole [rows, ranks * width] of one dtype, bf16 or fp32. A row
    of a part is a multiple of 4 bytes (NotImplementedError); below 2^32 chunks."""
    dims = check(
        "join_columns",
        parts=(parts, "ranks rows width", ("bfloat16", "float32")),
        whole=(whole, "rows columns", str(parts.dtype)),
    )
    ranks, rows, width = dims["ranks"], dims["rows"], dims["width"]
    if dims["columns"] != ranks * width:
        raise ValueError(
            f"join_columns: whole has {dims['columns']} columns, expected {ranks} x {width}"
        )
    size = width * np.dtype(parts.dtype).itemsize
    if size % 4:
        raise NotImplementedError(f"join_columns: rows of {size} bytes, no multiple of 4")
    wide = size % 16 == 0
    chunks = size // 16 if wide else size // 4
    total = ranks * rows * chunks
    if total >= 2**32:
        raise NotImplementedError(f"join_columns: {total} chunks, below 2^32 work")
    _join_columns(wide=wide).launch(
        cdiv(total, THREADS), parts, ranks, rows, chunks, total, whole, stream=stream
    )
