"""Attention over long contexts: the tiles of keys are cut into splits, which are folded after.

A split's block leaves, for each row and head, the scores' maximum m, the sum of e^(s - m) and that
of e^(s - m) v, in fp32. The number of tiles alone says how many splits there are, and they are
folded in ascending order, so that a row's bits do not depend on its neighbours.
"""

import math

from engine.device import cuda, f32, function, static_range, u32, u64
from engine.ptx import address, advance, bits_to_f32, exp2, fma, load_global_v4

MAX_SPLITS = 16
SPLIT_TILES = 8  # a split has at least as many tiles, unless it is the only one
FOLD_THREADS = 256
NO_MAXIMUM = float("-inf")
LOG2_E = math.log2(math.e)


@function
def splits_of(tiles):
    """Splits that so many tiles are cut into; the number of tiles alone says where."""
    return max(u32(1), min(u32(MAX_SPLITS), u32(tiles // u32(SPLIT_TILES))))


@function
def fold_splits(partial, stats, row, heads, head, width, column, splits, scale):
    """Columns column .. column + 3 of one head and the divisor, over all splits: five f32.

    partial [rows, MAX_SPLITS, heads, width] and stats [rows, MAX_SPLITS, heads, 2] fp32; scale:
    times log2 e.
    """
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
    split = u32(0)
    while split < splits:
        at = u32(u32(split * heads) << u32(1))
        factor = exp2(f32(f32(its_stats[at] - largest) * scale))
        total = fma(factor, its_stats[u32(at + u32(1))], total)
        source = u64(u64(u64(here + u64(u32(split * heads))) * u64(width)) + column)
        four = load_global_v4(address(partial, source))
        for i in static_range(4):
            result[i] = fma(factor, bits_to_f32(four[i]), result[i])
        split = u32(split + u32(1))
    return result[0], result[1], result[2], result[3], total
