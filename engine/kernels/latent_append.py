"""What follows the first MLA projection: norm of the query latent, and this token's cache row.

A row of qkv is the sum, in ascending order, of the projection's parts (ranges of K), rounded to an
activation: q_a [q_rank] | c [rank] | r [2 pairs]. Then
  q = rms_norm(q_a) * q_weight                    for the projection to heads,
  cache[slot] = rms_norm(c) * kv_weight | rope(r, position)
Norms and rotation in fp32, one rounding each at the store. One block a row: its bits depend on the
shapes alone. status[row] is 0, 1 for a position outside the tables, 2 for a slot outside the cache
(-1 where no page was mapped); nothing of that row goes to the cache then.
"""

import math

from engine import activation
from engine.device import check, cuda, f32, family, i32, i64, kernel, ptr, u32, u64
from engine.ptx import advance, fma, pdl_launch_dependents, pdl_wait
from engine.warp import block_sum

THREADS = 256
WARPS = THREADS // 32
NO_SUCH_POSITION, NO_SUCH_SLOT = 1, 2


@family({"bf16": True}, {"bf16": False})
def _latent_append(*, bf16: bool):
    load, store = activation.load(bf16), activation.store(bf16)
    rounded = activation.rounded(bf16)

    @kernel(threads=THREADS, registers=48, dependent_launch=True)
    def latent_append(
        qkv: ptr[f32],  # [parts, rows, q_rank + rank + 2 pairs]
        q_weight: ptr[activation.element(bf16)],  # [q_rank]
        kv_weight: ptr[activation.element(bf16)],  # [rank]
        cos: ptr[f32],  # [positions, pairs]
        sin: ptr[f32],  # [positions, pairs]
        position: ptr[i32],  # [rows]
        slot: ptr[i64],  # [rows]
        eps: f32,
        parts: u32,
        part_size: u32,  # rows * (q_rank + rank + 2 pairs)
        q_rank: u32,
        rank: u32,
        positions: u32,
        pairs: u32,
        slots: u64,
        q: ptr[activation.element(bf16)],  # [rows, q_rank], out
        cache: ptr[activation.element(bf16)],  # [slots, rank + 2 pairs], in and out
        status: ptr[i32],  # [rows], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        partial = cuda.shared.array(WARPS, f32)
        values = cuda.shared.array(0, f32)  # [q_rank + rank + 2 pairs], the row
        row = u32(cuda.blockIdx.x)
        thread = u32(cuda.threadIdx.x)
        width = u32(u32(q_rank + rank) + u32(pairs * u32(2)))
        latent_end = u32(q_rank + rank)
        q_squares = f32(0)
        kv_squares = f32(0)
        i = thread
        while i < width:
            at = u32(u32(row * width) + i)
            value = qkv[at]
            part = u32(1)
            while part < parts:
                value = f32(value + qkv[u32(at + u32(part * part_size))])
                part = u32(part + u32(1))
            value = rounded(value)
            values[i] = value
            if i < q_rank:
                q_squares = f32(q_squares + value * value)
            elif i < latent_end:
                kv_squares = f32(kv_squares + value * value)
            i = u32(i + u32(THREADS))
        q_squares = block_sum(q_squares, partial, WARPS)
        kv_squares = block_sum(kv_squares, partial, WARPS)
        q_scale = f32(f32(1) / f32(math.sqrt(f32(q_squares / f32(q_rank) + eps))))
        kv_scale = f32(f32(1) / f32(math.sqrt(f32(kv_squares / f32(rank) + eps))))

        place = u32(position[row])
        target = u64(slot[row])  # a negative slot is a large one
        code = i32(0)
        if place >= positions:
            code = i32(NO_SUCH_POSITION)
        elif target >= slots:
            code = i32(NO_SUCH_SLOT)
        if thread == u32(0):
            status[row] = code
        i = thread
        while i < q_rank:
            value = f32(f32(values[i] * q_scale) * load(q_weight, i))
            store(q, u32(u32(row * q_rank) + i), value)
            i = u32(i + u32(THREADS))
        if code == i32(0):
            entry = advance(cache, u64(target * u64(u32(width - q_rank))))
            i = thread
            while i < rank:
                value = f32(f32(values[u32(q_rank + i)] * kv_scale) * load(kv_weight, i))
                store(entry, i, value)
                i = u32(i + u32(THREADS))
            i = thread
            while i < pairs:
                at = u32(latent_end + u32(i * u32(2)))
                a, b = values[at], values[u32(at + u32(1))]
                c = cos[u32(u32(place * pairs) + i)]
                s = sin[u32(u32(place * pairs) + i)]
                to = u32(rank + u32(i * u32(2)))
                store(entry, to, fma(a, c, f32(-f32(b * s))))
                store(entry, u32(to + u32(1)), fma(b, c, f32(a * s)))
                i = u32(i + u32(THREADS))

    return latent_append


def latent_append(
    qkv,
    q_weight,
    kv_weight,
    cos,
    sin,
    position,
    slot,
    *,
    eps: float,
    q,
    cache,
    status,
    stream=None,
) -> None:
    """qkv [parts, rows, q_rank + rank + 2 pairs] fp32; q_weight [q_rank], kv_weight [rank],
    q [rows, q_rank], cache [slots, rank + 2 pairs] all bf16 or all fp32; cos, sin
    [positions, pairs] fp32; position [rows] int32, slot [rows] int64, status [rows] int32."""
    dims = check(
        "latent_append",
        qkv=(qkv, "parts rows width", "float32"),
        q_weight=(q_weight, "q_rank", activation.ACTIVATIONS),
        kv_weight=(kv_weight, "rank", str(q_weight.dtype)),
        cos=(cos, "positions pairs", "float32"),
        sin=(sin, "positions pairs", "float32"),
        position=(position, "rows", "int32"),
        slot=(slot, "rows", "int64"),
        q=(q, "rows q_rank", str(q_weight.dtype)),
        cache=(cache, "slots entry", str(q_weight.dtype)),
        status=(status, "rows", "int32"),
    )
    parts, rows, width = dims["parts"], dims["rows"], dims["width"]
    q_rank, rank, pairs = dims["q_rank"], dims["rank"], dims["pairs"]
    if not parts or width != q_rank + rank + 2 * pairs or dims["entry"] != rank + 2 * pairs:
        raise ValueError(
            f"latent_append: qkv is [{parts}, {rows}, {width}] and a cache row {dims['entry']}, "
            f"expected [parts >= 1, {rows}, {q_rank + rank + 2 * pairs}] and {rank + 2 * pairs}"
        )
    if 4 * width > 40 * 1024:
        raise NotImplementedError(f"latent_append: a row of {width} does not fit shared memory")
    _latent_append(bf16=activation.is_bf16(q)).launch(
        rows, qkv, q_weight, kv_weight, cos, sin, position, slot, eps, parts, rows * width, q_rank,
        rank, dims["positions"], pairs, dims["slots"], q, cache, status,
        stream=stream, dynamic_shared=4 * width,
    )  # fmt: skip
