"""Absorbed MLA attention of tree nodes over a paged latent cache, bit-equal to one-token decoding.

A row is a node of some request's window: node n of a request with a prefix of P tokens sees keys
0..P-1 and P + j for every bit j <= n of its ancestor row. Its keys are gathered in that order, so
that they stand at logical positions 0..L-1 exactly as if its path had been decoded one token at a
time; there is no mask to get wrong. Per head
  s_p = (q . key_p) scale,  o = sum_p exp(s_p - m) key_p[:rank] / sum_p exp(s_p - m)
with fp32 accumulators; the probabilities are rounded to the activation type before they meet the
values (the first `rank` columns of the keys), the divisor adds them unrounded.

Decomposition. 64 keys are a tile; L alone says how many splits (at most MAX_SPLITS) a row has
and where they end. A block takes one split of one row, all heads (they share the key list: one
M tile of the tensor core), and runs the online softmax over its tiles in order. The splits' (m, l,
unnormalised o) go to scratch in fp32 and a second kernel folds them in ascending order. A row's
bits follow from its query and its ordered list of keys: never from other rows, the number of rows,
where the prefix ends and the window starts, pages, or the request it belongs to.

A row past row_start[-1] and a row that sees no key give zeros. A node that the mask has no bit for,
or beyond MAX_WINDOW, gives NaN. Every visible position needs a page (slot_mapping reports those
without one).
"""

import math

from engine.device import (
    cdiv,
    check,
    cuda,
    f32,
    family,
    function,
    i32,
    kernel,
    ptr,
    shared_limit,
    static_range,
    u8,
    u16,
    u32,
    u64,
)  # fmt: skip
from engine.kernels.slot_mapping import request_of
from engine.ptx import (
    address,
    advance,
    bits_to_f32,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    exp2,
    f32_to_bits,
    fence_async,
    fma,
    has_wgmma,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_global_v4,
    matrix_descriptor,
    mma_bf16_slice,
    mma_bf16_tiles,
    pack_bf16x2,
    pdl_launch_dependents,
    pdl_wait,
    popc,
    scale_rows,
    shared_address,
    store_global_v2,
    store_global_v4,
    store_shared_u32,
    wgmma_bf16,
    zeros,
)  # fmt: skip
from engine.splits import (
    FOLD_THREADS,
    LOG2_E,
    MAX_SPLITS,
    NO_MAXIMUM,
    SPLIT_TILES,
    probability,
    splits_of,
)
from engine.warp import FULL

TILE = 64  # keys
MAX_WINDOW = 288  # a budget of 256 and the root need nine words of mask
NO_SLOT = 0xFFFFFFFF
CHUNK_BYTES = 128  # 64 bf16 columns: a row of a shared tile, swizzled in 16-byte units
SIMT_THREADS = 128
# Shared memory of an SM (sm_90, sm_100) and what a block of any kernel takes of it; registers of an
# SM. ptxas otherwise spills for the sake of more blocks an SM than either has room for.
SM_SHARED = 228 * 1024
BLOCK_SHARED = 1024
SM_REGISTERS = 64 * 1024
THREAD_REGISTERS = 128


@function
def _request_of(row_start, requests, row):
    """The request of a row; `requests` for padding."""
    request = request_of(row_start, requests, row)
    return requests if row >= u32(row_start[requests]) else request


@function
def _seen_word(ancestors, first_word, node, word):
    """Word `word` of the ancestor row at first_word, without bits above the node's own."""
    bits = u32(ancestors[u32(first_word + word)])
    if word == u32(node >> u32(5)):
        bits = u32(bits & u32(u32(u32(2) << u32(node & u32(31))) - u32(1)))
    return bits


@function
def _nodes_seen(ancestors, first_word, node, words):
    """How many window rows a node sees; 0 if the mask has no bit for it."""
    count = u32(0)
    if node < u32(words * u32(32)) and node < u32(MAX_WINDOW):
        word = u32(0)
        while word <= u32(node >> u32(5)):
            count = u32(count + popc(_seen_word(ancestors, first_word, node, word)))
            word = u32(word + u32(1))
    return count


@function
def _gather_path(path, ancestors, first_word, node, words, threads):
    """path[i] = i-th window row, ascending, that the node sees."""
    i = u32(cuda.threadIdx.x)
    while i <= node and i < u32(words * u32(32)) and i < u32(MAX_WINDOW):
        bits = _seen_word(ancestors, first_word, node, u32(i >> u32(5)))
        if u32(bits >> u32(i & u32(31))) & u32(1) != u32(0):
            below = u32(u32(u32(1) << u32(i & u32(31))) - u32(1))
            rank = popc(u32(bits & below))
            word = u32(0)
            while word < u32(i >> u32(5)):
                rank = u32(rank + popc(u32(ancestors[u32(first_word + word)])))
                word = u32(word + u32(1))
            path[rank] = i
        i = u32(i + u32(threads))


@function
def _slot_of(path, page_table, first_page, prefix, page_shift, at):
    """Cache slot of the key at logical position `at` of this row."""
    place = at
    if at >= prefix:
        place = u32(prefix + path[u32(at - prefix)])
    page = u32(page_table[u32(first_page + u32(place >> page_shift))])
    within = u32(place & u32(u32(u32(1) << page_shift) - u32(1)))
    return u32(u32(page << page_shift) + within)


@family(
    {"heads_tile": 64, "rank": 512, "rope": 64, "wgmma": True},
    {"heads_tile": 64, "rank": 512, "rope": 64},
    {"heads_tile": 32, "rank": 512, "rope": 64},
    {"heads_tile": 16, "rank": 512, "rope": 64},
    {"heads_tile": 64, "rank": 64, "rope": 16},
    {"heads_tile": 16, "rank": 64, "rope": 16},
    {"heads_tile": 16, "rank": 128, "rope": 32},
)
def _tree_verify_mla_bf16(*, heads_tile: int, rank: int, rope: int, wgmma: bool = False):
    WIDTH = rank + rope
    UNITS = WIDTH // 8  # 16 bytes each
    CHUNKS = cdiv(WIDTH, 64)
    ROW_WARPS = heads_tile // 16
    COLUMN_WARPS = 2 if heads_tile == 64 else 4  # each takes 64 / 4 keys, then rank / 4 columns
    THREADS = 32 * ROW_WARPS * COLUMN_WARPS
    ROWS_A_PASS = THREADS // 8  # rows that the block copies at once, 8 units of each
    KEYS_A_THREAD = TILE // ROWS_A_PASS
    KEY_TILES = TILE // COLUMN_WARPS // 8
    VALUE_TILES = rank // COLUMN_WARPS // 8
    Q_CHUNK = heads_tile * CHUNK_BYTES
    K_CHUNK = TILE * CHUNK_BYTES
    K_BYTES = CHUNKS * K_CHUNK
    K_AT = CHUNKS * Q_CHUNK
    P_AT = K_AT + 2 * K_BYTES
    MAX_AT = P_AT + heads_tile * CHUNK_BYTES
    PATH_AT = MAX_AT + COLUMN_WARPS * heads_tile * 4
    SHARED = PATH_AT + MAX_WINDOW * 4
    BLOCKS = min(SM_SHARED // (SHARED + BLOCK_SHARED), SM_REGISTERS // (THREADS * THREAD_REGISTERS))
    STEP = 4 if VALUE_TILES == 4 else 2  # value tiles of one product
    zero_scores, zero_sums = zeros(f32, 4 * KEY_TILES), zeros(f32, 4 * VALUE_TILES)
    qk = mma_bf16_tiles(1, KEY_TILES)
    pv = mma_bf16_slice(VALUE_TILES, STEP)
    rescale = scale_rows(VALUE_TILES)
    wait_for_tile = cp_async_wait(0)
    qk_tile = pv_tile = None
    if wgmma:  # 16 columns a step: 32 bytes of a chunk, four steps to a chunk
        steps = [
            (s // 4 * Q_CHUNK + s % 4 * 32, s // 4 * K_CHUNK + s % 4 * 32)
            for s in range(WIDTH // 16)
        ]
        qk_tile = wgmma_bf16(8 * KEY_TILES, steps, accumulate=False, transposed=False)
        steps = [(s * 32, s * 16 * CHUNK_BYTES) for s in range(TILE // 16)]
        pv_tile = wgmma_bf16(8 * VALUE_TILES, steps, accumulate=True, transposed=True)

    @function
    def slots_of_tile(
        slots, tile, copy_row, length, path, page_table, first_page, prefix, page_shift
    ):  # fmt: skip
        """Cache slots of the keys of a tile that this thread copies."""
        for i in static_range(KEYS_A_THREAD):
            at = u32(u32(tile << u32(6)) + u32(copy_row + u32(i * ROWS_A_PASS)))
            slots[i] = u32(NO_SLOT)
            if at < length:
                slots[i] = _slot_of(path, page_table, first_page, prefix, page_shift, at)

    @function
    def issue_copies(place, cache_from, unit, slots):
        """Start this thread's copies of a tile."""
        for i in static_range(KEYS_A_THREAD):
            taken = u32(16) if slots[i] != u32(NO_SLOT) else u32(0)
            slot = u64(slots[i]) if slots[i] != u32(NO_SLOT) else u64(0)
            source = u64(cache_from + u64(slot * u64(2 * WIDTH)))
            for c in static_range(CHUNKS):
                if u32(unit + u32(8 * c)) < u32(UNITS):
                    cp_async_16_zfill(
                        u32(place + u32(c * K_CHUNK + i * ROWS_A_PASS * CHUNK_BYTES)),
                        u64(source + u64(c * CHUNK_BYTES)),
                        taken,
                    )
        cp_async_commit()

    @kernel(
        threads=THREADS,
        blocks_per_sm=None if wgmma else BLOCKS,
        registers=255,
        dynamic_shared=SHARED,
        dependent_launch=True,
        sass=("HGMMA", "LDGSTS") if wgmma else ("HMMA", "LDSM", "LDGSTS"),
        archs=("sm_90a",) if wgmma else None,
    )
    def tree_verify_mla_bf16(
        q: ptr[u16],  # [rows, heads, WIDTH]
        cache: ptr[u16],  # [slots, WIDTH]
        page_table: ptr[i32],  # [requests, max_pages]
        row_start: ptr[i32],  # [requests + 1]
        prefix_len: ptr[i32],  # [requests]
        ancestors: ptr[u32],  # [rows, words]
        scale: f32,  # times log2 e
        requests: u32,
        max_pages: u32,
        page_shift: u32,
        words: u32,
        heads: u32,
        partial: ptr[f32],  # [rows, MAX_SPLITS, heads, rank], out
        stats: ptr[f32],  # [rows, MAX_SPLITS, heads, 2]: maximum and sum, out
    ):
        # No early start for the fold: its blocks would take the place of this kernel's last wave.
        shared = shared_address(cuda.shared.array(0, u8), u32(0))
        words_of_shared = cuda.shared.array(0, u32)
        floats_of_shared = cuda.shared.array(0, f32)
        path = words_of_shared[PATH_AT // 4 :]
        maxima = floats_of_shared[MAX_AT // 4 :]  # [COLUMN_WARPS, heads_tile]
        thread = u32(cuda.threadIdx.x)
        row, split = u32(cuda.blockIdx.x), u32(cuda.blockIdx.y)
        node, prefix = u32(0), u32(0)
        # Before the wait only what no kernel of the pass makes: the host copies row_start, and the
        # kernel that writes prefix_len ends a round, with a copy and the graph's end behind it.
        request = _request_of(row_start, requests, row)
        if request < requests:
            node = u32(row - u32(row_start[request]))
            prefix = u32(prefix_len[request])
        pdl_wait()
        if request >= requests:
            return
        first_word = u32(row * words)
        length = u32(prefix + _nodes_seen(ancestors, first_word, node, words))
        tiles = u32(u32(length + u32(TILE - 1)) >> u32(6))
        splits = splits_of(tiles)
        if split >= splits or tiles == u32(0):
            return
        first = u32(u32(split * tiles) // splits)
        last = u32(u32(u32(split + u32(1)) * tiles) // splits)
        _gather_path(path, ancestors, first_word, node, words, THREADS)
        cuda.syncthreads()

        # Copies: a thread moves unit `unit` of every chunk of rows copy_row, copy_row + 16 or 32..
        unit = u32(thread & u32(7))
        copy_row = u32(thread >> u32(3))
        swizzled = u32(u32(unit ^ u32(copy_row & u32(7))) << u32(4))
        copy_to = u32(u32(copy_row * u32(CHUNK_BYTES)) + swizzled)
        q_from = address(q, u64(u64(row) * u64(heads)) * u64(WIDTH) + u64(u32(unit * u32(8))))
        cache_from = address(cache, u64(u32(unit * u32(8))))
        for i in static_range(cdiv(heads_tile, ROWS_A_PASS)):
            head = u32(copy_row + u32(i * ROWS_A_PASS))
            if head < u32(heads_tile):
                taken = u32(16) if head < heads else u32(0)
                inside = head if head < heads else u32(0)
                source = u64(q_from + u64(u64(inside) * u64(2 * WIDTH)))
                for c in static_range(CHUNKS):
                    if u32(unit + u32(8 * c)) < u32(UNITS):
                        cp_async_16_zfill(
                            u32(shared + copy_to + u32(c * Q_CHUNK + i * ROWS_A_PASS * 128)),
                            u64(source + u64(c * CHUNK_BYTES)),
                            taken,
                        )

        # Fragments. A (queries, probabilities): lanes 0..15 address rows, 16..31 the next unit.
        lane, warp = u32(thread & u32(31)), u32(thread >> u32(5))
        row_warp = u32(warp & u32(ROW_WARPS - 1))
        column_warp = u32(warp // u32(ROW_WARPS))
        a_row = u32(u32(row_warp * u32(16)) + u32(lane & u32(15)))
        a_from = u32(shared + u32(a_row * u32(CHUNK_BYTES)))
        a_swizzle = u32(u32(u32(lane >> u32(4)) ^ u32(a_row & u32(7))) << u32(4))
        # B of QK: 16 keys x 16 columns.
        b_row = u32(u32(lane & u32(7)) + u32(u32(lane >> u32(4)) << u32(3)))
        b_row = u32(b_row + u32(column_warp * u32(TILE // COLUMN_WARPS)))
        b_swizzle = u32(u32(u32(u32(lane >> u32(3)) & u32(1)) ^ u32(b_row & u32(7))) << u32(4))
        # B of PV, transposed: 16 keys x 16 value columns.
        v_row = u32(lane & u32(15))
        v_tile = u32(column_warp * u32(VALUE_TILES))  # 8 in a chunk
        v_swizzle = u32(u32(u32(v_tile & u32(7)) + u32(lane >> u32(4))) ^ u32(v_row & u32(7)))
        v_swizzle = u32(v_swizzle << u32(4))
        v_from = u32(u32(u32(v_tile >> u32(3)) * u32(K_CHUNK)) + u32(v_row * u32(CHUNK_BYTES)))
        # Sums: a lane has two columns, `pair` and the next, of heads row0 and row0 + 8; what
        # is called row0_ belongs to the first head, row8_ to the second.
        row0 = u32(u32(row_warp * u32(16)) + u32(lane >> u32(2)))
        pair = u32(u32(lane & u32(3)) << u32(1))
        key_of_pair = u32(u32(column_warp * u32(TILE // COLUMN_WARPS)) + pair)

        sums = zero_sums()
        row0_max, row8_max = f32(NO_MAXIMUM), f32(NO_MAXIMUM)
        row0_sum, row8_sum = f32(0), f32(0)
        slots = cuda.local.array(KEYS_A_THREAD, u32)  # of this thread's keys in the next tile
        first_page = u32(request * max_pages)
        slots_of_tile(
            slots, first, copy_row, length, path, page_table, first_page, prefix, page_shift
        )  # fmt: skip
        tile = first
        while tile <= last:  # tile `tile` is fetched while the one before is used
            wait_for_tile()
            if wgmma:
                fence_async()
            cuda.syncthreads()
            place = u32(shared + copy_to + u32(u32(tile & u32(1)) * u32(K_BYTES)) + u32(K_AT))
            if not wgmma:
                if tile < last:
                    issue_copies(place, cache_from, unit, slots)
                    slots_of_tile(
                        slots, u32(tile + u32(1)), copy_row, length, path, page_table, first_page,
                        prefix, page_shift,
                    )  # fmt: skip
            if tile > first:
                keys = u32(shared + u32(u32(u32(tile - u32(1)) & u32(1)) * u32(K_BYTES)))
                keys = u32(keys + u32(K_AT))
                if wgmma:
                    its_keys = u32(keys + u32(column_warp * u32(8 * KEY_TILES * CHUNK_BYTES)))
                    scores = qk_tile(
                        matrix_descriptor(shared, u32(0), u32(8 * CHUNK_BYTES)),
                        matrix_descriptor(its_keys, u32(0), u32(8 * CHUNK_BYTES)),
                    )
                else:
                    scores = zero_scores()
                    b_from = u32(keys + u32(b_row * u32(CHUNK_BYTES)))
                    chunk = u32(0)
                    while chunk < u32(WIDTH // 64):
                        q_at = u32(a_from + u32(chunk * u32(Q_CHUNK)))
                        k_at = u32(b_from + u32(chunk * u32(K_CHUNK)))
                        for step in static_range(4):
                            at = u32(a_swizzle ^ u32(32 * step))
                            a = ldmatrix_x4(u32(q_at + at))
                            at = u32(b_swizzle ^ u32(32 * step))
                            b = ldmatrix_x4(u32(k_at + at))
                            for j in static_range(1, KEY_TILES // 2):
                                b = b + ldmatrix_x4(u32(k_at + at + u32(16 * j * CHUNK_BYTES)))
                            scores = qk(scores, a, b)
                        chunk = u32(chunk + u32(1))
                    for step in static_range(WIDTH % 64 // 16):
                        at = u32(a_swizzle ^ u32(32 * step))
                        a = ldmatrix_x4(u32(a_from + at + u32(WIDTH // 64 * Q_CHUNK)))
                        at = u32(b_swizzle ^ u32(32 * step))
                        at = u32(b_from + at + u32(WIDTH // 64 * K_CHUNK))
                        b = ldmatrix_x4(at)
                        for j in static_range(1, KEY_TILES // 2):
                            b = b + ldmatrix_x4(u32(at + u32(16 * j * CHUNK_BYTES)))
                        scores = qk(scores, a, b)

                # Maximum of each row over the tile: 4 lanes hold it, in each of the column warps.
                left = u32(length - u32(u32(tile - u32(1)) << u32(6)))  # keys of this tile
                row0_new, row8_new = row0_max, row8_max
                for j in static_range(KEY_TILES):
                    for e in static_range(2):
                        if u32(key_of_pair + u32(8 * j + e)) < left:
                            row0_new = max(row0_new, scores[4 * j + e])
                            row8_new = max(row8_new, scores[4 * j + 2 + e])
                for step in static_range(2):
                    row0_new = max(row0_new, cuda.shfl_xor_sync(FULL, row0_new, 1 << step))
                    row8_new = max(row8_new, cuda.shfl_xor_sync(FULL, row8_new, 1 << step))
                if pair == u32(0):
                    at = u32(u32(column_warp * u32(heads_tile)) + row0)
                    maxima[at] = row0_new
                    maxima[u32(at + u32(8))] = row8_new
                cuda.syncthreads()
                for j in static_range(COLUMN_WARPS):
                    row0_new = max(row0_new, maxima[u32(row0 + u32(j * heads_tile))])
                    row8_new = max(row8_new, maxima[u32(row0 + u32(j * heads_tile + 8))])
                row0_factor = exp2(f32(f32(row0_max - row0_new) * scale))
                row8_factor = exp2(f32(f32(row8_max - row8_new) * scale))
                row0_max, row8_max = row0_new, row8_new
                row0_sum, row8_sum = f32(row0_sum * row0_factor), f32(row8_sum * row8_factor)
                sums = rescale(sums, row0_factor, row8_factor)

                p_at = u32(shared + u32(row0 * u32(CHUNK_BYTES)) + u32(P_AT) + u32(pair << u32(1)))
                for j in static_range(KEY_TILES):
                    seen = u32(key_of_pair + u32(8 * j)) < left
                    seen_next = u32(key_of_pair + u32(8 * j + 1)) < left
                    row0_p = probability(scores[4 * j], row0_max, scale, seen)
                    row0_q = probability(scores[4 * j + 1], row0_max, scale, seen_next)
                    row8_p = probability(scores[4 * j + 2], row8_max, scale, seen)
                    row8_q = probability(scores[4 * j + 3], row8_max, scale, seen_next)
                    row0_sum = f32(row0_sum + f32(row0_p + row0_q))
                    row8_sum = f32(row8_sum + f32(row8_p + row8_q))
                    at = u32(u32(column_warp * u32(KEY_TILES)) + u32(j))
                    at = u32(u32(at ^ u32(row0 & u32(7))) << u32(4))
                    store_shared_u32(u32(p_at + at), pack_bf16x2(row0_p, row0_q))
                    at = u32(at + u32(8 * CHUNK_BYTES))
                    store_shared_u32(u32(p_at + at), pack_bf16x2(row8_p, row8_q))
                if wgmma:
                    fence_async()
                cuda.syncthreads()
            if wgmma:  # the fence of the probabilities would wait for these copies
                if tile < last:
                    issue_copies(place, cache_from, unit, slots)
                    slots_of_tile(
                        slots, u32(tile + u32(1)), copy_row, length, path, page_table, first_page,
                        prefix, page_shift,
                    )  # fmt: skip
            if tile > first:
                if wgmma:
                    its_values = u32(keys + u32(column_warp * u32(VALUE_TILES // 8 * K_CHUNK)))
                    sums = pv_tile(
                        sums,
                        matrix_descriptor(u32(shared + u32(P_AT)), u32(0), u32(8 * CHUNK_BYTES)),
                        matrix_descriptor(its_values, u32(K_CHUNK), u32(8 * CHUNK_BYTES)),
                    )
                else:
                    for step in static_range(TILE // 16):
                        at = u32(a_swizzle ^ u32(32 * step))
                        a = ldmatrix_x4(u32(a_from + at + u32(P_AT)))
                        v_at = u32(keys + v_from + u32(16 * step * CHUNK_BYTES))
                        for i in static_range(VALUE_TILES // STEP):
                            at = u32(v_at + u32(i * STEP // 8 * K_CHUNK))
                            b = ldmatrix_x4_trans(
                                u32(at + u32(v_swizzle ^ u32(16 * (i * STEP % 8))))
                            )
                            if STEP == 4:
                                b = b + ldmatrix_x4_trans(u32(at + u32(v_swizzle ^ u32(32))))
                            sums = pv(i, sums, a, b)
            tile = u32(tile + u32(1))

        # The split's result. Sums of a row: 4 lanes in each of the column warps, ascending.
        for step in static_range(2):
            row0_sum = f32(row0_sum + cuda.shfl_xor_sync(FULL, row0_sum, 1 << step))
            row8_sum = f32(row8_sum + cuda.shfl_xor_sync(FULL, row8_sum, 1 << step))
        cuda.syncthreads()
        if pair == u32(0):
            at = u32(u32(column_warp * u32(heads_tile)) + row0)
            maxima[at] = row0_sum
            maxima[u32(at + u32(8))] = row8_sum
        cuda.syncthreads()
        first_head = u64(u64(u64(row) * u64(MAX_SPLITS) + u64(split)) * u64(heads))
        if pair == u32(0) and column_warp == u32(0):
            for half in static_range(2):
                head = u32(row0 + u32(8 * half))
                if head < heads:
                    total = f32(0)
                    for j in static_range(COLUMN_WARPS):
                        total = f32(total + maxima[u32(head + u32(j * heads_tile))])
                    largest = row8_max if half == 1 else row0_max
                    store_global_v2(
                        address(stats, u64(u64(first_head + u64(head)) * u64(2))),
                        f32_to_bits(largest),
                        f32_to_bits(total),
                    )
        column = u32(u32(column_warp * u32(8 * VALUE_TILES)) + pair)
        for half in static_range(2):
            head = u32(row0 + u32(8 * half))
            if head < heads:
                into = address(partial, u64(u64(first_head + u64(head)) * u64(rank) + u64(column)))
                for j in static_range(VALUE_TILES):
                    store_global_v2(
                        u64(into + u64(32 * j)),
                        f32_to_bits(sums[4 * j + 2 * half]),
                        f32_to_bits(sums[4 * j + 2 * half + 1]),
                    )

    return tree_verify_mla_bf16


@kernel(threads=SIMT_THREADS, registers=96, dependent_launch=True)
def _tree_verify_mla_f32(
    q: ptr[f32],  # [rows, heads, width]
    cache: ptr[f32],  # [slots, width]
    page_table: ptr[i32],  # [requests, max_pages]
    row_start: ptr[i32],  # [requests + 1]
    prefix_len: ptr[i32],  # [requests]
    ancestors: ptr[u32],  # [rows, words]
    scale: f32,  # times log2 e
    requests: u32,
    max_pages: u32,
    page_shift: u32,
    words: u32,
    heads: u32,
    rank: u32,  # at most 4 SIMT_THREADS
    width: u32,  # a multiple of 8
    partial: ptr[f32],  # [rows, MAX_SPLITS, heads, rank], out
    stats: ptr[f32],  # [rows, MAX_SPLITS, heads, 2], out
):
    """One block a row, split and head: two threads share a key's score, a thread owns columns."""
    pdl_launch_dependents()
    pdl_wait()
    path = cuda.shared.array(MAX_WINDOW, u32)
    slots = cuda.shared.array(TILE, u32)
    halves = cuda.shared.array(SIMT_THREADS, f32)
    probabilities = cuda.shared.array(TILE, f32)
    sums = cuda.local.array(4, f32)
    thread = u32(cuda.threadIdx.x)
    row, split, head = u32(cuda.blockIdx.x), u32(cuda.blockIdx.y), u32(cuda.blockIdx.z)
    request = _request_of(row_start, requests, row)
    if request >= requests:
        return
    node = u32(row - u32(row_start[request]))
    prefix = u32(prefix_len[request])
    first_word = u32(row * words)
    length = u32(prefix + _nodes_seen(ancestors, first_word, node, words))
    tiles = u32(u32(length + u32(TILE - 1)) >> u32(6))
    splits = splits_of(tiles)
    if split >= splits or tiles == u32(0):
        return
    _gather_path(path, ancestors, first_word, node, words, SIMT_THREADS)
    query = advance(q, u64(u64(u64(row) * u64(heads) + u64(head)) * u64(width)))
    largest, total = f32(NO_MAXIMUM), f32(0)
    for i in static_range(4):
        sums[i] = f32(0)
    tile = u32(u32(split * tiles) // splits)
    last = u32(u32(u32(split + u32(1)) * tiles) // splits)
    key = u32(thread & u32(TILE - 1))
    while tile < last:
        at = u32(u32(tile << u32(6)) + key)
        left = u32(length - u32(tile << u32(6)))
        cuda.syncthreads()  # the path is there, and the last tile's slots are used up
        score = f32(0)
        if key < left:
            slot = _slot_of(path, page_table, u32(request * max_pages), prefix, page_shift, at)
            slots[key] = slot
            keys = advance(cache, u64(u64(slot) * u64(width)))
            half = u32(width >> u32(1))
            column = half if thread >= u32(TILE) else u32(0)
            end = u32(column + half)
            while column < end:
                k = load_global_v4(address(keys, column))
                of_q = load_global_v4(address(query, column))
                for i in static_range(4):
                    score = fma(bits_to_f32(of_q[i]), bits_to_f32(k[i]), score)
                column = u32(column + u32(4))
        halves[thread] = score
        cuda.syncthreads()
        before = largest
        i = u32(0)
        while i < min(left, u32(TILE)):
            largest = max(largest, f32(halves[i] + halves[u32(i + u32(TILE))]))
            i = u32(i + u32(1))
        factor = exp2(f32(f32(before - largest) * scale))
        if thread < u32(TILE):
            score = f32(halves[key] + halves[u32(key + u32(TILE))])
            p = exp2(f32(f32(score - largest) * scale))
            probabilities[key] = p if key < left else f32(0)
        cuda.syncthreads()
        total = f32(total * factor)
        for i in static_range(4):
            sums[i] = f32(sums[i] * factor)
        j = u32(0)
        while j < min(left, u32(TILE)):
            p = probabilities[j]
            total = f32(total + p)
            values = advance(cache, u64(u64(slots[j]) * u64(width)))
            for i in static_range(4):
                if u32(thread + u32(i * SIMT_THREADS)) < rank:
                    sums[i] = fma(p, values[u32(thread + u32(i * SIMT_THREADS))], sums[i])
            j = u32(j + u32(1))
        tile = u32(tile + u32(1))
    at = u64(u64(u64(u64(row) * u64(MAX_SPLITS) + u64(split)) * u64(heads)) + u64(head))
    if thread == u32(0):
        store_global_v2(address(stats, u64(at * u64(2))), f32_to_bits(largest), f32_to_bits(total))
    into = advance(partial, u64(at * u64(rank)))
    for i in static_range(4):
        if u32(thread + u32(i * SIMT_THREADS)) < rank:
            into[u32(thread + u32(i * SIMT_THREADS))] = sums[i]


@family({"bf16": True}, {"bf16": False})
def _fold(*, bf16: bool):
    o_type = u16 if bf16 else f32

    @kernel(threads=FOLD_THREADS, registers=64, dependent_launch=True)
    def fold(
        partial: ptr[f32],  # [rows, MAX_SPLITS, heads, rank]
        stats: ptr[f32],  # [rows, MAX_SPLITS, heads, 2]
        row_start: ptr[i32],  # [requests + 1]
        prefix_len: ptr[i32],  # [requests]
        ancestors: ptr[u32],  # [rows, words]
        scale: f32,  # times log2 e
        requests: u32,
        words: u32,
        heads: u32,
        rank: u32,  # a multiple of 4
        o: ptr[o_type],  # [rows, heads, rank], out
    ):
        """A thread folds the splits of four columns of one head, in ascending order."""
        pdl_launch_dependents()
        pdl_wait()
        row = u32(cuda.blockIdx.x)
        quad = u32(u32(u32(cuda.blockIdx.y) * u32(FOLD_THREADS)) + u32(cuda.threadIdx.x))
        quads = u32(rank >> u32(2))
        head = u32(quad // quads)
        if head >= heads:
            return
        result = cuda.local.array(4, f32)
        for i in static_range(4):
            result[i] = f32(0)
        request = _request_of(row_start, requests, row)
        if request < requests:
            node = u32(row - u32(row_start[request]))
            seen = _nodes_seen(ancestors, u32(row * words), node, words)
            tiles = u32(u32(u32(prefix_len[request]) + seen + u32(TILE - 1)) >> u32(6))
            splits = splits_of(tiles) if tiles > u32(0) else u32(0)
            here = u64(u64(u64(row) * u64(MAX_SPLITS)) * u64(heads) + u64(head))
            its_stats = advance(stats, u64(here * u64(2)))
            largest = f32(NO_MAXIMUM)
            split = u32(0)
            while split < splits:
                largest = max(largest, its_stats[u32(u32(split * heads) << u32(1))])
                split = u32(split + u32(1))
            total = f32(0)
            split = u32(0)
            while split < splits:
                at = u32(u32(split * heads) << u32(1))
                factor = exp2(f32(f32(its_stats[at] - largest) * scale))
                total = fma(factor, its_stats[u32(at + u32(1))], total)
                source = u64(u64(here + u64(u32(split * heads))) * u64(rank))
                source = u64(source + u64(u32(u32(quad % quads) << u32(2))))
                four = load_global_v4(address(partial, source))
                for i in static_range(4):
                    result[i] = fma(factor, bits_to_f32(four[i]), result[i])
                split = u32(split + u32(1))
            if splits > u32(0):
                for i in static_range(4):
                    result[i] = f32(result[i] / total)
            if node >= u32(words * u32(32)) or node >= u32(MAX_WINDOW):
                for i in static_range(4):
                    result[i] = bits_to_f32(u32(0x7FC00000))
        into = u64(u64(u64(row) * u64(heads) + u64(head)) * u64(rank))
        into = address(o, u64(into + u64(u32(u32(quad % quads) << u32(2)))))
        if bf16:
            store_global_v2(
                into, pack_bf16x2(result[0], result[1]), pack_bf16x2(result[2], result[3])
            )
        else:
            store_global_v4(
                into,
                f32_to_bits(result[0]), f32_to_bits(result[1]),
                f32_to_bits(result[2]), f32_to_bits(result[3]),
            )  # fmt: skip

    return fold


def tree_verify_mla(
    q,
    cache,
    page_table,
    row_start,
    prefix_len,
    ancestors,
    *,
    scale: float,
    page_size: int,
    o,
    partial,
    stats,
    stream=None,
) -> None:
    """`tree_verify_mla_heads` of all of a model's heads."""
    tree_verify_mla_heads(
        q, cache, page_table, row_start, prefix_len, ancestors, scale=scale, page_size=page_size,
        of_heads=q.shape[1], o=o, partial=partial, stats=stats, stream=stream,
    )  # fmt: skip


def tree_verify_mla_heads(
    q,
    cache,
    page_table,
    row_start,
    prefix_len,
    ancestors,
    *,
    scale: float,
    page_size: int,
    of_heads: int,
    o,
    partial,
    stats,
    stream=None,
) -> None:
    """q [rows, heads, rank + rope], cache [slots, rank + rope] (one layer), o [rows, heads, rank],
    all bf16 or all fp32; page_table [requests, max_pages], row_start [requests + 1] ascending from
    0, prefix_len [requests] int32; ancestors [rows, words] uint32: bit j of a node's row is set if
    j is the node or an ancestor of it, bits above the node's own are ignored. page_size is a power
    of two. Scratch in fp32: partial [rows, MAX_SPLITS, heads, rank], stats [.., heads, 2].

    The heads may be some of a model's `of_heads`: the bits are those of all of them together.
    Up to 64 of_heads, (rank, rope) of (512, 64), (128, 32) or (64, 16) in bf16.
    """
    act = str(q.dtype)
    dims = check(
        "tree_verify_mla",
        q=(q, "rows heads width", ("bfloat16", "float32")),
        cache=(cache, "slots width", act),
        page_table=(page_table, "requests max_pages", "int32"),
        row_start=(row_start, "bounds", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        ancestors=(ancestors, "rows words", "uint32"),
        o=(o, "rows heads rank", act),
        partial=(partial, f"rows {MAX_SPLITS} heads rank", "float32"),
        stats=(stats, f"rows {MAX_SPLITS} heads 2", "float32"),
    )
    requests, heads, rank, width = (dims[n] for n in ("requests", "heads", "rank", "width"))
    if dims["bounds"] != requests + 1:
        raise ValueError(
            f"tree_verify_mla: row_start has {dims['bounds']} entries, "
            f"expected {requests + 1} for {requests} requests"
        )
    if dims["slots"] >= NO_SLOT:
        raise NotImplementedError(f"tree_verify_mla: {dims['slots']} slots; below 2^32 - 1 work")
    for name, array in (("page_table", page_table), ("ancestors", ancestors)):
        if math.prod(array.shape) >= 2**32:
            raise NotImplementedError(
                f"tree_verify_mla: {name} {array.shape} has 2^32 elements or more"
            )
    if page_size < 1 or page_size & page_size - 1:
        raise ValueError(f"tree_verify_mla: page_size is {page_size}, expected a power of two")
    if not scale > 0:
        raise ValueError(f"tree_verify_mla: scale is {scale}, expected a positive number")
    log2_scale, page_shift = scale * LOG2_E, page_size.bit_length() - 1
    longest = cdiv(dims["max_pages"] * page_size, TILE)  # tiles that a page table can name
    splits = max(1, min(MAX_SPLITS, longest // SPLIT_TILES))
    if act == "float32":
        if rank > 4 * SIMT_THREADS or rank % 4 or width % 8 or width <= rank:
            raise NotImplementedError(f"tree_verify_mla: float32 with rank {rank}, width {width}")
        _tree_verify_mla_f32.launch(
            (dims["rows"], splits, heads), q, cache, page_table, row_start, prefix_len,
            ancestors, log2_scale, requests, dims["max_pages"], page_shift, dims["words"], heads,
            rank, width, partial, stats, stream=stream,
        )  # fmt: skip
    else:
        widths = (rank, width - rank)
        if not heads <= of_heads <= 64 or widths not in ((512, 64), (128, 32), (64, 16)):
            raise NotImplementedError(
                f"tree_verify_mla: {heads} of {of_heads} heads, rank {rank}, rope {width - rank} "
                "in bfloat16"
            )
        # Nothing says that wgmma adds up as mma.sync does, so the model's heads decide.
        variant = {"heads_tile": 16 if of_heads <= 16 else 32 if of_heads <= 32 else 64}
        if of_heads > 32 and rank == 512 and has_wgmma():
            variant["wgmma"] = True
        attention = _tree_verify_mla_bf16(**variant, rank=rank, rope=width - rank)
        if attention.dynamic_shared > shared_limit():
            raise NotImplementedError(
                f"tree_verify_mla: {of_heads} heads of rank {rank} need {attention.dynamic_shared} "
                f"B of shared memory a block, and this GPU has {shared_limit()}"
            )
        attention.launch(
            (dims["rows"], splits), q, cache, page_table, row_start, prefix_len, ancestors,
            log2_scale, requests, dims["max_pages"], page_shift, dims["words"], heads, partial,
            stats, stream=stream,
        )  # fmt: skip
    _fold(bf16=act != "float32").launch(
        (dims["rows"], cdiv(heads * rank // 4, FOLD_THREADS)), partial, stats, row_start,
        prefix_len, ancestors, log2_scale, requests, dims["words"], heads, rank, o, stream=stream,
    )  # fmt: skip
