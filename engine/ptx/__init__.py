"""Every inline-PTX intrinsic of the engine, each beside its stand-in for the simulator.

A name means the same in both: on a GPU it is one PTX statement in LLVM inline assembly, in the
simulator Python that does what the PTX ISA says that statement does.

  intrinsic  how one is made of its two halves
  scalar     bits, roundings and arithmetic of a thread; reductions of a warp; dependent launch
  memory     addresses, loads, stores
  copies     copies that run beside the code, and their barriers
  mma        the warp's tensor core product, its fragments, and tuples of registers
  wgmma      the warpgroup's, of bf16 in shared memory
  int4       INT4 weights in registers, for both
"""

from engine.ptx.copies import (
    copy_bulk,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    fence_async,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
)
from engine.ptx.int4 import int4_factors, mma_int4, wgmma_int4
from engine.ptx.memory import (
    address,
    advance,
    load_global_u16,
    load_global_u32,
    load_global_v2,
    load_global_v4,
    load_global_v4_or_zero,
    load_rows,
    load_rows_u16,
    load_shared_v2,
    load_shared_v4,
    shared_address,
    store_global_u16,
    store_global_u32,
    store_global_v2,
    store_global_v4,
    store_shared_u32,
    store_shared_v2,
    store_shared_v4,
)
from engine.ptx.mma import (
    add_f32,
    fma_dot4,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_bf16_slice,
    mma_bf16_tiles,
    scale_rows,
    zeros,
)
from engine.ptx.scalar import (
    bf16_to_f32,
    bf16x2_high,
    bf16x2_low,
    bits_to_f32,
    exp2,
    f32_to_bf16,
    f32_to_bits,
    fma,
    mul_high_u64,
    pack_bf16x2,
    pdl_launch_dependents,
    pdl_wait,
    popc,
    prmt,
    warp_max_u32,
    warp_min_u32,
    warp_sum_u32,
)
from engine.ptx.wgmma import has_wgmma, matrix_descriptor, wgmma_bf16
