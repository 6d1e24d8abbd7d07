"""Reductions over a warp and over a block, in one fixed order whatever the data; and keys of floats
for the reductions that know integers alone."""

from engine.device import cuda, f32, function, static_range, u32

FULL = 0xFFFFFFFF
SIGN = 0x80000000


@function
def order_key(bits):
    """u32 that orders as the f32 of these bits; -0 below 0."""
    return u32(bits ^ u32(FULL)) if bits >= u32(SIGN) else u32(bits | u32(SIGN))


@function
def bits_of_key(key):
    """The bits that `order_key` had."""
    return u32(key ^ u32(SIGN)) if key >= u32(SIGN) else u32(key ^ u32(FULL))


@function
def warp_sum(value):
    """Sum of an f32 over the 32 lanes, the same bits in every lane (a butterfly)."""
    for step in static_range(5):
        value = f32(value + cuda.shfl_xor_sync(FULL, value, 16 >> step))
    return value


@function
def warp_max(value):
    """Largest f32 over the 32 lanes, in every lane."""
    for step in static_range(5):
        value = max(value, cuda.shfl_xor_sync(FULL, value, 16 >> step))
    return value


@function
def block_sum(value, partial, warps):
    """Sum over the block, the same bits in every thread. partial: shared f32 [warps].

    Warps are added in ascending order, so the result depends on the block size alone. Ends with a
    barrier: `partial` may be used again at once.
    """
    value = warp_sum(value)
    thread = u32(cuda.threadIdx.x)
    if thread & u32(31) == u32(0):
        partial[thread >> u32(5)] = value
    cuda.syncthreads()
    total = f32(0)
    for w in range(warps):
        total = f32(total + partial[u32(w)])
    cuda.syncthreads()
    return total
