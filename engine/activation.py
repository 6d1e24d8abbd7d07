"""Activations: bfloat16 in INT4 and bf16 models, float32 in FP32 models; fp32 inside a kernel."""

import math
from collections.abc import Callable
from typing import Any

from engine.device import f32, function, u16, u32
from engine.ptx import (
    bf16_to_f32,
    bf16x2_high,
    bf16x2_low,
    bits_to_f32,
    f32_to_bf16,
    f32_to_bits,
    load_global_v2,
    load_global_v4,
    pack_bf16x2,
    store_global_v2,
    store_global_v4,
)

ACTIVATIONS = ("bfloat16", "float32")


def is_bf16(array: Any) -> bool:
    return array.dtype != "float32"


def element(bf16: bool) -> Any:
    """The element type of a pointer to activations."""
    return u16 if bf16 else f32


def load(bf16: bool) -> Callable:
    """Makes a device function: (pointer, index) -> f32."""

    @function
    def load(pointer, index):
        if bf16:
            return bf16_to_f32(u32(pointer[index]))
        else:
            return pointer[index]

    return load


def store(bf16: bool) -> Callable:
    """Makes a device function: (pointer, index, f32), rounding to nearest even."""

    @function
    def store(pointer, index, value):
        if bf16:
            pointer[index] = u16(f32_to_bf16(value))
        else:
            pointer[index] = value

    return store


def rounded(bf16: bool) -> Callable:
    """Makes a device function: an f32 as it reads after a store."""

    @function
    def rounded(value):
        if bf16:
            return bf16_to_f32(f32_to_bf16(value))
        else:
            return value

    return rounded


def load4(bf16: bool) -> Callable:
    """Makes a device function: (address) -> four consecutive values as f32, in one load."""

    @function
    def load4(place):
        if bf16:
            pair = load_global_v2(place)
            return (
                bf16x2_low(pair[0]),
                bf16x2_high(pair[0]),
                bf16x2_low(pair[1]),
                bf16x2_high(pair[1]),
            )
        else:
            four = load_global_v4(place)
            return (
                bits_to_f32(four[0]),
                bits_to_f32(four[1]),
                bits_to_f32(four[2]),
                bits_to_f32(four[3]),
            )

    return load4


def store4(bf16: bool) -> Callable:
    """Makes a device function: (address, a, b, c, d), rounding to nearest even, in one store."""

    @function
    def store4(place, a, b, c, d):
        if bf16:
            store_global_v2(place, pack_bf16x2(a, b), pack_bf16x2(c, d))
        else:
            store_global_v4(place, f32_to_bits(a), f32_to_bits(b), f32_to_bits(c), f32_to_bits(d))

    return store4


@function
def silu(gate):
    """gate / (1 + exp(-gate)), without overflow for either sign."""
    small = f32(math.exp(f32(-abs(gate))))  # in (0, 1]
    top = gate if gate >= f32(0) else f32(gate * small)
    return f32(top / f32(f32(1) + small))
