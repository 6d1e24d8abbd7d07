"""Symmetric INT4 with a bf16 scale for each group of 32: `pack-quantized` checkpoints."""

from fractions import Fraction

import numpy as np

from goldens.numerics import BF16, GROUP, Stream, dequantise, pack_int4, quantise, round_to


def inputs(rng: Stream, *, rows: int, inputs: int, pattern: str) -> dict[str, np.ndarray]:
    weight = rng.bell((rows, inputs))
    exponents = [-130, -90, -50, -10, 30, 70] if pattern == "far_apart" else [-2, -1, 0, 1]
    size = np.exp2(rng.choice(exponents, (rows, inputs // GROUP)).repeat(GROUP, axis=1))
    if pattern == "codes":  # amax 7.5 on either side, every code below it
        weight = rng.choice(np.arange(-7.5, 8, 0.5), (rows, inputs))
        weight[:, ::GROUP] = 7.5 * rng.signs((rows, inputs // GROUP))
    elif pattern == "zeros":
        weight[:, :GROUP] = 0
        weight[::2] *= rng.integers(0, 2, (len(weight[::2]), inputs))
    elif pattern == "halfway":
        weight = rng.integers(-7, 7, (rows, inputs)) + 0.5
        weight[:, ::GROUP] = -7.5
    return {"weight": round_to(weight * size, np.float32)}


def derived(*, inputs: int) -> dict[str, int]:
    return {"words": inputs // 8, "groups": inputs // GROUP}


def reference(*, weight: np.ndarray) -> dict[str, np.ndarray]:
    q, scale = quantise(weight)
    packed = pack_int4(q)
    return {"scale": scale, "packed": packed, "value": dequantise(packed, scale)}


def witness(*, weight: np.ndarray) -> dict[str, np.ndarray]:
    rows, columns = weight.shape
    scale = np.zeros((rows, columns // GROUP), BF16)
    words = np.zeros((rows, columns // 8), np.uint32)
    value = np.zeros((rows, columns), BF16)
    for row, column in np.ndindex(rows, columns):
        group = [Fraction(float(w)) for w in weight[row, column // GROUP * GROUP :][:GROUP]]
        s = _bf16(max(map(abs, group)) * 2 / 15) or Fraction(1)
        q = max(-8, min(7, round(Fraction(float(weight[row, column])) / s)))  # round half to even
        scale[row, column // GROUP] = float(s)
        words[row, column // 8] += (q + 8) * 16 ** (column % 8)
        value[row, column] = float(_bf16(q * s))
    return {"scale": scale, "packed": words.view(np.int32), "value": value}


def _bf16(x: Fraction) -> Fraction:
    """The nearest multiple of the spacing of bf16 numbers (8 bits, subnormals from 2^-133)."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent  # now 2^exponent <= |x| < 2^(exponent + 1)
    step = Fraction(2) ** max(exponent - 7, -133)
    return round(x / step) * step
