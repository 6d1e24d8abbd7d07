"""Attention of a drafter's block over its context and itself: grouped queries, no causal mask.

Slot i of request r, a row of q, sees prefix_len[r] context rows in the paged cache and all
`block_size` rows of its own block. Query head h reads key head h // (heads / groups):
  s_p = (q . k_p) scale,  o = sum_p exp(s_p - m) v_p / sum_p exp(s_p - m)
with fp32 accumulators; the probabilities are rounded to bf16 before they meet the values, the
divisor adds them unrounded. A row of cache and block is k of all key heads, then v of all key
heads.

Decomposition. The block_size * heads / groups queries that share a key head are the M rows of the
tensor core: one read of the keys serves 64 of them at the K2.5 drafter's shape. 32 keys are a tile,
fetched by cp.async while the one before is used. The number of keys alone says how many splits
(at most MAX_SPLITS) of tiles there are and where they end; the splits' (m, l, unnormalised o) go to
scratch in fp32 and a second kernel folds them in ascending order. So a row's bits follow from its
query and the ordered keys: never from other requests, pages, or the place of the row in the launch.
The context is at logical positions 0.., the block behind it; every context position needs a page.
"""

from engine.device import (
    cdiv,
    check,
    cuda,
    f32,
    family,
    i32,
    kernel,
    ptr,
    static_range,
    u8,
    u16,
    u32,
    u64,
)
from engine.ptx import (
    address,
    advance,
    bits_to_f32,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    exp2,
    f32_to_bits,
    fma,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_global_u32,
    load_global_v4,
    mma_bf16_slice,
    mma_bf16_tiles,
    pack_bf16x2,
    pdl_launch_dependents,
    pdl_wait,
    scale_rows,
    shared_address,
    store_global_v2,
    zeros,
)
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

TILE = 32  # keys
KEY_TILES = TILE // 8


@family(
    {"size": 128, "warps": 4},
    {"size": 32, "warps": 1},
    {"size": 16, "warps": 1},
)
def _draft_attention(*, size: int, warps: int):
    """size: columns of a head. warps: of a block, 16 queries each; no bit depends on them."""
    THREADS = 32 * warps
    UNITS = size // 8  # 16 bytes each
    SWIZZLE = min(UNITS, 8) - 1
    ROW_BYTES = 2 * size
    TILE_BYTES = TILE * ROW_BYTES
    COPIES = TILE * UNITS // THREADS  # 16-byte copies a thread, of keys and of values
    VALUE_TILES = size // 8
    STEPS = size // 16
    zero_scores, zero_sums = zeros(f32, 4 * KEY_TILES), zeros(f32, 4 * VALUE_TILES)
    qk = mma_bf16_tiles(1, KEY_TILES)
    pv = mma_bf16_slice(VALUE_TILES, 2)
    rescale = scale_rows(VALUE_TILES)
    wait_for_tile = cp_async_wait(0)

    @kernel(
        threads=THREADS,
        registers=255,
        dynamic_shared=4 * TILE_BYTES,  # keys and values of two tiles
        dependent_launch=True,
        sass=("HMMA", "LDSM", "LDGSTS"),
    )
    def draft_attention(
        q: ptr[u16],  # [requests * slots, heads, size]
        cache: ptr[u16],  # [cache slots, 2, groups, size]
        block: ptr[u16],  # [requests * slots, 2, groups, size]
        page_table: ptr[i32],  # [requests, max_pages]
        prefix_len: ptr[i32],  # [requests]
        scale: f32,  # times log2 e
        slots: u32,
        heads: u32,
        groups: u32,
        max_pages: u32,
        page_size: u32,
        partial: ptr[f32],  # [requests * slots, MAX_SPLITS, heads, size], out
        stats: ptr[f32],  # [requests * slots, MAX_SPLITS, heads, 2]: maximum and sum, out
    ):
        pdl_launch_dependents()
        pdl_wait()
        shared = shared_address(cuda.shared.array(0, u8), u32(0))
        thread = u32(cuda.threadIdx.x)
        lane, warp = u32(thread & u32(31)), u32(thread >> u32(5))
        split = u32(cuda.blockIdx.x)
        group = u32(u32(cuda.blockIdx.y) % groups)
        request = u32(u32(cuda.blockIdx.y) // groups)
        prefix = u32(prefix_len[request])
        length = u32(prefix + slots)
        tiles = u32(u32(length + u32(TILE - 1)) // u32(TILE))
        splits = splits_of(tiles)
        if split >= splits:
            return
        first = u32(u32(split * tiles) // splits)
        last = u32(u32(u32(split + u32(1)) * tiles) // splits)

        # Queries: row m of this key head is slot m // shared_by, head m % shared_by of the group.
        shared_by = u32(heads // groups)
        count = u32(slots * shared_by)
        row0 = u32(u32(u32(u32(cuda.blockIdx.z) * u32(warps)) + warp) * u32(16))
        row0 = u32(row0 + u32(lane >> u32(2)))
        pair = u32(u32(lane & u32(3)) << u32(1))
        queries = cuda.local.array(4 * STEPS, u32)
        for half in static_range(2):
            m = u32(row0 + u32(8 * half))
            inside = m < count
            m = m if inside else u32(0)
            row = u32(u32(request * slots) + u32(m // shared_by))
            head = u32(u32(group * shared_by) + u32(m % shared_by))
            source = u64(u64(u64(row) * u64(heads) + u64(head)) * u64(size) + u64(pair))
            for step in static_range(STEPS):
                for right in static_range(2):
                    word = load_global_u32(address(q, u64(source + u64(16 * step + 8 * right))))
                    queries[4 * step + 2 * right + half] = word if inside else u32(0)

        # Fragments of B. QK: 16 keys x 16 columns; PV, transposed: 16 keys x 16 value columns.
        k_row = u32(u32(lane & u32(7)) + u32(u32(lane >> u32(4)) << u32(3)))
        k_unit = u32(u32(lane >> u32(3)) & u32(1))
        v_row, v_unit = u32(lane & u32(15)), u32(lane >> u32(4))

        sums = zero_sums()
        row0_max, row8_max = f32(NO_MAXIMUM), f32(NO_MAXIMUM)
        row0_sum, row8_sum = f32(0), f32(0)
        width = u64(u32(groups * u32(2 * size)))
        tile = first
        while tile <= last:  # tile `tile` is fetched while the one before is used
            wait_for_tile()
            cuda.syncthreads()
            if tile < last:
                place = u32(shared + u32(u32(tile & u32(1)) * u32(2 * TILE_BYTES)))
                for i in static_range(COPIES):
                    key = u32(u32(thread + u32(i * THREADS)) // u32(UNITS))
                    unit = u32(u32(thread + u32(i * THREADS)) % u32(UNITS))
                    at = u32(u32(tile * u32(TILE)) + key)
                    taken = u32(16) if at < length else u32(0)
                    column = u64(u32(u32(group * u32(size)) + u32(unit * u32(8))))
                    source = address(block, column)
                    if at < prefix:
                        page = u32(page_table[u32(u32(request * max_pages) + u32(at // page_size))])
                        slot = u64(u64(page) * u64(page_size) + u64(u32(at % page_size)))
                        source = address(cache, u64(u64(slot * width) + column))
                    elif at < length:
                        own = u32(u32(request * slots) + u32(at - prefix))
                        source = address(block, u64(u64(u64(own) * width) + column))
                    to = u32(u32(unit ^ u32(key & u32(SWIZZLE))) << u32(4))
                    to = u32(place + u32(u32(key * u32(ROW_BYTES)) + to))
                    cp_async_16_zfill(to, source, taken)
                    values = u64(source + u64(width))  # half a row of 2-byte elements
                    cp_async_16_zfill(u32(to + u32(TILE_BYTES)), values, taken)
                cp_async_commit()
            if tile > first:
                before = u32(tile - u32(1))
                keys = u32(shared + u32(u32(before & u32(1)) * u32(2 * TILE_BYTES)))
                scores = zero_scores()
                for step in static_range(STEPS):
                    a = (
                        queries[4 * step],
                        queries[4 * step + 1],
                        queries[4 * step + 2],
                        queries[4 * step + 3],
                    )
                    unit = u32(u32(k_unit + u32(2 * step)) ^ u32(k_row & u32(SWIZZLE)))
                    at = u32(u32(k_row * u32(ROW_BYTES)) + u32(unit << u32(4)))
                    b = ldmatrix_x4(u32(keys + at))
                    for j in static_range(1, KEY_TILES // 2):
                        b = b + ldmatrix_x4(u32(keys + u32(at + u32(16 * j * ROW_BYTES))))
                    scores = qk(scores, a, b)
                left = u32(length - u32(before * u32(TILE)))  # keys of this tile
                row0_new, row8_new = row0_max, row8_max
                for j in static_range(KEY_TILES):
                    for e in static_range(2):
                        if u32(pair + u32(8 * j + e)) < left:
                            row0_new = max(row0_new, scores[4 * j + e])
                            row8_new = max(row8_new, scores[4 * j + 2 + e])
                for step in static_range(2):
                    row0_new = max(row0_new, cuda.shfl_xor_sync(FULL, row0_new, 1 << step))
                    row8_new = max(row8_new, cuda.shfl_xor_sync(FULL, row8_new, 1 << step))
                row0_factor = exp2(f32(f32(row0_max - row0_new) * scale))
                row8_factor = exp2(f32(f32(row8_max - row8_new) * scale))
                row0_max, row8_max = row0_new, row8_new
                row0_sum, row8_sum = f32(row0_sum * row0_factor), f32(row8_sum * row8_factor)
                sums = rescale(sums, row0_factor, row8_factor)
                packed = cuda.local.array(2 * KEY_TILES, u32)
                for j in static_range(KEY_TILES):
                    seen = u32(pair + u32(8 * j)) < left
                    seen_next = u32(pair + u32(8 * j + 1)) < left
                    row0_p = probability(scores[4 * j], row0_max, scale, seen)
                    row0_q = probability(scores[4 * j + 1], row0_max, scale, seen_next)
                    row8_p = probability(scores[4 * j + 2], row8_max, scale, seen)
                    row8_q = probability(scores[4 * j + 3], row8_max, scale, seen_next)
                    row0_sum = f32(row0_sum + f32(row0_p + row0_q))
                    row8_sum = f32(row8_sum + f32(row8_p + row8_q))
                    packed[2 * j] = pack_bf16x2(row0_p, row0_q)
                    packed[2 * j + 1] = pack_bf16x2(row8_p, row8_q)
                for step in static_range(TILE // 16):
                    a = (
                        packed[4 * step],
                        packed[4 * step + 1],
                        packed[4 * step + 2],
                        packed[4 * step + 3],
                    )
                    v_at = u32(u32(v_row + u32(16 * step)) * u32(ROW_BYTES))
                    v_at = u32(keys + u32(v_at + u32(TILE_BYTES)))
                    for i in static_range(VALUE_TILES // 2):
                        unit = u32(u32(v_unit + u32(2 * i)) ^ u32(v_row & u32(SWIZZLE)))
                        b = ldmatrix_x4_trans(u32(v_at + u32(unit << u32(4))))
                        sums = pv(i, sums, a, b)
            tile = u32(tile + u32(1))

        for step in static_range(2):
            row0_sum = f32(row0_sum + cuda.shfl_xor_sync(FULL, row0_sum, 1 << step))
            row8_sum = f32(row8_sum + cuda.shfl_xor_sync(FULL, row8_sum, 1 << step))
        for half in static_range(2):
            m = u32(row0 + u32(8 * half))
            if m < count:
                row = u32(u32(request * slots) + u32(m // shared_by))
                head = u32(u32(group * shared_by) + u32(m % shared_by))
                at = u64(u64(u64(row) * u64(MAX_SPLITS) + u64(split)) * u64(heads) + u64(head))
                if pair == u32(0):
                    largest = row8_max if half == 1 else row0_max
                    total = row8_sum if half == 1 else row0_sum
                    store_global_v2(
                        address(stats, u64(at * u64(2))), f32_to_bits(largest), f32_to_bits(total)
                    )
                into = address(partial, u64(u64(at * u64(size)) + u64(pair)))
                for j in static_range(VALUE_TILES):
                    store_global_v2(
                        u64(into + u64(32 * j)),
                        f32_to_bits(sums[4 * j + 2 * half]),
                        f32_to_bits(sums[4 * j + 2 * half + 1]),
                    )

    return draft_attention


@kernel(threads=FOLD_THREADS, registers=64, dependent_launch=True)
def _draft_fold(
    partial: ptr[f32],  # [requests * slots, MAX_SPLITS, heads, size]
    stats: ptr[f32],  # [requests * slots, MAX_SPLITS, heads, 2]
    prefix_len: ptr[i32],  # [requests]
    scale: f32,  # times log2 e
    slots: u32,
    heads: u32,
    size: u32,
    o: ptr[u16],  # [requests * slots, heads, size], out
):
    """A thread folds the splits of four columns of one head, in ascending order."""
    pdl_launch_dependents()
    pdl_wait()
    row = u32(cuda.blockIdx.x)
    quad = u32(u32(u32(cuda.blockIdx.y) * u32(FOLD_THREADS)) + u32(cuda.threadIdx.x))
    quads = u32(size >> u32(2))
    head = u32(quad // quads)
    if head >= heads:
        return
    length = u32(u32(prefix_len[u32(row // slots)]) + slots)
    splits = splits_of(u32(u32(length + u32(TILE - 1)) // u32(TILE)))
    here = u64(u64(u64(row) * u64(MAX_SPLITS)) * u64(heads) + u64(head))
    its_stats = advance(stats, u64(here * u64(2)))
    largest = f32(NO_MAXIMUM)
    split = u32(0)
    while split < splits:
        largest = max(largest, its_stats[u32(u32(split * heads) << u32(1))])
        split = u32(split + u32(1))
    result = cuda.local.array(4, f32)
    for i in static_range(4):
        result[i] = f32(0)
    total = f32(0)
    column = u64(u32(u32(quad % quads) << u32(2)))
    split = u32(0)
    while split < splits:
        at = u32(u32(split * heads) << u32(1))
        factor = exp2(f32(f32(its_stats[at] - largest) * scale))
        total = fma(factor, its_stats[u32(at + u32(1))], total)
        source = u64(u64(u64(here + u64(u32(split * heads))) * u64(size)) + column)
        four = load_global_v4(address(partial, source))
        for i in static_range(4):
            result[i] = fma(factor, bits_to_f32(four[i]), result[i])
        split = u32(split + u32(1))
    for i in static_range(4):
        result[i] = f32(result[i] / total)
    into = u64(u64(u64(row) * u64(heads) + u64(head)) * u64(size))
    store_global_v2(
        address(o, u64(into + column)),
        pack_bf16x2(result[0], result[1]),
        pack_bf16x2(result[2], result[3]),
    )


def draft_attention(
    q, cache, block, page_table, prefix_len, *, scale: float, page_size: int, o, partial, stats,
    stream=None,
) -> None:  # fmt: skip
    """q, o [requests * slots, heads, size], cache [cache slots, 2 groups size] (one layer) and
    block [requests * slots, 2 groups size], all bf16; page_table [requests, max_pages] and
    prefix_len [requests] int32. Scratch in fp32: partial [requests * slots, MAX_SPLITS, heads,
    size], stats [.., heads, 2]. Heads of 16, 32 or 128 columns and a page_table below 2^32
    elements, else NotImplementedError."""
    dims = check(
        "draft_attention",
        q=(q, "rows heads size", "bfloat16"),
        cache=(cache, "cached entry", "bfloat16"),
        block=(block, "rows entry", "bfloat16"),
        page_table=(page_table, "requests max_pages", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        o=(o, "rows heads size", "bfloat16"),
        partial=(partial, f"rows {MAX_SPLITS} heads size", "float32"),
        stats=(stats, f"rows {MAX_SPLITS} heads 2", "float32"),
    )
    requests, heads, size = dims["requests"], dims["heads"], dims["size"]
    if not requests or dims["rows"] % requests:
        raise ValueError(
            f"draft_attention: q has {dims['rows']} rows, expected as many for each of {requests} "
            "requests in prefix_len, at least one"
        )
    if size not in (16, 32, 128):
        raise NotImplementedError(f"draft_attention: q has heads of {size} columns")
    slots = dims["rows"] // requests
    groups, odd = divmod(dims["entry"], 2 * size)
    if odd or not groups or heads % groups:
        raise ValueError(
            f"draft_attention: q has {heads} heads of {size} columns and a row of block "
            f"{dims['entry']}, expected keys and values of heads that divide {heads}"
        )
    if page_size < 1:
        raise ValueError(f"draft_attention: page_size is {page_size}, expected 1 or more")
    if not scale > 0:
        raise ValueError(f"draft_attention: scale is {scale}, expected a positive number")
    if requests * dims["max_pages"] >= 2**32:
        raise NotImplementedError(
            f"draft_attention: page_table {page_table.shape} has 2^32 elements or more"
        )
    count, warps = slots * heads // groups, 4 if size == 128 else 1
    longest = cdiv(dims["max_pages"] * page_size + slots, TILE)  # tiles, for a full page table
    splits = max(1, min(MAX_SPLITS, longest // SPLIT_TILES))
    _draft_attention(size=size, warps=warps).launch(
        (splits, requests * groups, cdiv(count, 16 * warps)), q, cache, block, page_table,
        prefix_len, scale * LOG2_E, slots, heads, groups, dims["max_pages"], page_size, partial,
        stats, stream=stream,
    )  # fmt: skip
    _draft_fold.launch(
        (dims["rows"], cdiv(heads * size // 4, FOLD_THREADS)), partial, stats, prefix_len,
        scale * LOG2_E, slots, heads, size, o, stream=stream,
    )  # fmt: skip
