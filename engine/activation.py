"""Activations: bfloat16 in INT4 and bf16 models, float32 in FP32 models; fp32 inside a kernel."""

from collections.abc import Callable
from typing import Any

from engine.device import f32, function, u16, u32
from engine.ptx import bf16_to_f32, f32_to_bf16

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
