"""What joins the text in a round goes from the pass's rows to the drafter's: taps, position and
slot.

Entry j of request r, for j below accepted_counts[r], is the token of node n = accepted[r, j]:
  features[r, j] = taps[r * nodes + n],  position = prefix_len[r] + j,
  slot = page_table[r, position // page_size] * page_size + position % page_size
The j-th accepted node has depth j, so that this is its position in the text; it runs before
prefix_len moves on. Entries behind the count are padding: features 0, position and slot -1, which
draft_append leaves alone. status is 0, or 1 for a node outside the pass, 2 for a position without a
page; such an entry is padding too. One block an entry; a row's bits are copied.
"""

from engine.device import check, cuda, i32, i64, kernel, ptr, static_range, u16, u32, u64
from engine.ptx import (
    address,
    load_global_v4_or_zero,
    pdl_launch_dependents,
    pdl_wait,
    store_global_v4,
)

THREADS = 256
TURN = 4  # loads of a thread that are in flight together
NO_SUCH_NODE, NO_PAGE = 1, 2


@kernel(threads=THREADS, registers=48, dependent_launch=True)
def _draft_gather(
    taps: ptr[u16],  # [requests * nodes, width]
    accepted: ptr[i32],  # [requests, room]
    accepted_counts: ptr[i32],  # [requests]
    prefix_len: ptr[i32],  # [requests]
    page_table: ptr[i32],  # [requests, max_pages]
    nodes: u32,
    width: u32,
    room: u32,
    max_pages: u32,
    page_size: u32,
    features: ptr[u16],  # [requests, room, width], out
    position: ptr[i32],  # [requests, room], out
    slot: ptr[i64],  # [requests, room], out
    status: ptr[i32],  # [requests, room], out
):
    pdl_launch_dependents()
    pdl_wait()
    entry = u32(cuda.blockIdx.x)
    request, j = u32(entry // room), u32(entry % room)
    there = i32(j) < i32(accepted_counts[request])
    node = u32(accepted[entry])  # a negative one is a large one
    place = u32(u32(prefix_len[request]) + j)
    code = i32(0)
    target = i64(-1)
    if there:
        page = u32(place // page_size)
        number = i32(-1)
        if page < max_pages:
            number = i32(page_table[u32(u32(request * max_pages) + page)])
        if node >= nodes:
            code = i32(NO_SUCH_NODE)
        elif number < i32(0):
            code = i32(NO_PAGE)
        else:
            target = i64(u64(u64(u32(number)) * u64(page_size)) + u64(u32(place % page_size)))
    sound = target >= i64(0)
    i = u32(cuda.threadIdx.x)
    if i == u32(0):
        status[entry] = code
        slot[entry] = target
        position[entry] = i32(place) if sound else i32(-1)
    row = u32(u32(request * nodes) + node) if sound else u32(0)
    source = address(taps, u64(u64(row) * u64(width)))
    into = address(features, u64(u64(entry) * u64(width)))
    units = u32(width >> u32(3))
    end = units if sound else u32(0)
    while i < units:  # all loads of a turn before its stores, which no load may pass
        at = u64(u64(i) * u64(16))
        v = load_global_v4_or_zero(u64(source + at), u32(1) if i < end else u32(0))
        for n in static_range(1, TURN):
            there = u32(i + u32(n * THREADS)) < end
            from_here = u64(source + at + u64(16 * n * THREADS))
            v = v + load_global_v4_or_zero(from_here, u32(1) if there else u32(0))
        for n in static_range(TURN):
            if u32(i + u32(n * THREADS)) < units:
                store_global_v4(
                    u64(into + at + u64(16 * n * THREADS)),
                    v[4 * n],
                    v[4 * n + 1],
                    v[4 * n + 2],
                    v[4 * n + 3],
                )
        i = u32(i + u32(TURN * THREADS))


def draft_gather(
    taps, accepted, accepted_counts, prefix_len, page_table, *, page_size: int, features, position,
    slot, status, stream=None,
) -> None:  # fmt: skip
    """taps [requests * nodes, width] bf16; accepted [requests, room], accepted_counts, prefix_len
    [requests] and page_table [requests, max_pages] int32; features [requests, room, width] bf16;
    position, status int32 and slot int64 [requests, room]. A width that is no multiple of 8 and
    2^32 elements of page_table are NotImplementedError."""
    dims = check(
        "draft_gather",
        taps=(taps, "rows width", "bfloat16"),
        accepted=(accepted, "requests room", "int32"),
        accepted_counts=(accepted_counts, "requests", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        page_table=(page_table, "requests max_pages", "int32"),
        features=(features, "requests room width", "bfloat16"),
        position=(position, "requests room", "int32"),
        slot=(slot, "requests room", "int64"),
        status=(status, "requests room", "int32"),
    )
    rows, requests, room = dims["rows"], dims["requests"], dims["room"]
    if not requests or rows % requests:
        raise ValueError(
            f"draft_gather: taps has {rows} rows, expected as many for each of {requests} "
            "requests in accepted, at least one"
        )
    if dims["width"] % 8:
        raise NotImplementedError(f"draft_gather: a width of {dims['width']}, no multiple of 8")
    if page_size < 1:
        raise ValueError(f"draft_gather: page_size is {page_size}, expected 1 or more")
    if requests * dims["max_pages"] >= 2**32:
        raise NotImplementedError(
            f"draft_gather: page_table {page_table.shape} has 2^32 elements or more"
        )
    _draft_gather.launch(
        requests * room, taps, accepted, accepted_counts, prefix_len, page_table,
        rows // requests, dims["width"], room, dims["max_pages"], page_size, features, position,
        slot, status, stream=stream,
    )  # fmt: skip
