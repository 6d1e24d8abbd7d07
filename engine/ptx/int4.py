"""INT4 weights to bf16 in registers, and their products on both kinds of tensor core.

A nibble in bits 0-3 (4-7) of a half is the subnormal bf16 number code 2^-133 (code 2^-129), so one
AND and one fma a pair give weights: fma(code 2^-133, s 2^113, -8 s 2^-20) is (code - 8) s 2^-20
rounded once. Exact scaling if s is 0 or 2^-106 <= |s| < 2^14.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.device import f32, u32, u64
from engine.ptx.intrinsic import assembly, composed, registers, simulator
from engine.ptx.mma import MMA, of_lanes, to_lanes, unpacked
from engine.ptx.scalar import MASK
from engine.ptx.wgmma import matrix

PAIRS = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibbles of a word as the ANDs give them
UNIT = np.array([2.0**-133, 2.0**-129] * 4)  # what one is worth as bf16 bits, by nibble


def _round_bf16(exact: np.ndarray) -> np.ndarray:
    """float64 values that fit a float32 -> the nearest bf16, as float64."""
    bits = exact.astype(np.float32).view(np.uint32)
    bits = bits + (np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(exact), np.nan, bits.view(np.float32).astype(np.float64))


def int4_factors(rows: int) -> Callable:
    """Makes an intrinsic: bf16 scales s of `rows` rows -> what `mma_int4` dequantises with.

    tuple of rows u32 -> 3 rows u32: the bf16 pairs s 2^113, s 2^109 and -8 s 2^-20.
    """
    text = (
        "{ .reg .b32 s, a, b, c; prmt.b32 s, $3, $3, 0x1010; mov.b32 a, 0x78007800;"
        " mov.b32 b, 0x76007600; mov.b32 c, 0xB700B700; mul.rn.bf16x2 $0, s, a;"
        " mul.rn.bf16x2 $1, s, b; mul.rn.bf16x2 $2, s, c; }"
    )

    def emit(builder: Any, scales: list) -> list:
        factors = assembly(text, [u32] * 3, [u32])
        return [factor for scale in scales for factor in factors(builder, [scale])]

    def stand_in(scales: tuple) -> tuple:
        s = unpacked(np.array(scales, np.uint32))[..., :1]
        low = _round_bf16(s * [2.0**113, 2.0**109, -(2.0**-17)]).astype(np.float32)
        bits = low.view(np.uint32)
        return tuple((bits | bits >> 16).ravel().tolist())

    return composed((u32, 3 * rows), [(u32, rows)], emit, stand_in)


def mma_int4(tiles: int, columns: int, k_order: bool) -> Callable:
    """Makes an intrinsic: `tiles` x 16 rows of INT4 weights times `columns` x 8 tokens, k 32.

    (words, factors, x, sums) -> sums. words: 2 tiles u32, a packed word of row g and of row
    g + 8 of each tile; factors: of these rows, from `int4_factors`; x: 4 columns u32, the
    token's eight values for the same k; sums: 4 tiles columns f32, tile (i, j) at
    4 (i columns + j), laid out as mma.m16n8k16 does, 2^-20 of the true sums. x is in pairs
    (k, k+4) or, if `k_order`, in the order of k.
    """
    to_bf16 = (
        "{ .reg .b32 h, n; shr.b32 h, $4, 8;"
        " and.b32 n, $4, 0x000f000f; fma.rn.bf16x2 $0, n, $5, $7;"
        " and.b32 n, $4, 0x00f000f0; fma.rn.bf16x2 $1, n, $6, $7;"
        " and.b32 n, h, 0x000f000f; fma.rn.bf16x2 $2, n, $5, $7;"
        " and.b32 n, h, 0x00f000f0; fma.rn.bf16x2 $3, n, $6, $7; }"
    )
    to_pairs = (
        "{ prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;"
        " prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632; }"
    )
    in_place = f"{MMA} {registers(0, 4)}, {registers(4, 4)}, {registers(8, 2)}, {registers(0, 4)};"

    def emit(builder: Any, words: list, factors: list, x: list, sums: list) -> list:
        dequantise = assembly(to_bf16, [u32] * 4, [u32] * 4, early=True)
        pair = assembly(to_pairs, [u32] * 4, [u32] * 4, early=True)
        multiply = assembly(in_place, [f32] * 4, [u32] * 6 + [0, 1, 2, 3])
        if k_order:
            for j in range(columns):
                x[4 * j : 4 * j + 4] = pair(builder, x[4 * j : 4 * j + 4])
        for i in range(tiles):
            low, high = (
                dequantise(builder, [words[r], *factors[3 * r : 3 * r + 3]])
                for r in (2 * i, 2 * i + 1)
            )
            for half in (0, 2):
                a = [low[half], high[half], low[half + 1], high[half + 1]]
                for j in range(columns):
                    b = x[4 * j + half : 4 * j + half + 2]
                    at = 4 * (i * columns + j)
                    sums[at : at + 4] = multiply(builder, a + b + sums[at : at + 4])
        return sums

    nibbles = np.arange(0, 32, 4, dtype=np.uint32)

    def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
        words, factors, x, sums = zip(*(slots[n] for n in range(32)), strict=True)
        codes = (np.array(words, np.uint32)[..., None] >> nibbles & np.uint32(15)) * UNIT
        f = unpacked(np.array(factors, np.uint32)).reshape(32, 2 * tiles, 3, 2)[..., 0]
        multiplier = np.tile(f[..., :2], 4)  # of even and odd nibbles
        weights = _round_bf16(codes * multiplier + f[..., 2:])  # [lane, row, k]
        a = weights.reshape(8, 4, 2 * tiles, 8).transpose(2, 0, 1, 3).reshape(-1, 4, 8)
        tokens = unpacked(np.array(x, np.uint32)).reshape(32, columns, 8)  # [lane, column, k]
        if not k_order:
            tokens[..., PAIRS] = tokens.copy()
        b = tokens.reshape(8, 4, columns, 8).transpose(1, 3, 2, 0).reshape(4, 8, -1)
        c = of_lanes(sums, tiles, columns)
        for k in PAIRS[:4], PAIRS[4:]:
            c = np.einsum("rtk,tkc->rc", a[:, :, k], b[:, k]) + c
            c = c.astype(np.float32)
        return to_lanes(c, tiles, columns)

    def stand_in(words: tuple, factors: tuple, x: tuple, sums: tuple) -> tuple:
        return simulator.collective(MASK, (words, factors, x, sums), combine)

    sums = (f32, 4 * tiles * columns)
    operands = [(u32, 2 * tiles), (u32, 6 * tiles), (u32, 4 * columns), sums]
    return composed(sums, operands, emit, stand_in)


def wgmma_int4(columns: int) -> Callable:
    """Makes an intrinsic: 64 rows of INT4 weights times `columns` tokens, 128 columns of k.

    (words, factors, x, keep, sums) -> sums, by a warpgroup whose warps have 16 rows each.
    words: 8 u32, four words of rows g and g + 8 in turn (`load_rows`); factors: of the two
    rows, from `int4_factors`; x: descriptor of the tokens, rows of 128 bytes, the second 64
    columns behind the first; keep: 0 starts from zero in place of sums, columns / 2 f32 as of
    m16n8 tiles. Weights as in `mma_int4`; step 2 j + h has word j, pairs 2 h and 2 h + 1.
    """
    count = columns // 2
    word, factor, x = 2 * count, 2 * count + 8, 2 * count + 14
    lines = [
        "{",
        ".reg .b32 h, n, one, a<32>;",
        ".reg .b64 b;",
        ".reg .b32 low, high;",
        ".reg .pred p;",
    ]
    lines += [f"setp.ne.u32 p, ${x + 1}, 0;", "mov.b32 one, 1;"]
    lines += [f"mov.b64 {{low, high}}, ${x};"]

    def dequantise(j: int) -> list[str]:
        out = []
        for r in range(2):
            f = factor + 3 * r
            source = f"${word + 2 * j + r}"
            for i in range(4):  # pair i of row r is register 2 (i % 2) + r of step 2 j + i // 2
                mask, of = ("0x000f000f", f) if i % 2 == 0 else ("0x00f000f0", f + 1)
                if i == 2:
                    out += [f"shr.b32 h, {source}, 8;"]
                target = f"a{8 * j + 4 * (i // 2) + 2 * (i % 2) + r}"
                out += [f"and.b32 n, {source if i < 2 else 'h'}, {mask};"]
                out += [f"fma.rn.bf16x2 {target}, n, ${of}, ${f + 2};"]
        return out

    def skip(step: int) -> int:
        """Bytes from the tokens' first 16 columns to those of a step."""
        return step // 4 * columns * 128 + step % 4 * 32

    for j in range(4):
        if j >= 2:  # the registers of word j - 2 are free again
            lines += ["wgmma.wait_group.sync.aligned 1;"]
        lines += dequantise(j)
        lines += ["wgmma.fence.sync.aligned;"]
        for step in range(2 * j, 2 * j + 2):
            a = ", ".join(f"a{4 * step + i}" for i in range(4))
            lines += [
                f"add.u32 n, low, {skip(step) // 16};",
                "mov.b64 b, {n, high};",
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
                f"{registers(0, count)}, {{{a}}}, b, p, 1, 1, 0;",
            ]
            if step == 0:
                lines += ["setp.ne.b32 p, one, 0;"]
        lines += ["wgmma.commit_group.sync.aligned;"]
    lines += ["wgmma.wait_group.sync.aligned 0;", "}"]

    def emit(builder: Any, words: list, factors: list, x: Any, keep: Any, sums: list) -> list:
        operands = [*range(count), *[u32] * 14, u64, u32]
        call = assembly("\n".join(lines), [f32] * count, operands, memory=True)
        return call(builder, [*sums, *words, *factors, x, keep])

    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    tiles = columns // 8

    def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
        words, factors, x, keep, sums = zip(*(slots[n] for n in range(32)), strict=True)
        codes = (np.array(words, np.uint32)[..., None] >> shifts & np.uint32(15)) * UNIT
        f = unpacked(np.array(factors, np.uint32)).reshape(32, 2, 3, 2)[..., 0]
        codes = codes.reshape(32, 4, 2, 8)  # lane, word, row, nibble
        multiplier = np.tile(f[..., :2], 4)[:, None]  # of even and odd nibbles
        weights = _round_bf16(codes * multiplier + f[:, None, :, 2:])[..., PAIRS]
        # Lane t has slots 2t, 2t + 1 of the step's first half of 8 and of its second.
        a = weights.reshape(8, 4, 4, 2, 2, 2, 2)  # g, t, word, row, h, q, e
        a = a.transpose(2, 4, 3, 0, 5, 1, 6).reshape(8, 16, 16)  # step; row g; q, t, e
        c = of_lanes(sums, 1, tiles) if keep[0] else np.zeros((16, columns), np.float32)
        for step in range(8):
            b = matrix(x[0], skip(step), range(16), range(columns), False)
            c = (np.einsum("ik,kj->ij", a[step], b) + c).astype(np.float32)
        return to_lanes(c, 1, tiles)

    def stand_in(words: tuple, factors: tuple, x: tuple, keep: int, sums: tuple) -> tuple:
        return simulator.collective(MASK, (words, factors, x, keep, sums), combine)

    sums = (f32, count)
    return composed(sums, [(u32, 8), (u32, 6), u64, u32, sums], emit, stand_in)
