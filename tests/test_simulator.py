"""The simulator must show what a GPU would do wrong, and do right what a GPU does right."""

import os

os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numba import cuda as numba_cuda

from engine import ptx, simulator
from engine.device import (
    SIMULATED,
    cuda,
    f32,
    i32,
    kernel,
    ptr,
    static_range,
    to_device,
    u16,
    u32,
    u64,
)
from engine.kernels import gemm_bf16, tree_verify_mla
from engine.warp import block_sum, warp_max

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs NUMBA_ENABLE_CUDASIM=1")
FULL = 0xFFFFFFFF


def on_device(array):
    return numba_cuda.to_device(array)


@kernel(threads=64)
def reverse(x: ptr[i32]):
    tile = cuda.shared.array(64, i32)
    i = u32(cuda.threadIdx.x)
    tile[i] = x[i]
    cuda.syncthreads()
    x[i] = tile[u32(u32(63) - i)]


@kernel(threads=64)
def reverse_without_barrier(x: ptr[i32]):
    tile = cuda.shared.array(64, i32)
    i = u32(cuda.threadIdx.x)
    tile[i] = x[i]
    x[i] = tile[u32(u32(63) - i)]


def test_barrier_orders_shared_memory():
    x = on_device(np.arange(64, dtype=np.int32))
    reverse.launch(1, x)
    np.testing.assert_array_equal(x.copy_to_host(), np.arange(64)[::-1])


@pytest.mark.parametrize("order", [1, -1])
def test_missing_barrier_is_wrong(order):
    x = on_device(np.arange(64, dtype=np.int32))
    with simulator.schedule(order):
        reverse_without_barrier.launch(1, x)
    assert (x.copy_to_host() != np.arange(64)[::-1]).sum() == 32


def test_missing_barrier_depends_on_the_schedule():
    results = []
    for order in (1, -1):
        x = on_device(np.arange(64, dtype=np.int32))
        with simulator.schedule(order):
            reverse_without_barrier.launch(1, x)
        results.append(x.copy_to_host())
    assert not np.array_equal(*results)


@kernel(threads=32)
def divergent_barrier(x: ptr[i32]):
    if u32(cuda.threadIdx.x) < u32(16):
        cuda.syncwarp()
    x[u32(0)] = 1


def test_divergent_collective_is_reported_with_its_threads():
    with pytest.raises(RuntimeError, match=r"deadlock in block \(0, 0, 0\): 16 threads wait"):
        divergent_barrier.launch(1, on_device(np.zeros(1, np.int32)))


@kernel(threads=64)
def early_exit(x: ptr[i32]):
    i = u32(cuda.threadIdx.x)
    if i >= u32(40):
        return
    cuda.syncthreads()
    x[i] = 7


def test_threads_that_returned_count_as_arrived():
    x = on_device(np.zeros(64, np.int32))
    early_exit.launch(1, x)
    assert (x.copy_to_host() == 7).sum() == 40


@kernel(threads=32)
def past_the_end(x: ptr[i32]):
    x[u32(u32(cuda.threadIdx.x) + u32(1))] = 1


def test_write_past_the_end_is_an_index_error_with_its_thread():
    with pytest.raises(IndexError) as caught:
        past_the_end.launch(1, on_device(np.zeros(32, np.int32)))
    assert caught.value.__notes__ == ["in thread (31, 0, 0) of block (0, 0, 0)"]


@kernel(threads=32)
def shared_is_poison(x: ptr[f32]):
    tile = cuda.shared.array(32, f32)
    x[u32(cuda.threadIdx.x)] = tile[u32(cuda.threadIdx.x)]


def test_shared_memory_starts_as_nan():
    x = on_device(np.zeros(32, np.float32))
    shared_is_poison.launch(1, x)
    assert np.isnan(x.copy_to_host()).all()


@kernel(threads=128)
def reduce_block(x: ptr[f32], total: ptr[f32], largest: ptr[f32]):
    partial = cuda.shared.array(4, f32)
    i = u32(cuda.threadIdx.x)
    total[i] = block_sum(x[i], partial, 4)
    largest[i] = warp_max(x[i])


def test_reductions():
    values = np.arange(128, dtype=np.float32)
    x, total, largest = (on_device(np.zeros(128, np.float32)) for _ in range(3))
    x.copy_to_device(values)
    reduce_block.launch(1, x, total, largest)
    np.testing.assert_array_equal(total.copy_to_host(), np.full(128, values.sum()))
    np.testing.assert_array_equal(largest.copy_to_host(), np.repeat(values[31::32], 32))


wait_one, wait_all = ptx.cp_async_wait(1), ptx.cp_async_wait(0)


@kernel(threads=32)
def copy_async(x: ptr[u32], early: ptr[u32], late: ptr[u32]):
    tile = cuda.shared.array(256, u32)
    lane = u32(cuda.threadIdx.x)
    for stage in static_range(2):
        spot = u32(lane * u32(4) + u32(stage * 128))
        ptx.cp_async_16_zfill(ptx.shared_address(tile, spot), ptx.address(x, spot), u32(16))
        ptx.cp_async_commit()
    wait_one()
    early[lane] = tile[u32(lane * u32(4) + u32(128))]
    wait_all()
    late[lane] = tile[u32(lane * u32(4) + u32(128))]


def test_async_copy_lands_only_at_its_wait():
    x = on_device(np.arange(256, dtype=np.uint32))
    early, late = (on_device(np.zeros(32, np.uint32)) for _ in range(2))
    copy_async.launch(1, x, early, late)
    assert (early.copy_to_host() == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(late.copy_to_host(), 128 + 4 * np.arange(32))


mma = ptx.mma_bf16_tiles(1, 1)


@kernel(threads=32)
def one_mma(a: ptr[u16], b: ptr[u16], d: ptr[f32]):
    tile_a = cuda.shared.array(256, u16)
    tile_b = cuda.shared.array(128, u16)
    lane = u32(cuda.threadIdx.x)
    for i in static_range(8):
        tile_a[u32(lane + u32(32 * i))] = a[u32(lane + u32(32 * i))]
    for i in static_range(4):
        tile_b[u32(lane + u32(32 * i))] = b[u32(lane + u32(32 * i))]
    cuda.syncwarp()
    row = u32(u32(lane & u32(15)) * u32(16) + u32(lane >> u32(4)) * u32(8))
    fa = ptx.ldmatrix_x4(ptx.shared_address(tile_a, row))
    row = u32(u32(lane & u32(7)) * u32(16) + u32(u32(lane >> u32(3)) & u32(1)) * u32(8))
    fb = ptx.ldmatrix_x4(ptx.shared_address(tile_b, row))  # both tiles twice
    z = f32(0)
    out = mma((z, z, z, z), fa, fb[:2])
    g, t = u32(lane >> u32(2)), u32(lane & u32(3))
    place = u32(g * u32(8) + t * u32(2))
    d[place], d[u32(place + u32(1))] = out[0], out[1]
    d[u32(place + u32(64))], d[u32(place + u32(65))] = out[2], out[3]


def test_mma_with_ldmatrix_is_a_matrix_product():
    rng = np.random.default_rng(3)
    a = rng.standard_normal((16, 16)).astype(bfloat16)  # [m, k]
    b = rng.standard_normal((8, 16)).astype(bfloat16)  # [n, k]
    d = on_device(np.full((16, 8), np.nan, np.float32))
    one_mma.launch(1, on_device(a), on_device(b), d)
    expected = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)
    np.testing.assert_array_equal(d.copy_to_host(), expected)


def test_integer_casts_wrap_as_on_the_device():
    assert u32(-1) == 0xFFFFFFFF
    assert i32(0x80000000) == -(2**31)
    assert u64(2**64 + 5) == 5
    assert u16(0x12345) == 0x2345


@pytest.mark.parametrize("value", [1.0, -0.0, 3.1415927, 1e-40, np.inf, 65504.0, 1.00390625])
def test_bf16_rounding_is_to_nearest_even(value):
    bits = ptx.f32_to_bf16(np.float32(value))
    assert bits == int(np.float32(value).astype(bfloat16).view(np.uint16))
    assert ptx.f32_to_bits(ptx.bf16_to_f32(bits)) == bits << 16


def test_prmt_against_its_definition():
    assert ptx.prmt(0x33221100, 0x77665544, 0x7531) == 0x77553311
    assert ptx.prmt(0x80, 0, 0x8888) == 0xFFFFFFFF


def test_misaligned_vector_access_is_an_error():
    words = np.arange(8, dtype=np.uint32)
    with pytest.raises(ValueError, match="misaligned"):
        ptx.load_global_v4(ptx.address(words, 1))
    with pytest.raises(IndexError, match="reach outside"):
        ptx.load_global_v4(ptx.address(words, 8))


def test_attention_refuses_a_gpu_with_too_little_shared_memory(monkeypatch):
    monkeypatch.setattr(tree_verify_mla, "shared_limit", lambda: 99 * 1024)

    def zeros(dtype, *shape):
        return to_device(np.zeros(shape, dtype))

    act, integers = bfloat16, np.int32
    with pytest.raises(NotImplementedError, match="shared memory a block, and this GPU has 101376"):
        tree_verify_mla.tree_verify_mla(
            zeros(act, 1, 64, 576), zeros(act, 8, 576), zeros(integers, 1, 1), zeros(integers, 2),
            zeros(integers, 1), zeros(np.uint32, 1, 1), scale=0.1, page_size=8,
            o=zeros(act, 1, 64, 512), partial=zeros(np.float32, 1, 16, 64, 512),
            stats=zeros(np.float32, 1, 16, 64, 2),
        )  # fmt: skip


@pytest.mark.parametrize("limit", [99 * 1024, 227 * 1024])
def test_no_gemm_wants_more_shared_memory_than_the_gpu_has(monkeypatch, limit):
    monkeypatch.setattr(gemm_bf16, "shared_limit", lambda: limit)
    chosen = {
        gemm_bf16._gemm_bf16(**gemm_bf16._tile(n, m, blocks, stages))
        for n in (64, 384, 576, 1536, 7168, 12288)
        for m in (1, 16, 33, 64, 65, 256)
        for blocks in (1, 3, 64)
        for stages in (1, 2, 8)
    }
    chosen |= {
        gemm_bf16._gemm_resident(stages=stages, **tile)
        for m in (1, 16, 33, 64, 65, 256)
        for stages in (1, 2, 4, 8)
        if (tile := gemm_bf16._resident_tile(m, stages))
    }
    assert max(kernel.dynamic_shared for kernel in chosen) <= limit
