"""What one thread, or a warp with one value a lane, computes in one instruction; and PDL.

bfloat16 values are their 16 bits in a u32. Source: PTX ISA 9.0, "cvt", "ex2", "fma", "prmt",
"redux.sync", "griddepcontrol". Not alike to the bit: ex2.approx is within 2 ulp, the simulator's
exp2 is correctly rounded as good as always. Both give 0 for what is below 2^-126.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from engine.device import f32, u32, u64
from engine.ptx.intrinsic import instruction, simulator

MASK = 0xFFFFFFFF


def _to_f32(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def _to_bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _to_bf16(value: np.float32) -> int:
    bits = _to_bits(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF  # the canonical NaN of cvt
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


bits_to_f32 = instruction("mov.b32 $0, $1;", [f32], [u32], _to_f32)
f32_to_bits = instruction("mov.b32 $0, $1;", [u32], [f32], _to_bits)
bf16_to_f32 = instruction(
    "shl.b32 $0, $1, 16;", [f32], [u32], lambda b: _to_f32(int(b) << 16 & MASK)
)
bf16x2_low = bf16_to_f32
bf16x2_high = instruction(
    "and.b32 $0, $1, 0xffff0000;", [f32], [u32], lambda b: _to_f32(int(b) & 0xFFFF0000)
)
f32_to_bf16 = instruction(
    "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", [u32], [f32], _to_bf16
)
pack_bf16x2 = instruction(
    "cvt.rn.bf16x2.f32 $0, $2, $1;",
    [u32],
    [f32, f32],
    lambda low, high: _to_bf16(low) | _to_bf16(high) << 16,
)


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """One rounding: the float64 sum is rounded to odd, so that no tie is made on the way."""
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)  # what the sum lost, exactly
    if rest and not math.isnan(rest) and not int(np.float64(total).view(np.uint64)) & 1:
        total = math.nextafter(total, math.copysign(math.inf, rest))
    return np.float32(total)


def _exp2(x: np.float32) -> np.float32:
    value = np.exp2(np.float32(x))
    return np.float32(0) if value < 2.0**-126 else value


def _prmt(a: int, b: int, selector: int) -> int:
    source = int(a).to_bytes(4, "little") + int(b).to_bytes(4, "little")
    result = 0
    for i in range(4):
        pick = int(selector) >> 4 * i & 0xF
        byte = source[pick & 7]
        if pick & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * i
    return result


exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", [f32], [f32], _exp2)
fma = instruction("fma.rn.f32 $0, $1, $2, $3;", [f32], [f32] * 3, _fma)
popc = instruction("popc.b32 $0, $1;", [u32], [u32], lambda bits: int(bits).bit_count())
mul_high_u64 = instruction(
    "mul.hi.u64 $0, $1, $2;", [u64], [u64, u64], lambda a, b: int(a) * int(b) >> 64
)
prmt = instruction("prmt.b32 $0, $1, $2, $3;", [u32], [u32] * 3, _prmt)


def _redux(name: str, fold: Callable[[Iterable[int]], int]) -> Callable:
    """Makes an intrinsic: one value of all lanes, in every lane."""

    def combine(values: dict[int, int]) -> dict[int, int]:
        return dict.fromkeys(values, fold(values.values()) & MASK)

    return instruction(
        f"redux.sync.{name}.u32 $0, $1, 0xffffffff;",
        [u32],
        [u32],
        lambda value: simulator.collective(MASK, int(value), combine),
        volatile=True,
    )


warp_max_u32, warp_min_u32, warp_sum_u32 = (
    _redux("max", max),
    _redux("min", min),
    _redux("add", sum),
)


def _one_after_the_other() -> None:
    """Launches of the simulator do not overlap."""


# Programmatic dependent launch: let the next kernel begin; wait until those before are done.
pdl_launch_dependents = instruction(
    "griddepcontrol.launch_dependents;", [], [], _one_after_the_other, memory=True
)
pdl_wait = instruction("griddepcontrol.wait;", [], [], _one_after_the_other, memory=True)
