"""bf16 GEMM on tensor cores: y[m, n] = sum_k x[m, k] w[n, k], fp32 accumulation.

The weights are the 16-row operand of mma.m16n8k16 and the tokens its 8-column operand, so few
tokens waste little. A block computes `rows` weight rows x `tokens` tokens: 128 columns of K arrive
per stage through a ring of cp.async buffers, swizzled so that ldmatrix meets no bank conflict.

One order of K for every launch. A stage is four groups of 32 columns and warp g of four takes group
g of every stage, ascending; the four sums are added in ascending g. (A K of one stage is summed by
one warp, ascending, and the warps share the tile among them.) Where N alone gives too few
blocks to fill the GPU, `parts(n, k)` ranges of K go to separate blocks and stay separate in
y [parts, m, n] fp32: the kernel that reads y adds them in ascending order. All of this follows from
(n, k); a token is one column of an mma, so its bits depend on no other token and not on its index.
y is rounded once, at the store.

`_gemm_resident` has the same sums for many tokens and a short K: the one stage or four of a head's
absorbed products. All weights of a block are in flight before the previous kernel is done, in so
little shared memory that the blocks of two kernels fit an SM, and y leaves 16 bytes at a time.
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
    shared_limit,
    static_range,
    u8,
    u16,
    u32,
    u64,
)
from engine.ptx import (
    address,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    f32_to_bf16,
    f32_to_bits,
    ldmatrix_x4,
    load_shared_v4,
    mma_bf16_tiles,
    pack_bf16x2,
    pdl_launch_dependents,
    pdl_wait,
    shared_address,
    store_global_u16,
    store_global_u32,
    store_global_v4,
    store_shared_u32,
    store_shared_v2,
    zeros,
)
from engine.ptx import bits_to_f32 as as_f32
from engine.warp import FULL

THREADS = 256
WARPS = THREADS // 32
STAGE_K = 128  # 256 bytes of a row: 16 chunks of 16 bytes
ROW_BYTES = 2 * STAGE_K
TOKENS = (8, 16, 32, 64)
SMS = 132  # what `parts` aims at; a constant, so that bits do not follow the GPU


def _copier(count: int):
    """Makes a device function that starts 16-byte copies of rows `row`, `row` + 16, .."""

    @function
    def copy(place, source, step, row, row_end, inside):
        for i in static_range(count):
            taken = u32(16) if inside and u32(row + u32(16 * i)) < row_end else u32(0)
            cp_async_16_zfill(
                u32(place + u32(16 * i * ROW_BYTES)), u64(source + u64(step * u64(i))), taken
            )

    return copy


def _storer(row_tiles: int, token_tiles: int, pitch: int):
    """Makes a device function that stores a warp's sums as [row][token], `pitch` words a row."""

    @function
    def store(place, sums):
        for i in static_range(row_tiles):
            for j in static_range(token_tiles):
                for low in static_range(2):
                    store_shared_v2(
                        u32(place + u32(4 * ((16 * i + 8 * low) * pitch + 8 * j))),
                        f32_to_bits(sums[4 * (i * token_tiles + j) + 2 * low]),
                        f32_to_bits(sums[4 * (i * token_tiles + j) + 2 * low + 1]),
                    )

    return store


@family(
    {"rows": 128, "tokens": 8, "ring": 2, "groups": 1},
    *({"rows": 64, "tokens": t, "ring": 2, "groups": 1} for t in TOKENS[1:]),
    *({"rows": 64, "tokens": t, "ring": 4, "groups": 4} for t in TOKENS[:-1]),
    *({"rows": 64, "tokens": 64, "ring": r, "groups": 4} for r in (3, 4)),
    {"rows": 96, "tokens": 64, "ring": 4, "groups": 4},
)
def _gemm_bf16(*, rows: int, tokens: int, ring: int, groups: int):
    # Warps along K, tokens and rows; with one group, few rows or tokens are left to each of eight.
    ALONG_TOKENS = 1 if groups == 4 else {8: 1, 16: 2, 32: 2, 64: 4}[tokens]
    ALONG_ROWS = WARPS // groups // ALONG_TOKENS
    ROW_TILES, TOKEN_TILES = rows // (16 * ALONG_ROWS), tokens // (8 * ALONG_TOKENS)  # of a warp
    STAGE_BYTES = (rows + tokens) * ROW_BYTES
    X_BYTES = rows * ROW_BYTES  # x lies behind w in a stage
    PITCH = tokens if tokens == 8 else tokens + 8  # words; 8 mod 32 keeps the stores apart
    PLANE = rows * PITCH  # the sums of one group of K
    QUADS = rows * tokens // 4
    SHARED = max((ring if groups == 4 else 1) * STAGE_BYTES, 4 * groups * PLANE)
    no_sums = zeros(f32, 4 * ROW_TILES * TOKEN_TILES)
    store_sums = _storer(ROW_TILES, TOKEN_TILES, PITCH)
    mma = mma_bf16_tiles(ROW_TILES, TOKEN_TILES)
    wait_for_stage, wait_for_all = cp_async_wait(ring - 2), cp_async_wait(0)

    def fetcher(first: int, count: int):
        """Makes a device function that starts the copies of one stage's w or x."""
        copy = _copier(count)

        @function
        def fetch(source, row, row_end, step, into, column, column_end, stage, stages):
            if stage < stages:
                place = u32(into + u32(u32(stage % u32(ring)) * u32(STAGE_BYTES)))
                inside = u32(column + u32(stage * u32(STAGE_K))) < column_end
                skip = u64(u64(stage) * u64(ROW_BYTES))
                copy(u32(place + u32(first)), u64(source + skip), step, row, row_end, inside)

        return fetch

    fetch_w, fetch_x = fetcher(0, rows // 16), fetcher(X_BYTES, cdiv(tokens, 16))

    @kernel(
        threads=THREADS,
        registers=255,
        dynamic_shared=SHARED,
        dependent_launch=True,
        sass=("HMMA", "LDSM", "LDGSTS"),
    )
    def gemm_bf16(
        x: ptr[u16],  # [m, batch, x_width]
        w: ptr[u16],  # [batch, n, k]
        m: u32,
        n: u32,
        k: u32,
        batch: u32,
        x_width: u32,
        y_width: u32,
        part_stages: u32,
        y_is_f32: u32,
        y: ptr[u16],  # [parts, m, batch, y_width], out
    ):
        shared = shared_address(cuda.shared.array(0, u8), u32(0))
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        group = u32(u32(thread >> u32(5)) % u32(groups))
        place = u32(u32(thread >> u32(5)) // u32(groups))
        warp_row = u32(u32(place % u32(ALONG_ROWS)) * u32(16 * ROW_TILES))
        warp_token = u32(u32(place // u32(ALONG_ROWS)) * u32(8 * TOKEN_TILES))
        first_token = u32(u32(cuda.blockIdx.x) * u32(tokens))
        first_row = u32(u32(cuda.blockIdx.y) * u32(rows))
        member = u32(u32(cuda.blockIdx.z) % batch)
        part = u32(u32(cuda.blockIdx.z) // batch)
        k_first = u32(part * u32(part_stages * u32(STAGE_K)))
        k_last = min(k, u32(k_first + u32(part_stages * u32(STAGE_K))))
        stages = u32(u32(u32(k_last - k_first) + u32(STAGE_K - 1)) // u32(STAGE_K))

        # Copies: a thread fetches chunk `chunk` of rows copy_row, copy_row + 16, ...
        chunk = u32(thread & u32(15))
        copy_row = u32(thread >> u32(4))
        k_copy = u32(k_first + u32(chunk * u32(8)))
        w_row = u32(first_row + copy_row)
        w_from = address(w, u64(u64(u64(member * n) + u64(w_row)) * u64(k)) + u64(k_copy))
        w_step = u64(u64(k) * u64(32))  # bytes of 16 rows
        x_row = u32(first_token + copy_row)
        x_step = u64(u64(batch) * u64(x_width) * u64(32))
        x_from = address(
            x,
            u64(u64(u64(x_row) * u64(batch) + u64(member)) * u64(x_width)) + u64(k_copy),
        )
        swizzled = u32(chunk ^ u32(copy_row & u32(7)))
        into = u32(u32(copy_row * u32(ROW_BYTES)) + u32(swizzled * u32(16)))

        # Fragments: lanes 0..15 address the rows of A, lanes 16..31 the same rows 8 columns on.
        a_row = u32(warp_row + u32(lane & u32(15)))
        a_chunk = u32(u32(group * u32(4)) + u32(lane >> u32(4)))
        a_swizzle = u32(a_row & u32(7))
        if TOKEN_TILES == 1:  # one ldmatrix.x4 is 8 tokens x 32 columns
            b_row = u32(warp_token + u32(lane & u32(7)))
            b_chunk = u32(u32(group * u32(4)) + u32(lane >> u32(3)))
        else:  # 16 tokens x 16 columns
            b_row = u32(warp_token + u32(u32(lane & u32(7)) + u32(u32(lane >> u32(4)) * u32(8))))
            b_chunk = u32(u32(group * u32(4)) + u32(u32(lane >> u32(3)) & u32(1)))
        b_swizzle = u32(b_row & u32(7))

        sums = no_sums()
        pdl_launch_dependents()
        # Weights of the first stages are on their way before the previous kernel is done with x.
        for stage in static_range(ring - 1):
            fetch_w(
                w_from, w_row, n, w_step, u32(shared + into), k_copy, k_last, u32(stage), stages
            )
        pdl_wait()
        turn = u32(0)
        while turn < u32(stages + u32(ring - 1)):
            if turn >= u32(ring - 1):
                wait_for_stage()
                cuda.syncthreads()  # the stage is here, and the one before it is used up
                fetch_w(w_from, w_row, n, w_step, u32(shared + into), k_copy, k_last, turn, stages)
            if tokens >= 16 or copy_row < u32(8):
                fetch_x(x_from, x_row, m, x_step, u32(shared + into), k_copy, k_last, turn, stages)
            cp_async_commit()
            if turn >= u32(ring - 1):
                use = u32(u32(turn - u32(ring - 1)) % u32(ring))
                here = u32(shared + u32(use * u32(STAGE_BYTES)))
                a_from = u32(here + u32(a_row * u32(ROW_BYTES)))
                b_from = u32(here + u32(b_row * u32(ROW_BYTES)) + u32(X_BYTES))
                for step in static_range(8 // groups):  # 16 columns each
                    if TOKEN_TILES == 1 and step % 2 == 0:
                        at = u32(u32(u32(b_chunk + u32(2 * step)) ^ b_swizzle) * u32(16))
                        both = ldmatrix_x4(u32(b_from + at))
                    at = u32(u32(u32(a_chunk + u32(2 * step)) ^ a_swizzle) * u32(16))
                    a = ldmatrix_x4(u32(a_from + at))
                    for i in static_range(1, ROW_TILES):
                        a = a + ldmatrix_x4(u32(a_from + at + u32(16 * i * ROW_BYTES)))
                    if TOKEN_TILES == 1:
                        b = both[2 * (step % 2) : 2 * (step % 2) + 2]
                    else:
                        at = u32(u32(u32(b_chunk + u32(2 * step)) ^ b_swizzle) * u32(16))
                        b = ldmatrix_x4(u32(b_from + at))
                        for i in static_range(1, TOKEN_TILES // 2):
                            b = b + ldmatrix_x4(u32(b_from + at + u32(16 * i * ROW_BYTES)))
                    sums = mma(sums, a, b)
            turn = u32(turn + u32(1))

        # The groups of K meet in shared memory, [group][row][token].
        wait_for_all()
        cuda.syncthreads()
        row = u32(warp_row + u32(lane >> u32(2)))
        column = u32(warp_token + u32(u32(lane & u32(3)) * u32(2)))
        into = u32(u32(u32(group * u32(PLANE)) + u32(row * u32(PITCH))) + column)
        store_sums(u32(shared + u32(into * u32(4))), sums)
        cuda.syncthreads()
        token_step = u64(u64(batch) * u64(y_width))
        y_member = u64(u64(u64(part) * u64(m)) * token_step + u64(u64(member) * u64(y_width)))
        quad = thread
        while quad < u32(QUADS):  # one row of w, four tokens
            row = u32(quad % u32(rows))
            token = u32(u32(quad // u32(rows)) * u32(4))
            source = u32(shared + u32(u32(u32(row * u32(PITCH)) + token) * u32(4)))
            first = load_shared_v4(source)
            if groups == 4:
                second = load_shared_v4(u32(source + u32(4 * PLANE)))
                third = load_shared_v4(u32(source + u32(8 * PLANE)))
                fourth = load_shared_v4(u32(source + u32(12 * PLANE)))
            row = u32(first_row + row)
            token = u32(first_token + token)
            for i in static_range(4):
                if row < n and u32(token + u32(i)) < m:
                    total = as_f32(first[i])
                    if groups == 4:
                        total = f32(total + as_f32(second[i]))
                        total = f32(f32(total + as_f32(third[i])) + as_f32(fourth[i]))
                    at = u64(y_member + u64(token_step * u64(u32(token + u32(i)))) + u64(row))
                    if y_is_f32 != u32(0):
                        store_global_u32(address(y, u64(at * u64(2))), f32_to_bits(total))
                    else:
                        store_global_u16(address(y, at), f32_to_bf16(total))
            quad = u32(quad + u32(THREADS))

    return gemm_bf16


@function
def _added(first, second, third, fourth, i):
    """The groups' sums of token i of four, in ascending order."""
    total = f32(as_f32(first[i]) + as_f32(second[i]))
    return f32(f32(total + as_f32(third[i])) + as_f32(fourth[i]))


@function
def _two_rows(even, odd, row, lanes):
    """Results of one token in bf16, of row `row` and of its neighbour, which the lane `lanes`
    further or nearer has. even, odd: this row's, of two tokens. An even row keeps the first."""
    mine = even if row & u32(1) == u32(0) else odd
    other = cuda.shfl_xor_sync(FULL, odd if row & u32(1) == u32(0) else even, lanes)
    if row & u32(1) == u32(0):
        two = pack_bf16x2(mine, other)
    else:
        two = pack_bf16x2(other, mine)
    return two


@function
def _packed_at(packed, pitch, row, token):
    """Where `_two_rows` of tokens `token` and token + 1 goes."""
    token = u32(token + u32(row & u32(1)))
    return u32(packed + u32(u32(token * u32(pitch)) + u32(u32(row & u32(0xFFFFFFFE)) * u32(2))))


@family(
    {"stages": 1, "rows": 64, "tiles": 4},
    {"stages": 1, "rows": 64, "tiles": 2},
    {"stages": 4, "rows": 32, "tiles": 1},
)
def _gemm_resident(*, stages: int, rows: int, tiles: int):
    """A block: `tiles` times `rows` rows of w and 64 tokens, all of K of both at once."""
    TOKENS_A_BLOCK = 64
    GROUPS = 1 if stages == 1 else 4  # of warps along K, as in _gemm_bf16
    ALONG_TOKENS = 4 if stages == 1 else 1
    ALONG_ROWS = WARPS // GROUPS // ALONG_TOKENS
    ROW_TILES = rows // (16 * ALONG_ROWS)
    TOKEN_TILES = TOKENS_A_BLOCK // (8 * ALONG_TOKENS)
    W_STAGE, X_STAGE = rows * ROW_BYTES, TOKENS_A_BLOCK * ROW_BYTES
    X_AT = tiles * stages * W_STAGE
    PITCH = TOKENS_A_BLOCK + 8  # words; 8 mod 32 keeps the stores apart
    PLANE = rows * PITCH
    PACKED_PITCH = 2 * (rows + 8)  # bytes of a token's results; 4 words mod 32
    PACKED_AT = 4 * GROUPS * PLANE if GROUPS == 4 else 0
    SHARED = max(X_AT + stages * X_STAGE, PACKED_AT + TOKENS_A_BLOCK * PACKED_PITCH)
    no_sums = zeros(f32, 4 * ROW_TILES * TOKEN_TILES)
    store_sums = _storer(ROW_TILES, TOKEN_TILES, PITCH)
    multiply = mma_bf16_tiles(ROW_TILES, TOKEN_TILES)
    copy_w, copy_x = _copier(rows // 16), _copier(TOKENS_A_BLOCK // 16)
    wait_for_stage = cp_async_wait(stages - 1)

    @kernel(
        threads=THREADS,
        blocks_per_sm=2 if SHARED <= 112 * 1024 else 1,
        registers=255,
        dynamic_shared=SHARED,
        dependent_launch=True,
        sass=("HMMA", "LDSM", "LDGSTS"),
    )
    def gemm_resident(
        x: ptr[u16],  # [m, batch, x_width]
        w: ptr[u16],  # [batch, n, k]
        m: u32,
        n: u32,  # a multiple of 8
        k: u32,
        batch: u32,
        x_width: u32,
        y_width: u32,  # a multiple of 8
        y: ptr[u16],  # [m, batch, y_width], out
    ):
        shared = shared_address(cuda.shared.array(0, u8), u32(0))
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        group = u32(u32(thread >> u32(5)) % u32(GROUPS))
        place = u32(u32(thread >> u32(5)) // u32(GROUPS))
        warp_row = u32(u32(place % u32(ALONG_ROWS)) * u32(16 * ROW_TILES))
        warp_token = u32(u32(place // u32(ALONG_ROWS)) * u32(8 * TOKEN_TILES))
        first_token = u32(u32(cuda.blockIdx.x) * u32(TOKENS_A_BLOCK))
        first_row = u32(u32(cuda.blockIdx.y) * u32(rows * tiles))
        member = u32(cuda.blockIdx.z)

        # Copies: a thread fetches chunk `chunk` of rows copy_row, copy_row + 16, ...
        chunk = u32(thread & u32(15))
        copy_row = u32(thread >> u32(4))
        k_copy = u32(chunk * u32(8))
        w_row = u32(first_row + copy_row)
        w_from = address(w, u64(u64(u64(member * n) + u64(w_row)) * u64(k)) + u64(k_copy))
        w_step = u64(u64(k) * u64(32))  # bytes of 16 rows
        x_row = u32(first_token + copy_row)
        x_step = u64(u64(batch) * u64(x_width) * u64(32))
        x_from = address(
            x,
            u64(u64(u64(x_row) * u64(batch) + u64(member)) * u64(x_width)) + u64(k_copy),
        )
        into = u32(u32(chunk ^ u32(copy_row & u32(7))) * u32(16))
        into = u32(shared + u32(into + u32(copy_row * u32(ROW_BYTES))))

        # Fragments: lanes 0..15 address the rows of A, lanes 16..31 the same rows 8 columns on.
        a_row = u32(warp_row + u32(lane & u32(15)))
        a_chunk = u32(u32(group * u32(4)) + u32(lane >> u32(4)))
        a_swizzle = u32(a_row & u32(7))
        a_from = u32(shared + u32(a_row * u32(ROW_BYTES)))
        b_row = u32(warp_token + u32(u32(lane & u32(7)) + u32(u32(lane >> u32(4)) * u32(8))))
        b_chunk = u32(u32(group * u32(4)) + u32(u32(lane >> u32(3)) & u32(1)))
        b_swizzle = u32(b_row & u32(7))
        b_from = u32(shared + u32(b_row * u32(ROW_BYTES)) + u32(X_AT))

        pdl_launch_dependents()
        for tile in static_range(tiles):
            tile_from = u64(w_from + u64(w_step * u64(tile * rows // 16)))
            for stage in static_range(stages):
                copy_w(
                    u32(into + u32((tile * stages + stage) * W_STAGE)),
                    u64(tile_from + u64(stage * ROW_BYTES)),
                    w_step,
                    u32(w_row + u32(tile * rows)),
                    n,
                    u32(k_copy + u32(stage * STAGE_K)) < k,
                )
        cp_async_commit()
        pdl_wait()
        for stage in static_range(stages):
            copy_x(
                u32(into + u32(X_AT + stage * X_STAGE)),
                u64(x_from + u64(stage * ROW_BYTES)),
                x_step,
                x_row,
                m,
                u32(k_copy + u32(stage * STAGE_K)) < k,
            )
            cp_async_commit()

        for tile in static_range(tiles):
            sums = no_sums()
            for stage in static_range(stages):
                if tile == 0:
                    wait_for_stage()
                    cuda.syncthreads()
                a_at = u32(a_from + u32((tile * stages + stage) * W_STAGE))
                b_at = u32(b_from + u32(stage * X_STAGE))
                for step in static_range(8 // GROUPS):  # 16 columns each
                    at = u32(u32(u32(a_chunk + u32(2 * step)) ^ a_swizzle) * u32(16))
                    a = ldmatrix_x4(u32(a_at + at))
                    for i in static_range(1, ROW_TILES):
                        a = a + ldmatrix_x4(u32(a_at + at + u32(16 * i * ROW_BYTES)))
                    at = u32(u32(u32(b_chunk + u32(2 * step)) ^ b_swizzle) * u32(16))
                    b = ldmatrix_x4(u32(b_at + at))
                    for i in static_range(1, TOKEN_TILES // 2):
                        b = b + ldmatrix_x4(u32(b_at + at + u32(16 * i * ROW_BYTES)))
                    sums = multiply(sums, a, b)
                if tile == 0:
                    cp_async_commit()  # one a stage, so that the waits are alike
            cuda.syncthreads()  # the weights of this tile are used up: its results take their place
            packed = u32(shared + u32(tile * W_STAGE + PACKED_AT))
            row = u32(warp_row + u32(lane >> u32(2)))
            column = u32(warp_token + u32(u32(lane & u32(3)) * u32(2)))
            if GROUPS == 1:
                place = _packed_at(packed, PACKED_PITCH, row, column)
                for i in static_range(ROW_TILES):
                    for j in static_range(TOKEN_TILES):
                        for low in static_range(2):
                            at = 4 * (i * TOKEN_TILES + j) + 2 * low
                            store_shared_u32(
                                u32(place + u32(8 * j * PACKED_PITCH + 2 * (16 * i + 8 * low))),
                                _two_rows(sums[at], sums[at + 1], row, 4),
                            )
            else:  # the groups of K meet, [group][row][token]
                place = u32(u32(u32(group * u32(PLANE)) + u32(row * u32(PITCH))) + column)
                store_sums(u32(shared + u32(place * u32(4))), sums)
                cuda.syncthreads()
                for turn in static_range(rows * TOKENS_A_BLOCK // 4 // THREADS):
                    quad = u32(thread + u32(turn * THREADS))  # one row of w, four tokens
                    row = u32(quad % u32(rows))
                    token = u32(u32(quad // u32(rows)) * u32(4))
                    place = u32(shared + u32(u32(u32(row * u32(PITCH)) + token) * u32(4)))
                    first = load_shared_v4(place)
                    second = load_shared_v4(u32(place + u32(4 * PLANE)))
                    third = load_shared_v4(u32(place + u32(8 * PLANE)))
                    fourth = load_shared_v4(u32(place + u32(12 * PLANE)))
                    place = _packed_at(packed, PACKED_PITCH, row, token)
                    for i in static_range(2):
                        even = _added(first, second, third, fourth, 2 * i)
                        odd = _added(first, second, third, fourth, 2 * i + 1)
                        store_shared_u32(
                            u32(place + u32(2 * i * PACKED_PITCH)), _two_rows(even, odd, row, 1)
                        )
            cuda.syncthreads()
            for turn in static_range(rows * TOKENS_A_BLOCK // 8 // THREADS):
                unit = u32(thread + u32(turn * THREADS))  # eight rows of w, one token
                row = u32(u32(unit % u32(rows // 8)) * u32(8))
                token = u32(unit // u32(rows // 8))
                place = u32(u32(token * u32(PACKED_PITCH)) + u32(row * u32(2)))
                v = load_shared_v4(u32(packed + place))
                row = u32(first_row + u32(tile * rows) + row)
                token = u32(first_token + token)
                if row < n and token < m:
                    at = u64(u64(u64(token) * u64(batch) + u64(member)) * u64(y_width) + u64(row))
                    store_global_v4(address(y, at), v[0], v[1], v[2], v[3])

    return gemm_resident


def parts(n: int, k: int) -> int:
    """Ranges of K to sum in separate blocks so that weights [n, k] keep every SM busy: about two
    blocks an SM, none with fewer than eight stages."""
    stages = cdiv(k, STAGE_K)
    wanted = max(1, min(2 * SMS // cdiv(n, 64), stages // 8))
    return cdiv(stages, cdiv(stages, wanted))  # none is empty


def _tile(n: int, m: int, blocks: int, stages: int) -> dict[str, int]:
    """Constants of the specialisation: n, m, products of [n, k] in all and stages of each. `groups`
    follows from the stages; no bit of the result depends on the others."""
    tokens = next((t for t in TOKENS if m <= t), TOKENS[-1])
    if stages == 1:
        return {"rows": 128 if tokens == 8 else 64, "tokens": tokens, "ring": 2, "groups": 1}
    if tokens < 64:
        return {"rows": 64, "tokens": tokens, "ring": 4, "groups": 4}
    if m <= tokens and cdiv(n, 96) * blocks <= SMS:  # one block an SM: a deeper ring is free
        rows = 96 if cdiv(n, 64) * blocks > SMS else 64
        if 4 * (rows + tokens) * ROW_BYTES <= shared_limit():  # which sm_120 does not have
            return {"rows": rows, "tokens": tokens, "ring": 4, "groups": 4}
    return {"rows": 64, "tokens": tokens, "ring": 3, "groups": 4}  # two blocks fit an SM


def _resident_tile(m: int, stages: int) -> dict[str, int] | None:
    """How `_gemm_resident` cuts w, None where `_gemm_bf16` is as fast or faster."""
    if stages == 1 and m > 32:
        return {"rows": 64, "tiles": 2 if m <= 64 else 4}
    if stages == 4 and 32 < m <= 64:
        return {"rows": 32, "tiles": 1}
    return None


def gemm_bf16(x, w, *, y, stream=None) -> None:
    """y = x w^T.

    x [m, x_width] bf16 with x_width >= k: its first k columns count. w [n, k] bf16, k a multiple
    of 16. y [m, y_width] bf16 or fp32 with y_width >= n: its first n columns are
    written. With a batch of weights (one a head): x [m, batch, x_width], w [batch, n, k] and
    y [m, batch, y_width]. A row's bits follow from n and k alone.
    """
    batched = len(w.shape) == 3
    dims = check(
        "gemm_bf16",
        x=(x, "m batch x_width" if batched else "m x_width", "bfloat16"),
        w=(w, "batch n k" if batched else "n k", "bfloat16"),
        y=(y, "m batch y_width" if batched else "m y_width", ("bfloat16", "float32")),
    )
    _launch(x, w, y, dims, 1, stream)


def gemm_bf16_parts(x, w, *, parts: int, y, stream=None) -> None:
    """y[p] = x w^T over the p-th of `parts` ranges of K, each a whole number of stages.

    x [m, x_width] and w [n, k] bf16 as in gemm_bf16; y [parts, m, n] fp32, to be added in ascending
    p by the kernel that reads it. A row's bits follow from n, k and parts alone.
    """
    dims = check(
        "gemm_bf16_parts",
        x=(x, "m x_width", "bfloat16"),
        w=(w, "n k", "bfloat16"),
        y=(y, f"{parts} m n", "float32"),
    )
    stages = cdiv(dims["k"], STAGE_K)
    if not 1 <= parts <= stages or parts != cdiv(stages, cdiv(stages, parts)):
        raise ValueError(f"gemm_bf16_parts: {parts} parts of {stages} stages of {STAGE_K} columns")
    _launch(x, w, y, dims, parts, stream)


def _launch(x, w, y, dims: dict[str, int], count: int, stream) -> None:
    m, n, k, batch = dims["m"], dims["n"], dims["k"], dims.get("batch", 1)
    x_width, y_width = dims["x_width"], dims.get("y_width", n)
    if x_width < k or y_width < n:
        raise ValueError(f"gemm_bf16: x has {x_width} columns for k = {k}, y {y_width} for n = {n}")
    if k % 16 or x_width % 8:
        raise NotImplementedError(
            f"gemm_bf16: k {k} must be a multiple of 16 and the width of x {x_width} of 8"
        )
    stages = cdiv(cdiv(k, STAGE_K), count)
    whole_units = y.dtype != np.float32 and n % 8 == 0 and y_width % 8 == 0
    tile = _resident_tile(m, stages) if count == 1 and whole_units else None
    if tile:
        _gemm_resident(stages=stages, **tile).launch(
            (cdiv(m, 64), cdiv(n, tile["rows"] * tile["tiles"]), batch),
            x, w, m, n, k, batch, x_width, y_width, y, stream=stream,
        )  # fmt: skip
        return
    tile = _tile(n, m, batch * count, stages)
    _gemm_bf16(**tile).launch(
        (cdiv(m, tile["tokens"]), cdiv(n, tile["rows"]), batch * count),
        x, w, m, n, k, batch, x_width, y_width, stages, y.dtype == np.float32, y, stream=stream,
    )  # fmt: skip
