"""W4A16 GEMM: y[m, n] = sum_k x[m, k] W[n, k], W = RN_bf16(q s), fp32 accumulation.

q and s are the packed words and the scales of a checkpoint, as they are on disk (engine/int4.py
has the order of K). Slices 2 q and 2 q + 1 are the even and the odd blocks of quarter q of K, so
that the two halves of a 128-byte line are fetched together; slices are added in ascending order and
y is rounded once, at the store. K is a compile-time constant: strides are then immediates.

* `_w4a16_gemm`, mma.sync: a block computes 16 to 64 rows of W for up to 64 tokens, a warp a slice.
* `_w4a16_wgmma`, Hopper, more than 16 rows of x: a warpgroup computes 64 rows of W for up to 64
  tokens, dequantised in its registers; the tokens come through a ring in shared memory, in the
  layout that `_permute_tiles` gives them. With many rows of W a block is two warpgroups that sum
  all slices; up to 64 tokens, the blocks of a last wave that is not full are cut in four quarters
  of K each, which `_add_parts` adds. With few rows it is four warpgroups, a quarter of K each.

A row's bits depend on K alone: SLICES is one number for every M, and a token is a column of an mma.
wgmma adds sixteen products at a time as mma.sync does: the bits are the same on an H200, which
specs/w4a16_gemm_rows.toml checks.
"""

import numpy as np

from engine.device import (
    cdiv,
    check,
    cuda,
    f32,
    family,
    function,
    kernel,
    ptr,
    static_range,
    u16,
    u32,
    u64,
)
from engine.int4 import (
    BLOCK,
    FRAGMENT,
    GROUP,
    UNSCALE,
    add_slices,
    dense_rows,
    keep_slice,
    padded,
    permute_chunk,
)
from engine.ptx import (
    add_f32,
    address,
    bits_to_f32,
    copy_bulk,
    f32_to_bf16,
    f32_to_bits,
    has_wgmma,
    int4_factors,
    load_global_v2,
    load_global_v4,
    load_rows,
    load_rows_u16,
    load_shared_v2,
    load_shared_v4,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    pack_bf16x2,
    pdl_launch_dependents,
    pdl_wait,
    prmt,
    shared_address,
    store_global_u16,
    store_global_u32,
    store_global_v2,
    store_shared_u32,
    wgmma_int4,
    zeros,
)

SLICES = 8  # of K, a warp each
THREADS = 32 * SLICES
MAX_TOKENS = 256
RESIDENT = 264  # blocks of 128 rows of W that an H200 holds at once, two an SM
KS = (32, 96, 128, 160, 192, 256, 384, 512, 1056, 2048, 7168, 18432)  # of tails, tiny, tiny2, K2.6
# (column tiles, row tiles) of a warp: blocks an SM, words of activations in flight
SHAPES = {
    (1, 1): (4, 4),
    (1, 2): (3, 4),
    (2, 2): (2, 2),
    (2, 3): (2, 2),
    (2, 4): (1, 2),
    (4, 2): (1, 1),
    (8, 2): (1, 1),
}
TALL = {2048: 4}  # K: row tiles of 9 to 16 tokens, where reading x is what takes long
PERMUTED = (96, 128, 192, 256, 384, 512, 2048, 7168)  # K of more than 16 tokens without wgmma


@function
def _store_fragment(y, y_is_f32, m, n, token, row, total):
    """A lane's four results of a fragment: tokens `token` and the next, rows `row` and row + 8."""
    for i in static_range(4):
        to = u32(token + u32(i & 1))
        if to < m:
            at = u64(u64(to) * u64(n) + row + u64(8 * (i >> 1)))
            if y_is_f32 != u32(0):
                store_global_u32(address(y, u64(at * u64(2))), f32_to_bits(total[i]))
            else:
                store_global_u16(address(y, at), f32_to_bf16(total[i]))


@family(
    *({"k": k, "columns": c, "tiles": c, "k_order": True} for k in KS for c in (1, 2)),
    *({"k": k, "columns": c, "tiles": 2, "k_order": False} for k in PERMUTED for c in (4, 8)),
    *({"k": k, "columns": 2, "tiles": t, "k_order": True} for k, t in TALL.items()),
    *({"k": 7168, "columns": 1, "tiles": 2, "k_order": o} for o in (True, False)),
    *({"k": k, "columns": 2, "tiles": 3, "k_order": False} for k in (96, 7168)),
)
def _w4a16_gemm(*, k: int, columns: int, tiles: int, k_order: bool):
    FRAGMENTS = tiles * columns
    PITCH = FRAGMENTS * FRAGMENT  # bytes of a slice
    SUMS = SLICES * FRAGMENTS * FRAGMENT // 4
    X_ROW = k if k_order else padded(k)
    X_TILES = columns if k_order else 1  # whose addresses differ by more than a number of rows
    BLOCKS_PER_SM, AHEAD = SHAPES[columns, tiles]
    multiply = dense_rows(
        k=k, slices=SLICES, tiles=tiles, columns=columns, ahead=AHEAD, k_order=k_order
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
        x: ptr[u16],  # [m, k] bf16; unless k_order, x_permuted
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
        if k_order:  # the last token fills the tile
            token = u32(min(token, u32(m - u32(1))))
            other = u32(min(other, u32(m - u32(1))))
        x_0 = address(x, u64(u64(token) * u64(X_ROW)))
        x_1 = address(x, u64(u64(other) * u64(X_ROW)))
        sums = multiply((words,), (scales,), (x_0, x_1)[:X_TILES], part, t)

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
                _store_fragment(y, y_is_f32, m, n, u32(first_token + token), row, total)

    return w4a16_gemm


@family(
    *({"k": k, "tokens": 32, "ranges": 4} for k in PERMUTED),
    *({"k": k, "tokens": 64, "ranges": 4} for k in (96, 2048)),
    *({"k": k, "tokens": 32, "ranges": 1} for k in (128, 7168)),
    {"k": 7168, "tokens": 64, "ranges": 1},
)
def _w4a16_wgmma(*, k: int, tokens: int, ranges: int):
    GROUPS, BLOCKS = k // GROUP, cdiv(k, BLOCK)
    QUARTER = 2 * cdiv(BLOCKS, SLICES)  # blocks
    TURNS = 4 // ranges * QUARTER  # blocks of a warpgroup
    WARPGROUPS = 2 if ranges == 1 else 1  # that share a range, of 64 rows each
    ROWS, GROUP_THREADS = 64 * WARPGROUPS, 128 * WARPGROUPS
    BLOCK_THREADS = GROUP_THREADS * ranges
    # Each range has a ring of stages: so many blocks of all tokens, as `_permute_tiles` lays them.
    BLOCK_BYTES = 2 * BLOCK * tokens
    STAGE = max(1, (64 if ranges == 1 else 32) // tokens)  # blocks
    STAGE_BYTES = STAGE * BLOCK_BYTES
    RING = 3 if ranges * tokens > 128 else 4
    SLACK = RING - 2  # stages that the slowest warp may lag behind
    AHEAD = RING - SLACK
    PITCH = ROWS + 4  # words; 4 mod 32 keeps the stores of a fragment apart
    PLANE = tokens * PITCH * 4  # bytes of a slice of the block's results
    PLANES = 1 if ranges == 1 else SLICES
    KEPT_AT = ranges * RING * STAGE_BYTES
    BARRIERS_AT = KEPT_AT + (2 * tokens * BLOCK_THREADS if ranges == 1 else 0)
    SHARED = max(BARRIERS_AT + ranges * RING * 16, max(PLANES, 2) * PLANE)
    no_sums, no_words, no_scales = zeros(f32, tokens // 2), zeros(u32, 8), zeros(u32, 2)
    load_words, load_scales = load_rows(2, 8 * k // 2), load_rows_u16(2, 8 * k // 16)
    factors_of, multiply, add = int4_factors(2), wgmma_int4(tokens), add_f32(tokens // 2)
    keep_sums = keep_slice(tokens // 8)

    @function
    def floats(four):
        return (
            bits_to_f32(four[0]),
            bits_to_f32(four[1]),
            bits_to_f32(four[2]),
            bits_to_f32(four[3]),
        )

    @function
    def kept_sums(place):
        sums = floats(load_shared_v4(place))
        for i in static_range(1, tokens // 8):
            sums = sums + floats(load_shared_v4(u32(place + u32(i * FRAGMENT))))
        return sums

    @function
    def keep_plane(place, sums):
        """A warp's sums, [token][row] in shared memory."""
        for j in static_range(tokens // 8):
            for i in static_range(4):
                store_shared_u32(
                    u32(place + u32(4 * ((8 * j + i % 2) * PITCH + 8 * (i // 2)))),
                    f32_to_bits(sums[4 * j + i]),
                )

    @function
    def fetch(source, ring, barriers, stage, turns):
        """Start the copy of one stage; one thread."""
        slot = u32(stage % u32(RING))
        nbytes = u32(turns - u32(stage * u32(STAGE)))
        nbytes = u32(min(u32(STAGE), nbytes) * u32(BLOCK_BYTES))
        arrival = u32(barriers + u32(slot * u32(8)))
        mbarrier_expect(arrival, nbytes)
        copy_bulk(
            u32(ring + u32(slot * u32(STAGE_BYTES))),
            u64(source + u64(u64(stage) * u64(STAGE_BYTES))),
            nbytes,
            arrival,
        )

    @kernel(
        threads=BLOCK_THREADS,
        blocks_per_sm=2 if ranges == 1 else 1,
        registers=128,
        dynamic_shared=SHARED,
        dependent_launch=True,
        sass=("HGMMA", "HFMA2", "LDG", "UBLKCP"),
        archs=("sm_90a",),
    )
    def w4a16_wgmma(
        x: ptr[u16],  # as _permute_tiles lays it
        qw: ptr[u32],  # [n, k/8]
        sc: ptr[u16],  # [n, k/32] bf16
        m: u32,
        n: u32,
        whole: u32,  # blocks of rows that one block sums; of the others, each sums a quarter of K
        y_is_f32: u32,
        y: ptr[u16],  # [m, n] bf16 or fp32, out
        parts: ptr[f32],  # [blocks of rows from `whole` on, SLICES, tokens, ROWS], out
    ):
        shared = shared_address(cuda.shared.array(0, u32), u32(0))
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        g = u32(lane >> u32(2))
        t = u32(lane & u32(3))
        warp = u32(thread >> u32(5))
        own_range = u32(thread // u32(GROUP_THREADS))
        tile = u32(cuda.blockIdx.x)
        turns = u32(TURNS)
        block = u32(own_range * u32(TURNS))  # the first
        cut = tile >= whole
        if cut:
            turns = u32(QUARTER)
            tile = u32(tile - whole)
            block = u32(u32(tile & u32(3)) * u32(QUARTER))
            tile = u32(whole + u32(tile >> u32(2)))
        first_row = u32(tile * u32(ROWS))
        first_token = u32(u32(cuda.blockIdx.y) * u32(tokens))
        own_row = u32(u32(warp & u32(4 * WARPGROUPS - 1)) * u32(16))
        row = u64(u32(min(u32(first_row + own_row), u32(n - u32(16))) + g))  # past the last: any
        group = u32(u32(block * u32(4)) + t)
        words = u64(address(qw, u64(row * u64(k // 8))) + u64(group) * u64(16))
        scales = u64(address(sc, u64(row * u64(k // GROUP))) + u64(group) * u64(2))
        more = u32(1) if group < u32(GROUPS) else u32(0)
        w = load_words(words, more, no_words())
        s = load_scales(scales, more, no_scales())
        more = u32(1) if u32(group + u32(4)) < u32(GROUPS) else u32(0)
        w = w + load_words(u64(words + u64(64)), more, no_words())
        s = s + load_scales(u64(scales + u64(8)), more, no_scales())

        ring = u32(shared + u32(own_range * u32(RING * STAGE_BYTES)))
        barriers = u32(shared + u32(u32(own_range * u32(16 * RING)) + u32(BARRIERS_AT)))
        kept_at = u32(u32(warp * u32(64 * tokens)) + u32(lane * u32(16)))
        kept_at = u32(shared + u32(kept_at + u32(KEPT_AT)))
        copies = u32(thread % u32(GROUP_THREADS)) == u32(0)
        if copies:  # RING barriers of stages that have come, then RING of stages that are used up
            for slot in static_range(RING):
                mbarrier_init(u32(barriers + u32(8 * slot)), u32(1))
                mbarrier_init(u32(barriers + u32(8 * slot + 8 * RING)), u32(4 * WARPGROUPS))
            mbarrier_init_fence()
        cuda.syncthreads()
        pdl_wait()
        pdl_launch_dependents()
        source = u64(u64(first_token) * u64(4 * QUARTER * BLOCK * 2))
        source = u64(address(x, u64(0)) + source + u64(block) * u64(BLOCK_BYTES))
        if copies:
            for stage in static_range(AHEAD):
                if u32(stage * STAGE) < turns:
                    fetch(source, ring, barriers, u32(stage), turns)
        even = no_sums()
        odd = no_sums()
        turn = u32(0)
        left = u32(QUARTER)
        stage = u32(0)
        here = ring
        arrival = barriers
        while turn < turns:
            for i in static_range(2):
                if STAGE == 1 or u32(turn % u32(STAGE)) == u32(0):
                    slot = u32(stage % u32(RING))
                    here = u32(ring + u32(slot * u32(STAGE_BYTES)))
                    arrival = u32(barriers + u32(slot * u32(8)))
                    if copies and u32(u32(stage + u32(AHEAD)) * u32(STAGE)) < turns:
                        if stage >= u32(SLACK):  # its place held stage - SLACK
                            later = u32(stage + u32(AHEAD))
                            parity = u32(u32(u32(later // u32(RING)) - u32(1)) & u32(1))
                            used_up = u32(u32(later % u32(RING)) * u32(8))
                            used_up = u32(u32(barriers + used_up) + u32(8 * RING))
                            mbarrier_wait(used_up, parity)
                        fetch(source, ring, barriers, u32(stage + u32(AHEAD)), turns)
                    mbarrier_wait(arrival, u32(u32(stage // u32(RING)) & u32(1)))
                    stage = u32(stage + u32(1))
                keep = u32(0) if left == u32(QUARTER) else u32(1)
                factors = factors_of(s[2 * i : 2 * i + 2])
                its_tokens = matrix_descriptor(here, u32(0), u32(1024))
                if i == 0:
                    even = multiply(w[:8], factors, its_tokens, keep, even)
                else:
                    odd = multiply(w[8:], factors, its_tokens, keep, odd)
                here = u32(here + u32(BLOCK_BYTES))
                turn = u32(turn + u32(1))
                if STAGE == 1 or u32(turn % u32(STAGE)) == u32(0):
                    if lane == u32(0):
                        mbarrier_arrive(u32(arrival + u32(8 * RING)))
            # Two blocks at once: 128 bytes of a row are one line.
            words = u64(words + u64(128))
            scales = u64(scales + u64(16))
            group = u32(group + u32(8))
            more = u32(1) if group < u32(GROUPS) else u32(0)
            more = more if turn < turns else u32(0)
            even_words = load_words(words, more, w[:8])
            even_scales = load_scales(scales, more, s[:2])
            more = u32(1) if u32(group + u32(4)) < u32(GROUPS) else u32(0)
            more = more if turn < turns else u32(0)
            w = even_words + load_words(u64(words + u64(64)), more, w[8:])
            s = even_scales + load_scales(u64(scales + u64(8)), more, s[2:])
            left = u32(left - u32(2))
            if ranges == 1:  # the sum so far waits in shared memory
                if left == u32(0) and not cut:
                    left = u32(QUARTER)
                    if turn > u32(QUARTER):
                        even = add(kept_sums(kept_at), even)
                    even = add(even, odd)
                    if turn < turns:
                        keep_sums(kept_at, even)

        cuda.syncthreads()  # every stage has come and is used up
        place = u32(u32(u32(t * u32(2 * PITCH)) + own_row) + g)
        place = u32(u32(shared + u32(place * u32(4))) + u32(own_range * u32(2 * PLANE)))
        keep_plane(place, even)
        if ranges > 1 or cut:
            keep_plane(u32(place + u32(PLANE)), odd)
        cuda.syncthreads()
        pair = thread  # of rows
        while pair < u32(tokens * ROWS // 2):
            token = u32(pair // u32(ROWS // 2))
            row_of = u32(u32(pair % u32(ROWS // 2)) * u32(2))
            place = u32(shared + u32(u32(u32(token * u32(PITCH)) + row_of) * u32(4)))
            part = load_shared_v2(place)
            if cut:
                at = u32(u32(cuda.blockIdx.x) - whole)
                at = u32(u32(u32(u32(at * u32(2 * tokens)) + token) * u32(ROWS)) + row_of)
                store_global_v2(address(parts, u64(at)), part[0], part[1])
                part = load_shared_v2(u32(place + u32(PLANE)))
                store_global_v2(address(parts, u64(u32(at + u32(tokens * ROWS)))), part[0], part[1])
            else:
                low = bits_to_f32(part[0])
                high = bits_to_f32(part[1])
                for i in static_range(1, PLANES):
                    part = load_shared_v2(u32(place + u32(i * PLANE)))
                    low = f32(low + bits_to_f32(part[0]))
                    high = f32(high + bits_to_f32(part[1]))
                token = u32(first_token + token)
                row_of = u32(first_row + row_of)
                if token < m and row_of < n:
                    _store_pair(y, y_is_f32, u64(u64(token) * u64(n) + u64(row_of)), low, high)
            pair = u32(pair + u32(BLOCK_THREADS))

    return w4a16_wgmma


@function
def _store_pair(y, y_is_f32, at, low, high):
    """Two sums of `mma_int4`'s scale to elements `at` and `at` + 1, `at` even."""
    low = f32(low * f32(UNSCALE))
    high = f32(high * f32(UNSCALE))
    if y_is_f32 != u32(0):
        store_global_v2(address(y, u64(at * u64(2))), f32_to_bits(low), f32_to_bits(high))
    else:
        store_global_u32(address(y, at), pack_bf16x2(low, high))


@kernel(threads=THREADS, registers=40, dependent_launch=True)
def _add_parts(
    parts: ptr[f32],  # [tiles, SLICES, tokens, 128]
    m: u32,
    n: u32,
    tokens: u32,  # a multiple of 4
    first_row: u32,  # of the first tile
    y_is_f32: u32,
    y: ptr[u16],  # [m, n] bf16 or fp32, out
):
    """A block adds the slices of four tokens and one tile of 128 rows, in ascending order."""
    pdl_wait()
    pdl_launch_dependents()
    tile = u32(cuda.blockIdx.x)
    thread = u32(cuda.threadIdx.x)
    token = u32(u32(u32(cuda.blockIdx.y) * u32(4)) + u32(thread >> u32(6)))
    row = u32(u32(thread & u32(63)) * u32(2))
    at = u32(u32(u32(u32(tile * u32(SLICES)) * tokens + token) * u32(128)) + row)
    row = u32(first_row + u32(tile * u32(128)) + row)
    if token < m and row < n:
        part = load_global_v2(address(parts, u64(at)))
        low = bits_to_f32(part[0])
        high = bits_to_f32(part[1])
        for i in static_range(1, SLICES):
            part = load_global_v2(address(parts, u64(u32(at + u32(tokens * u32(128 * i))))))
            low = f32(low + bits_to_f32(part[0]))
            high = f32(high + bits_to_f32(part[1]))
        _store_pair(y, y_is_f32, u64(u64(token) * u64(n) + u64(row)), low, high)


@kernel(threads=THREADS, registers=40, dependent_launch=True)
def _permute_tiles(
    x: ptr[u16],  # [rows, 32 groups] bf16
    rows: u32,
    groups: u32,
    tokens: u32,  # of a tile, a multiple of 8
    width: u32,  # chunks of 8 columns of a row of x_permuted, a multiple of 16
    count: u32,  # chunks of x_permuted
    x_permuted: ptr[u32],  # [tiles, width / 16 blocks, 2, tokens, 32 pairs], out
):
    """x as wgmma's B operand, zeros where it has nothing: 128 bytes of a token, swizzled.

    Unit 4 (j % 2) + p of half j / 2 of a block is pair p, columns (p, p + 4) of 8, of word j of the
    four lanes of a row: the pair that their fragments of A have there.
    """
    pdl_wait()
    pdl_launch_dependents()
    chunk = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if chunk < count:
        row = u32(chunk // width)
        chunk = u32(chunk % width)
        lane = u32(u32(chunk >> u32(2)) & u32(3))
        word = u32(chunk & u32(3))
        pairs = (u32(0), u32(0), u32(0), u32(0))
        if row < rows and u32(chunk >> u32(2)) < groups:
            v = load_global_v4(address(x, u64(u64(row * u32(groups * u32(4)) + chunk) * u64(8))))
            pairs = (
                prmt(v[0], v[2], u32(0x5410)),
                prmt(v[0], v[2], u32(0x7632)),
                prmt(v[1], v[3], u32(0x5410)),
                prmt(v[1], v[3], u32(0x7632)),
            )
        token = u32(row % tokens)
        line = u32(u32(u32(row // tokens) * u32(width >> u32(4))) + u32(chunk >> u32(4)))
        line = u32(u32(u32(line * u32(2)) + u32(word >> u32(1))) * tokens + token)
        for p in static_range(4):
            unit = u32(u32(u32(u32(word & u32(1)) * u32(4)) + u32(p)) ^ u32(token & u32(7)))
            x_permuted[u32(u32(u32(line * u32(32)) + u32(unit * u32(4))) + lane)] = pairs[p]


@kernel(threads=THREADS, registers=40, dependent_launch=True)
def _permute(
    x: ptr[u16],  # [rows, 32 groups] bf16
    rows: u32,
    groups: u32,
    chunks: u32,  # of 8 columns, of all of x_permuted
    x_permuted: ptr[u16],  # [rows up to a tile, 32 groups up to 128], out
):
    """x in the order of engine/int4.py, zeros where it has nothing."""
    pdl_wait()
    pdl_launch_dependents()
    chunk = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if chunk < chunks:
        permute_chunk(x, rows, groups, x_permuted, chunk)


def w4a16_gemm(x, qw, sc, *, y, stream=None) -> None:
    """y = x W^T with W = RN_bf16(q s). For few rows: W is read once for every 16 of x, so 64 rows
    read it four times; `w4a16_gemm_many` reads it once for 64, and wants scratch.

    x [m, k] bf16; qw [n, k/8] int32 and sc [n, k/32] bf16 as in a pack-quantized checkpoint, with
    scales that are 0 or 2^-106 <= |s| < 2^14; y [m, n] bf16 or fp32. n and k are multiples of 32,
    m is at most 256 and x below 2^32 elements (NotImplementedError). A row's bits
    follow from k alone.
    """
    m, n, k = _check("w4a16_gemm", x, qw, sc, y)
    # A slice of one or two blocks takes eight tokens no faster than sixteen.
    columns = 2 if m > 8 or (m > 4 and cdiv(k, BLOCK) <= 2 * SLICES) else 1
    tiles = 1 if columns == 1 and n // 48 < RESIDENT else 2
    if m > 8 and k in TALL and n % (16 * TALL[k]) == 0:
        tiles = TALL[k]
    _w4a16_gemm(k=k, columns=columns, tiles=tiles, k_order=True).launch(
        (n // (16 * tiles), cdiv(m, 8 * columns)),
        x, qw, sc, m, n, y.dtype == np.float32, y, stream=stream,
    )  # fmt: skip


def w4a16_gemm_many(
    x, qw, sc, *, x_permuted, parts, y, resident: int = RESIDENT, stream=None
) -> None:
    """`w4a16_gemm`, the same bits, for many rows: W is read once for every 64 of x.

    x_permuted, parts: scratch as `scratch_shapes` says, not used for few rows. resident: blocks of
    128 rows of W that the GPU holds at once; no bit depends on it.
    """
    m, n, k = _check("w4a16_gemm_many", x, qw, sc, y)
    shapes = scratch_shapes(m=m, n=n, k=k, resident=resident)
    wanted = {name: " ".join(map(str, shape)) for name, (shape, _) in shapes.items()}
    check(
        "w4a16_gemm_many",
        x_permuted=(x_permuted, wanted["x_permuted"], "bfloat16"),
        parts=(parts, wanted["parts"], "float32"),
    )
    columns, y_is_f32 = _columns(m), y.dtype == np.float32
    if columns > 2 and has_wgmma():
        tokens, ranges, tiles, whole = _wgmma_tiles(m, n, resident)
        width = 4 * _quarter(k) // 8
        chunks = cdiv(m, tokens) * tokens * width
        _permute_tiles.launch(
            cdiv(chunks, THREADS), x, m, k // GROUP, tokens, width, chunks, x_permuted,
            stream=stream,
        )  # fmt: skip
        _w4a16_wgmma(k=k, tokens=tokens, ranges=ranges).launch(
            (whole + 4 * (tiles - whole), cdiv(m, tokens)),
            x_permuted, qw, sc, m, n, whole, y_is_f32, y, parts, stream=stream,
        )  # fmt: skip
        _add_parts.launch(
            (tiles - whole, tokens // 4), parts, m, n, tokens, 128 * whole, y_is_f32, y,
            stream=stream,
        )  # fmt: skip
        return
    many = n // 48 >= resident
    if columns <= 2 and not (many and m > 4):
        w4a16_gemm(x, qw, sc, y=y, stream=stream)
        return
    tokens = cdiv(m, 8 * columns) * 8 * columns
    chunks = tokens * padded(k) // 8
    _permute.launch(cdiv(chunks, THREADS), x, m, k // GROUP, chunks, x_permuted, stream=stream)
    tiles = 3 if columns == 2 and n % 48 == 0 else 2
    _w4a16_gemm(k=k, columns=columns, tiles=tiles, k_order=False).launch(
        (n // (16 * tiles), tokens // (8 * columns)),
        x_permuted, qw, sc, m, n, y_is_f32, y, stream=stream,
    )  # fmt: skip


def scratch_shapes(
    *, m: int, n: int, k: int, resident: int = RESIDENT
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype name of each scratch array of `w4a16_gemm_many`."""
    tile = 8 * _columns(m)
    tokens, _, tiles, whole = _wgmma_tiles(m, n, resident)
    parts = (tiles - whole) * SLICES * tokens * 128
    return {
        "x_permuted": ((tile * cdiv(m, tile), 4 * _quarter(k)), "bfloat16"),
        "parts": ((max(parts, 1),), "float32"),
    }


def _wgmma_tiles(m: int, n: int, resident: int) -> tuple[int, int, int, int]:
    """Tokens of a block, ranges of K in it, blocks of rows, and how many of these are not cut."""
    tokens = 32 if m <= 32 else 64
    tiles = cdiv(n, 128)
    if 2 * tiles < resident:
        if 8 * tiles < resident:  # half the SMs would be idle
            tokens = 32
        tiles = cdiv(n, 64)
        return tokens, 4, tiles, tiles
    return tokens, 1, tiles, tiles if m > tokens else tiles // resident * resident


def _quarter(k: int) -> int:
    """Columns of a quarter of K: an even number of blocks."""
    return 2 * cdiv(cdiv(k, BLOCK), SLICES) * BLOCK


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
    if m * k >= 2**32:
        raise NotImplementedError(f"{op}: x {x.shape} has 2^32 elements or more")
    return m, n, k
