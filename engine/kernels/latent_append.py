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
from engine.device import (
    cdiv,
    check,
    cuda,
    f32,
    family,
    i32,
    i64,
    kernel,
    ptr,
    static_range,
    u32,
    u64,
)
from engine.ptx import advance, fma, pdl_launch_dependents, pdl_wait
from engine.warp import block_sum

THREADS = 256
WARPS = THREADS // 32
NO_SUCH_POSITION, NO_SUCH_SLOT = 1, 2


@family(
    {"bf16": True, "parts": 1, "q_rank": 96, "rank": 64, "pairs": 8},  # tiny
    {"bf16": True, "parts": 1, "q_rank": 64, "rank": 128, "pairs": 16},  # tiny2
    {"bf16": True, "parts": 7, "q_rank": 1536, "rank": 512, "pairs": 32},  # K2.6
    {"bf16": False, "parts": 1, "q_rank": 96, "rank": 64, "pairs": 8},
    {"bf16": False, "parts": 1, "q_rank": 64, "rank": 128, "pairs": 16},
)
def _latent_append(*, bf16: bool, parts: int, q_rank: int, rank: int, pairs: int):
    load, store = activation.load(bf16), activation.store(bf16)
    rounded = activation.rounded(bf16)
    WIDTH, LATENT_END = q_rank + rank + 2 * pairs, q_rank + rank
    TURNS = cdiv(WIDTH, THREADS)  # columns of a thread

    @kernel(threads=THREADS, registers=128, dependent_launch=True)
    def latent_append(
        qkv: ptr[f32],  # [parts, rows, q_rank + rank + 2 pairs]
        q_weight: ptr[activation.element(bf16)],  # [q_rank]
        kv_weight: ptr[activation.element(bf16)],  # [rank]
        cos: ptr[f32],  # [positions, pairs]
        sin: ptr[f32],  # [positions, pairs]
        position: ptr[i32],  # [rows]
        slot: ptr[i64],  # [rows]
        eps: f32,
        part_size: u32,  # rows * (q_rank + rank + 2 pairs)
        positions: u32,
        slots: u64,
        q: ptr[activation.element(bf16)],  # [rows, q_rank], out
        cache: ptr[activation.element(bf16)],  # [slots, rank + 2 pairs], in and out
        status: ptr[i32],  # [rows], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        partial = cuda.shared.array(WARPS, f32)
        values = cuda.shared.array(WIDTH, f32)  # the row
        row = u32(cuda.blockIdx.x)
        thread = u32(cuda.threadIdx.x)
        q_squares = f32(0)
        kv_squares = f32(0)
        # Unrolled and held back from shared memory, so that all loads are in flight at once.
        held = cuda.local.array(TURNS, f32)
        for turn in static_range(TURNS):
            i = u32(thread + u32(THREADS * turn))
            if THREADS * (turn + 1) > WIDTH:
                i = min(i, u32(WIDTH - 1))
            at = u32(u32(row * u32(WIDTH)) + i)
            value = qkv[at]
            for part in static_range(1, parts):
                value = f32(value + qkv[u32(at + u32(u32(part) * part_size))])
            held[turn] = value
        for turn in static_range(TURNS):
            i = u32(thread + u32(THREADS * turn))
            if THREADS * (turn + 1) <= WIDTH or i < u32(WIDTH):
                value = rounded(held[turn])
                values[i] = value
                if i < u32(q_rank):
                    q_squares = f32(q_squares + value * value)
                elif i < u32(LATENT_END):
                    kv_squares = f32(kv_squares + value * value)
        q_squares = block_sum(q_squares, partial, WARPS)
        kv_squares = block_sum(kv_squares, partial, WARPS)
        q_scale = f32(f32(1) / f32(math.sqrt(f32(q_squares / f32(u32(q_rank)) + eps))))
        kv_scale = f32(f32(1) / f32(math.sqrt(f32(kv_squares / f32(u32(rank)) + eps))))

        place = u32(position[row])
        target = u64(slot[row])  # a negative slot is a large one
        code = i32(0)
        if place >= positions:
            code = i32(NO_SUCH_POSITION)
        elif target >= slots:
            code = i32(NO_SUCH_SLOT)
        if thread == u32(0):
            status[row] = code
        for turn in static_range(cdiv(q_rank, THREADS)):
            i = u32(thread + u32(THREADS * turn))
            if THREADS * (turn + 1) <= q_rank or i < u32(q_rank):
                value = f32(f32(values[i] * q_scale) * load(q_weight, i))
                store(q, u32(u32(row * u32(q_rank)) + i), value)
        if code == i32(0):
            entry = advance(cache, u64(target * u64(WIDTH - q_rank)))
            for turn in static_range(cdiv(rank, THREADS)):
                i = u32(thread + u32(THREADS * turn))
                if THREADS * (turn + 1) <= rank or i < u32(rank):
                    value = values[u32(u32(q_rank) + i)]
                    store(entry, i, f32(f32(value * kv_scale) * load(kv_weight, i)))
            i = thread
            while i < u32(pairs):
                at = u32(u32(LATENT_END) + u32(i * u32(2)))
                a, b = values[at], values[u32(at + u32(1))]
                c = cos[u32(u32(place * u32(pairs)) + i)]
                s = sin[u32(u32(place * u32(pairs)) + i)]
                to = u32(u32(rank) + u32(i * u32(2)))
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
    made = _latent_append(
        bf16=activation.is_bf16(q), parts=parts, q_rank=q_rank, rank=rank, pairs=pairs
    )
    made.launch(
        rows, qkv, q_weight, kv_weight, cos, sin, position, slot, eps, rows * width,
        dims["positions"], dims["slots"], q, cache, status, stream=stream,
    )  # fmt: skip
