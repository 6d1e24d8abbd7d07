"""Accepted rows of a window move to its front, in all layers of a paged latent cache.

Node n of request r lies at logical position prefix_len[r] + n, and position p in slot
page_table[r, p // page_size] * page_size + p % page_size of every layer. Row accepted[r, j] moves
to position prefix_len[r] + j: keys carry their rotation for prefix_len + depth already, and the
j-th accepted node has depth j. Rows are moved, never recomputed, so their bits stay.

Source and target rows overlap (accepted = 0, 2, 3 reads and writes row 2). A thread owns one piece
of a row, 16 bytes where rows allow it, in one layer and moves it down the whole list in order:
since accepted ascends, a row is read before it is written, and no two threads touch one byte.
Offsets are 64-bit. Requests must not share the pages of their windows.

status[r]: 0, or code + 16 * j for the lowest entry j of accepted at fault:
  1  count outside 0..max_accepted, or prefix_len negative (j = 0)
  2  accepted does not ascend from 0
  3  no page for the row, as a source or as a target
Nothing of such a request moves. new_prefix_len is prefix_len + count, or prefix_len.
"""

from engine import activation
from engine.device import cdiv, check, cuda, family, i32, kernel, ptr, static_range, u16, u32, u64
from engine.ptx import (
    address,
    load_global_u16,
    load_global_u32,
    load_global_v4,
    pdl_launch_dependents,
    pdl_wait,
    store_global_u16,
    store_global_u32,
    store_global_v4,
)

THREADS = 128
MAX_ROOM = 1025
AT_ONCE = 4  # rows that a thread has in flight
BAD_COUNT, NOT_ASCENDING, NO_PAGE = 1, 2, 3
ENTRY = 16  # a status is code + ENTRY * j
NONE = 0x7FFFFFFF
NO_SLOT = 0xFFFFFFFF


@family({"piece": 16}, {"piece": 4}, {"piece": 2})
def _cache_commit(*, piece: int):
    """piece: bytes that a thread moves at a time."""

    @kernel(threads=THREADS, registers=48, dependent_launch=True)
    def cache_commit(
        cache: ptr[u16],  # [layers, slots, pieces, piece / 2], in and out
        page_table: ptr[i32],  # [requests, max_pages]
        prefix_len: ptr[i32],  # [requests]
        accepted: ptr[i32],  # [requests, room]
        accepted_counts: ptr[i32],  # [requests]
        layers: u32,
        slots: u32,
        pieces: u32,
        max_pages: u32,
        room: u32,
        page_size: u32,
        new_prefix_len: ptr[i32],  # [requests], out
        status: ptr[i32],  # [requests], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        source = cuda.shared.array(MAX_ROOM, u32)  # slots
        target = cuda.shared.array(MAX_ROOM, u32)
        fault = cuda.shared.array(1, i32)
        start = cuda.shared.array(1, i32)  # the first entry that moves
        request = u32(cuda.blockIdx.y)
        thread = u32(cuda.threadIdx.x)
        count = i32(accepted_counts[request])
        prefix = i32(prefix_len[request])
        known = count >= i32(0) and count <= i32(room) and prefix >= i32(0)
        size = u32(count) if known else u32(0)
        if thread == u32(0):
            fault[0] = i32(NONE) if known else i32(BAD_COUNT)
            start[0] = i32(NONE)
        cuda.syncthreads()
        j = thread
        while j < room:
            node = i32(accepted[u32(u32(request * room) + j)])
            if j < size:
                before = i32(-1)
                if j > u32(0):
                    before = i32(accepted[u32(u32(u32(request * room) + j) - u32(1))])
                code = i32(0)
                if node <= before or (j == u32(0) and node != i32(0)):
                    code = i32(NOT_ASCENDING)
                for end in static_range(2):
                    place = u64(u64(u32(prefix)) + u64(u32(node) if end == 0 else j))
                    index = u64(place // u64(page_size))
                    slot = u64(NO_SLOT)
                    if index < u64(max_pages):
                        page = i32(page_table[u32(u32(request * max_pages) + u32(index))])
                        if page >= i32(0):
                            slot = u64(
                                u64(u64(page) * u64(page_size)) + u64(place % u64(page_size))
                            )
                    if slot >= u64(slots) and code == i32(0):
                        code = i32(NO_PAGE)
                    if end == 0:
                        source[j] = u32(slot)
                    else:
                        target[j] = u32(slot)
                if code != i32(0):
                    cuda.atomic.min(fault, 0, i32(code + i32(i32(j) * i32(ENTRY))))
                if node != i32(j):
                    cuda.atomic.min(start, 0, i32(j))
            j = u32(j + u32(THREADS))
        cuda.syncthreads()
        code = i32(fault[0])
        sound = code == i32(NONE)
        if cuda.blockIdx.x == 0 and thread == u32(0):
            new_prefix_len[request] = i32(prefix + count) if sound else prefix
            status[request] = i32(0) if sound else code

        mine = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + thread)
        first = i32(start[0])
        if not sound or first == i32(NONE) or mine >= u32(layers * pieces):
            return
        layer = u32(mine // pieces)
        at = u64(u64(mine % pieces) * u64(piece // 2))
        width = u64(u64(pieces) * u64(piece // 2))
        row = u64(u64(layer) * u64(slots))
        j = u32(first)
        words = cuda.local.array(4 * AT_ONCE, u32)
        while j < size:
            for i in static_range(AT_ONCE):
                if u32(j + u32(i)) < size:
                    slot = u64(u64(row + u64(source[u32(j + u32(i))])) * width)
                    place = address(cache, u64(slot + at))
                    if piece == 16:
                        a, b, c, d = load_global_v4(place)
                        words[4 * i] = a
                        words[4 * i + 1] = b
                        words[4 * i + 2] = c
                        words[4 * i + 3] = d
                    elif piece == 4:
                        words[4 * i] = load_global_u32(place)
                    else:
                        words[4 * i] = load_global_u16(place)
            for i in static_range(AT_ONCE):
                if u32(j + u32(i)) < size:
                    slot = u64(u64(row + u64(target[u32(j + u32(i))])) * width)
                    place = address(cache, u64(slot + at))
                    if piece == 16:
                        store_global_v4(
                            place,
                            words[4 * i],
                            words[4 * i + 1],
                            words[4 * i + 2],
                            words[4 * i + 3],
                        )
                    elif piece == 4:
                        store_global_u32(place, words[4 * i])
                    else:
                        store_global_u16(place, words[4 * i])
            j = u32(j + u32(AT_ONCE))

    return cache_commit


def cache_commit(
    page_table, prefix_len, accepted, accepted_counts, *, page_size: int, cache, new_prefix_len,
    status, stream=None,
) -> None:  # fmt: skip
    """cache [layers, slots, width] bf16 or fp32, changed in place; page_table int32
    [requests, max_pages], -1 where there is no page; prefix_len int32 [requests]; accepted int32
    [requests, max_accepted], node numbers ascending from 0, as greedy_accept makes them;
    accepted_counts, new_prefix_len and status int32 [requests]. max_accepted > 1025, 2^32 slots
    and 2^32 elements of page_table are NotImplementedError."""
    dims = check(
        "cache_commit",
        page_table=(page_table, "requests max_pages", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        accepted=(accepted, "requests room", "int32"),
        accepted_counts=(accepted_counts, "requests", "int32"),
        cache=(cache, "layers slots width", activation.ACTIVATIONS),
        new_prefix_len=(new_prefix_len, "requests", "int32"),
        status=(status, "requests", "int32"),
    )
    if page_size < 1 or dims["slots"] % page_size:
        raise ValueError(
            f"cache_commit: page_size is {page_size}, expected a divisor of {dims['slots']} (slots)"
        )
    if dims["room"] > MAX_ROOM:
        raise NotImplementedError(
            f"cache_commit: accepted has {dims['room']} columns, more than {MAX_ROOM}"
        )
    if dims["slots"] >= NO_SLOT:
        raise NotImplementedError(f"cache_commit: {dims['slots']} slots do not fit 32 bits")
    if dims["requests"] * dims["max_pages"] >= 2**32:
        raise NotImplementedError(
            f"cache_commit: page_table {page_table.shape} has 2^32 elements or more"
        )
    row_bytes = dims["width"] * (2 if activation.is_bf16(cache) else 4)
    piece = next(n for n in (16, 4, 2) if row_bytes % n == 0)
    pieces = row_bytes // piece
    if dims["layers"] * pieces >= 2**32:
        raise NotImplementedError(
            f"cache_commit: cache {cache.shape} has 2^32 pieces of {piece} bytes or more a slot"
        )
    _cache_commit(piece=piece).launch(
        (cdiv(dims["layers"] * pieces, THREADS), dims["requests"]), cache, page_table, prefix_len,
        accepted, accepted_counts, dims["layers"], dims["slots"], pieces, dims["max_pages"],
        dims["room"], page_size, new_prefix_len, status, stream=stream,
    )  # fmt: skip
