"""Attention over long contexts: the tiles of keys are cut into splits, which are folded after.

A split's block leaves, for each row and head, the scores' maximum m, the sum of e^(s - m) and that
of e^(s - m) v, in fp32. The number of tiles alone says how many splits there are, and they are
folded in ascending order, so that a row's bits do not depend on its neighbours. Each kernel has a
fold of its own: from a device function of both, the compiler unrolls the loop by two.
"""

import math

from engine.device import f32, function, u32
from engine.ptx import exp2

MAX_SPLITS = 16
SPLIT_TILES = 8  # a split has at least as many tiles, unless it is the only one
FOLD_THREADS = 256
NO_MAXIMUM = float("-inf")
LOG2_E = math.log2(math.e)


@function
def probability(score, maximum, scale, seen):
    """e^((score - maximum) scale ln 2) where the key is seen, else 0."""
    p = exp2(f32(f32(score - maximum) * scale))
    return p if seen else f32(0)


@function
def splits_of(tiles):
    """Splits that so many tiles are cut into; the number of tiles alone says where."""
    return max(u32(1), min(u32(MAX_SPLITS), u32(tiles // u32(SPLIT_TILES))))
