"""Rows of INT4 weights, as checkpoints store them, times bf16 activations: the W4A16 inner loop.

W[n, k] = RN_bf16(q s) with q in [-8, 7]: words int32 [N, K/8] hold q + 8, element 8j+i of a row in
bits 4i..4i+3 of word j; scales bf16 [N, K/32]. Nothing is repacked: the weights are the 16-row
operand of mma.m16n8k16, the order of k inside an mma is free, and so lane (g, t) of a warp loads
16 bytes, the 32 weights of one scale, of row g and of row g + 8 of a tile. The four lanes of a row
take 128 columns, a block, at a time.

One order of K for every launch: block b belongs to slice b % slices (or, `paired`, to one of the
two slices of a range of K), a warp adds the blocks of its slice in ascending order, and
`add_slices` adds the slices in ascending order. Activations are the 8-column operand, so a token's
bits depend on K and `slices` alone: not on the number of tokens, its place among them or their
values.
"""

from collections.abc import Callable

from engine.device import cdiv, f32, function, static_range, u32, u64
from engine.ptx import (
    address,
    bits_to_f32,
    f32_to_bits,
    int4_factors,
    load_global_v4,
    load_global_v4_or_zero,
    load_rows,
    load_rows_u16,
    load_shared_v4,
    mma_int4,
    pdl_launch_dependents,
    pdl_wait,
    prmt,
    store_global_v4,
    store_shared_v4,
    zeros,
)

GROUP = 32  # weights that share a scale
BLOCK = 4 * GROUP
UNSCALE = 2.0**20  # mma_int4 gives 2^-20 of the sums


def padded(k: int) -> int:
    """Columns of a row of activations in the permuted order: whole blocks."""
    return cdiv(k, BLOCK) * BLOCK


@function
def place_in_row(k):
    """Where column k of a row stands in the permuted order.

    A block of 128 columns is [word j of a lane][lane t][pairs (0, 4), (1, 5), (2, 6), (3, 7)] of
    columns 32 t + 8 j + 0..7, so that a warp's loads are contiguous and are fragments as they are.
    """
    group = u32(u32(k >> u32(5)) & u32(3))
    word = u32(u32(k >> u32(3)) & u32(3))
    pair = u32(u32(u32(k & u32(3)) << u32(1)) | u32(u32(k >> u32(2)) & u32(1)))
    return u32(u32(k & u32(0xFFFFFF80)) + u32(u32(word << u32(5)) | u32(group << u32(3))) + pair)


@function
def permute_chunk(x, rows, groups, x_permuted, chunk):
    """Copy chunk number `chunk` of 8 columns to its place in the permuted order.

    x [rows, 32 groups] bf16; x_permuted [.., 32 groups up to 128] with zeros where x has nothing.
    """
    width = u32(u32(u32(groups + u32(3)) // u32(4)) * u32(16))  # chunks of a row
    row = u32(chunk // width)
    chunk = u32(chunk % width)
    t = u32(u32(chunk >> u32(2)) & u32(3))
    to = u32(u32(chunk & u32(0xFFFFFFF0)) + u32(u32(chunk & u32(3)) * u32(4)) + t)
    target = address(x_permuted, u64(u64(row * width + to) * u64(8)))
    if row < rows and u32(chunk >> u32(2)) < groups:
        v = load_global_v4(address(x, u64(u64(row * u32(groups * u32(4)) + chunk) * u64(8))))
        store_global_v4(
            target,
            prmt(v[0], v[2], u32(0x5410)),
            prmt(v[0], v[2], u32(0x7632)),
            prmt(v[1], v[3], u32(0x5410)),
            prmt(v[1], v[3], u32(0x7632)),
        )
    else:
        store_global_v4(target, u32(0), u32(0), u32(0), u32(0))


def dense_rows(
    *, k: int, slices: int, tiles: int, columns: int, ahead: int, k_order: bool
) -> Callable:
    """`multiply_rows` for one matrix: weights are loaded before the wait for the kernels before.

    k_order: x in the order of k, rows anywhere, at most 2 columns; otherwise in that of
    `place_in_row`, one row after another. Slices 2 q and 2 q + 1 are the even and the odd blocks of
    range q of K, of which there are slices / 2.
    """
    return _multiply_rows(
        k, slices, tiles, columns, ahead, k_order=k_order, gathered=k_order, waits=True, paired=True
    )


def expert_rows(
    *, k: int, slices: int, tiles: int, columns: int, ahead: int, matrices: int
) -> Callable:
    """`multiply_rows` for experts: x in the order of `place_in_row`, rows anywhere, 1 or 2 columns.

    matrices: 2 where the first half of the rows is of one (gate) and the second of another (up);
    1 (down), and then weights are loaded before the wait for the kernels before.
    """
    return _multiply_rows(k, slices, tiles, columns, ahead, matrices=matrices, waits=matrices == 1)


def _multiply_rows(
    k: int,
    slices: int,
    tiles: int,
    columns: int,
    ahead: int,
    *,
    matrices: int = 1,
    k_order: bool = False,
    gathered: bool = True,
    waits: bool,
    paired: bool = False,
) -> Callable:
    """Makes the device function of one warp: 16 `tiles` rows times 8 `columns` tokens, one slice.

    ahead: words whose activations are loaded before they are needed, 1 to 4.

    (words, scales, x, part, t) -> sums as in `mma_int4`. words, scales: addresses of word 0 and of
    scale 0 of row g of the first tile, of each matrix; x: address of token g of the column tile, or
    of both where they are gathered; part: the slice; t = lane % 4.
    """
    GROUPS, BLOCKS = k // GROUP, cdiv(k, BLOCK)
    STEP = 2 if paired else slices  # from a block of a slice to its next
    PAIRS = cdiv(BLOCKS, slices)  # of blocks, in a range of two slices
    RAGGED = GROUPS % 4 != 0 or (BLOCKS % slices != 0 if paired else BLOCKS < slices)
    ROWS = 2 * tiles // matrices
    LANE_STEP, LOAD_STEP = (64, 16) if k_order else (16, 64)  # bytes of x between lanes, loads
    COLUMN_STEP = 8 * 2 * (k if k_order else padded(k))  # bytes between tokens 8 apart
    load_words, load_scales = load_rows(ROWS, 8 * k // 2), load_rows_u16(ROWS, 8 * k // 16)
    no_words, no_scales = zeros(u32, 4 * ROWS), zeros(u32, ROWS)
    no_sums = zeros(f32, 4 * tiles * columns)
    factors_of, multiply = int4_factors(2 * tiles), mma_int4(tiles, columns, k_order)

    @function
    def load_token(place, wanted):
        if RAGGED:
            return load_global_v4_or_zero(place, wanted)
        else:
            return load_global_v4(place)

    @function
    def load_x(x_0, x_1, wanted):
        """One word's activations of every column tile."""
        x = load_token(x_0, wanted)
        for c in static_range(1, columns):
            if gathered:
                x = x + load_token(x_1, wanted)
            else:
                x = x + load_token(u64(x_0 + u64(c * COLUMN_STEP)), wanted)
        return x

    @function
    def multiply_rows(words, scales, x, part, t):
        words_0 = words[0]
        scales_0 = scales[0]
        if matrices == 2:
            words_1 = words[1]
            scales_1 = scales[1]
        x_0 = x[0]
        x_1 = x_0
        if gathered:
            x_1 = x[columns - 1]
        if paired:
            block = u32(u32(part >> u32(1)) * u32(2 * PAIRS))
            end = u32(min(u32(block + u32(2 * PAIRS)), u32(BLOCKS)))
            block = u32(block + u32(part & u32(1)))
        else:
            block = u32(part)
            end = u32(BLOCKS)
        more = u32(1) if u32(u32(block * u32(4)) + t) < u32(GROUPS) else u32(0)
        if paired and RAGGED:
            more = more if block < end else u32(0)
        at = u64(u32(u32(block * u32(4)) + t))
        words_0 = u64(words_0 + at * u64(16))
        scales_0 = u64(scales_0 + at * u64(2))
        w_0 = load_words(words_0, more, no_words())
        s_0 = load_scales(scales_0, more, no_scales())
        if matrices == 2:
            words_1 = u64(words_1 + at * u64(16))
            scales_1 = u64(scales_1 + at * u64(2))
            w_1 = load_words(words_1, more, no_words())
            s_1 = load_scales(scales_1, more, no_scales())
        if waits:
            pdl_wait()
            pdl_launch_dependents()
        at = u64(u32(u32(block * u32(256)) + u32(t * u32(LANE_STEP))))
        x_0 = u64(x_0 + at)
        x_1 = u64(x_1 + at)
        x = load_x(x_0, x_1, more)
        for j in static_range(1, ahead):
            x = x + load_x(u64(x_0 + u64(j * LOAD_STEP)), u64(x_1 + u64(j * LOAD_STEP)), more)
        sums = no_sums()
        while block < end:
            block = u32(block + u32(STEP))
            now = more
            more = u32(1) if u32(u32(block * u32(4)) + t) < u32(GROUPS) else u32(0)
            if paired:
                more = more if block < end else u32(0)
            # Past its last block a lane stays where it is: its loads are then wasted, not wild.
            step = u64(256 * STEP) if more == u32(1) else u64(0)
            words_0 = u64(words_0 + u64(64 * STEP))
            scales_0 = u64(scales_0 + u64(8 * STEP))
            if matrices == 2:
                words_1 = u64(words_1 + u64(64 * STEP))
                scales_1 = u64(scales_1 + u64(8 * STEP))
                factors = factors_of(s_0 + s_1)
                s_1 = load_scales(scales_1, more, s_1)
            else:
                factors = factors_of(s_0)
            s_0 = load_scales(scales_0, more, s_0)
            for j in static_range(4):
                if j + ahead == 4:
                    x_0 = u64(x_0 + step)
                    x_1 = u64(x_1 + step)
                    now = more
                if matrices == 2:
                    words = w_0[j * ROWS : (j + 1) * ROWS] + w_1[j * ROWS : (j + 1) * ROWS]
                else:
                    words = w_0[j * ROWS : (j + 1) * ROWS]
                sums = multiply(words, factors, x[: 4 * columns], sums)
                at = u64((j + ahead) % 4 * LOAD_STEP)
                x = x[4 * columns :] + load_x(u64(x_0 + at), u64(x_1 + at), now)
            w_0 = load_words(words_0, more, w_0)
            if matrices == 2:
                w_1 = load_words(words_1, more, w_1)
        return sums

    return multiply_rows


FRAGMENT = 512  # bytes of a warp's sums of 16 rows x 8 tokens: four f32 a lane


def keep_slice(fragments: int) -> Callable:
    """Makes a device function: (place, sums), a lane's sums to shared memory at `place`."""

    @function
    def keep(place, sums):
        for i in static_range(fragments):
            store_shared_v4(
                u32(place + u32(i * FRAGMENT)),
                f32_to_bits(sums[4 * i]),
                f32_to_bits(sums[4 * i + 1]),
                f32_to_bits(sums[4 * i + 2]),
                f32_to_bits(sums[4 * i + 3]),
            )

    return keep


def add_slices(slices: int, fragments: int) -> Callable:
    """Makes a device function: (place) -> tuple of 4 f32, a lane's sums of a fragment, unscaled.

    `place` is the fragment's in slice 0; each slice is `fragments` fragments.
    """
    pitch = fragments * FRAGMENT

    @function
    def add(place):
        part = load_shared_v4(place)
        a = bits_to_f32(part[0])
        b = bits_to_f32(part[1])
        c = bits_to_f32(part[2])
        d = bits_to_f32(part[3])
        for s in static_range(1, slices):
            part = load_shared_v4(u32(place + u32(s * pitch)))
            a = f32(a + bits_to_f32(part[0]))
            b = f32(b + bits_to_f32(part[1]))
            c = f32(c + bits_to_f32(part[2]))
            d = f32(d + bits_to_f32(part[3]))
        return (
            f32(a * f32(UNSCALE)),
            f32(b * f32(UNSCALE)),
            f32(c * f32(UNSCALE)),
            f32(d * f32(UNSCALE)),
        )

    return add
