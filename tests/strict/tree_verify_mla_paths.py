"""Launcher of specs/tree_verify_mla_paths.toml: tree attention twice, and how the bits compare."""

from engine.device import check, cuda, i32, kernel, ptr, u16, u32
from engine.kernels.tree_verify_mla import tree_verify_mla

THREADS = 128


@kernel(threads=THREADS, registers=32)
def _count_differences(
    o: ptr[u16],  # [rows, size], any 16-bit pieces
    twin_o: ptr[u16],  # [twins, size]
    twin_of: ptr[i32],  # [rows]
    size: u32,
    differs: ptr[i32],  # [rows], out
):
    found = cuda.shared.array(THREADS, i32)
    row, thread = u32(cuda.blockIdx.x), u32(cuda.threadIdx.x)
    count = i32(0)
    i = thread
    while i < size:
        here, there = u32(u32(row * size) + i), u32(u32(u32(twin_of[row]) * size) + i)
        if o[here] != twin_o[there]:
            count = i32(count + i32(1))
        i = u32(i + u32(THREADS))
    found[thread] = count
    cuda.syncthreads()
    if thread == u32(0):
        for j in range(1, THREADS):
            count = i32(count + found[u32(j)])
        differs[row] = count


def tree_verify_mla_paths(
    q, cache, page_table, row_start, prefix_len, ancestors, twin_q, twin_page_table,
    twin_row_start, twin_prefix_len, twin_ancestors, twin_of, *, scale: float, page_size: int,
    o, differs, partial, stats, twin_o, twin_partial, twin_stats, stream=None,
) -> None:  # fmt: skip
    """The tree into o, its twins into twin_o; differs [rows] int32 counts 16-bit pieces."""
    check(
        "tree_verify_mla_paths",
        o=(o, "rows heads rank", str(q.dtype)),
        differs=(differs, "rows", "int32"),
        twin_of=(twin_of, "rows", "int32"),
    )
    tree_verify_mla(
        q, cache, page_table, row_start, prefix_len, ancestors, scale=scale,
        page_size=page_size, o=o, partial=partial, stats=stats, stream=stream,
    )  # fmt: skip
    tree_verify_mla(
        twin_q, cache, twin_page_table, twin_row_start, twin_prefix_len, twin_ancestors,
        scale=scale, page_size=page_size, o=twin_o, partial=twin_partial, stats=twin_stats,
        stream=stream,
    )  # fmt: skip
    size = o.shape[1] * o.shape[2] * o.dtype.itemsize // 2
    _count_differences.launch(o.shape[0], o, twin_o, twin_of, size, differs, stream=stream)
