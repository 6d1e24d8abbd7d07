"""Where the rows of a batch of windows live: RoPE position and cache slot of each.

Row j is node i = j - row_start[r] of request r, whose prefix has prefix_len[r] tokens. Its position
is prefix_len[r] + depth[j] (siblings share one); its logical place in the cache is
p = prefix_len[r] + i and its slot page_table[r, p // page_size] * page_size + p % page_size, in 64
bits. status[j] is 0, or 1 where the page table has no page for p; the slot is -1 then. A row behind
row_start[-1] is nobody's: position 0, slot -1 and status 0. A thread a row.
"""

from engine.device import cdiv, check, cuda, function, i32, i64, kernel, ptr, u32
from engine.ptx import pdl_launch_dependents, pdl_wait

THREADS = 64
NO_PAGE = 1


@function
def request_of(row_start, requests, row):
    """The request of a row: the last that starts at or before it."""
    low, high = u32(0), requests
    while u32(low + u32(1)) < high:
        middle = u32(u32(low + high) >> u32(1))
        if u32(row_start[middle]) <= row:
            low = middle
        else:
            high = middle
    return low


@kernel(threads=THREADS, registers=32, dependent_launch=True)
def _slot_mapping(
    row_start: ptr[i32],  # [requests + 1]
    prefix_len: ptr[i32],  # [requests]
    depth: ptr[i32],  # [rows]
    page_table: ptr[i32],  # [requests, max_pages]
    rows: u32,
    requests: u32,
    max_pages: u32,
    page_size: u32,
    position: ptr[i32],  # [rows], out
    slot: ptr[i64],  # [rows], out
    status: ptr[i32],  # [rows], out
):
    pdl_launch_dependents()
    pdl_wait()
    row = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if row < rows:
        request = request_of(row_start, requests, row)
        prefix = u32(prefix_len[request])
        place = u32(prefix + u32(row - u32(row_start[request])))
        page_index = u32(place // page_size)
        page = i32(-1)
        if page_index < max_pages:
            page = page_table[u32(u32(request * max_pages) + page_index)]
        position[row] = i32(prefix + u32(depth[row]))
        if row >= u32(row_start[requests]):
            position[row] = i32(0)
            slot[row] = i64(-1)
            status[row] = i32(0)
        elif page >= i32(0):
            slot[row] = i64(i64(i64(page) * i64(page_size)) + i64(place % page_size))
            status[row] = i32(0)
        else:
            slot[row] = i64(-1)
            status[row] = i32(NO_PAGE)


def slot_mapping(
    row_start, prefix_len, depth, page_table, *, page_size: int, position, slot, status, stream=None
) -> None:
    """row_start [requests + 1] int32, ascending from 0; prefix_len [requests], depth [rows],
    page_table [requests, max_pages] int32, -1 where there is no page; position [rows] int32,
    slot [rows] int64, status [rows] int32."""
    dims = check(
        "slot_mapping",
        row_start=(row_start, "bounds", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        depth=(depth, "rows", "int32"),
        page_table=(page_table, "requests max_pages", "int32"),
        position=(position, "rows", "int32"),
        slot=(slot, "rows", "int64"),
        status=(status, "rows", "int32"),
    )
    if dims["bounds"] != dims["requests"] + 1:
        raise ValueError(
            f"slot_mapping: row_start has {dims['bounds']} entries, "
            f"expected {dims['requests'] + 1} for {dims['requests']} requests"
        )
    if page_size < 1:
        raise ValueError(f"slot_mapping: page_size is {page_size}, expected 1 or more")
    if dims["requests"] * dims["max_pages"] >= 2**32:
        raise NotImplementedError(
            f"slot_mapping: page_table {page_table.shape} has 2^32 elements or more"
        )
    _slot_mapping.launch(
        cdiv(dims["rows"], THREADS), row_start, prefix_len, depth, page_table, dims["rows"],
        dims["requests"], dims["max_pages"], page_size, position, slot, status, stream=stream,
    )  # fmt: skip
