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
from engine.ptx import address, advance, fma, pdl_launch_dependents, pdl_wait
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
    rounded, read4 = activation.rounded(bf16), activation.load4(False)
    WIDTH, LATENT_END = q_rank + rank + 2 * pairs, q_rank + rank
    TURNS = cdiv(WIDTH, 4 * THREADS)  # a thread takes every 256th four columns
    COLUMNS = 4 * TURNS
    FACTORS = cdiv(q_rank, THREADS) + cdiv(rank, THREADS)
    Q_TURNS, KV_TURNS = cdiv(q_rank, THREADS), cdiv(rank, THREADS)

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
        partial = cuda.shared.array(WARPS, f32)
        values = cuda.shared.array(WIDTH, f32)  # the row
        factors = cuda.local.array(FACTORS, f32)
        held = cuda.local.array(COLUMNS, f32)
        row = u32(cuda.blockIdx.x)
        thread = u32(cuda.threadIdx.x)
        for turn in static_range(Q_TURNS):  # weights: known before the previous kernel is done
            i = min(u32(thread + u32(THREADS * turn)), u32(q_rank - 1))
            factors[turn] = load(q_weight, i)
        for turn in static_range(KV_TURNS):
            i = min(u32(thread + u32(THREADS * turn)), u32(rank - 1))
            factors[Q_TURNS + turn] = load(kv_weight, i)
        pdl_wait()
        place = u32(position[row])
        target = u64(slot[row])  # a negative slot is a large one
        q_squares = f32(0)
        kv_squares = f32(0)
        # Unrolled and held back from shared memory, so that all loads are in flight at once.
        source = address(qkv, u64(u64(row) * u64(WIDTH)))
        for turn in static_range(TURNS):
            i = u32(u32(thread + u32(THREADS * turn)) * u32(4))
            if 4 * THREADS * (turn + 1) > WIDTH:
                i = min(i, u32(WIDTH - 4))
            here = u64(source + u64(u64(i) * u64(4)))
            four = read4(here)
            for part in static_range(1, parts):
                more = read4(u64(here + u64(u64(part_size) * u64(4 * part))))
                four = (
                    f32(four[0] + more[0]),
                    f32(four[1] + more[1]),
                    f32(four[2] + more[2]),
                    f32(four[3] + more[3]),
                )
            for j in static_range(4):
                held[4 * turn + j] = four[j]
        code = i32(0)
        if place >= positions:
            code = i32(NO_SUCH_POSITION)
        elif target >= slots:
            code = i32(NO_SUCH_SLOT)
        turned_by = u32(u32(min(place, u32(positions - u32(1))) * u32(pairs)) + thread)
        c = f32(0)
        s = f32(0)
        if thread < u32(pairs):
            c = cos[turned_by]
            s = sin[turned_by]
        for turn in static_range(TURNS):
            i = u32(u32(thread + u32(THREADS * turn)) * u32(4))
            if 4 * THREADS * (turn + 1) <= WIDTH or i < u32(WIDTH):
                for j in static_range(4):
                    value = rounded(held[4 * turn + j])
                    values[u32(i + u32(j))] = value
                    if i < u32(q_rank):
                        q_squares = f32(q_squares + value * value)
                    elif i < u32(LATENT_END):
                        kv_squares = f32(kv_squares + value * value)
        q_squares = block_sum(q_squares, partial, WARPS)
        kv_squares = block_sum(kv_squares, partial, WARPS)
        q_scale = f32(f32(1) / f32(math.sqrt(f32(q_squares / f32(u32(q_rank)) + eps))))
        kv_scale = f32(f32(1) / f32(math.sqrt(f32(kv_squares / f32(u32(rank)) + eps))))

        if thread == u32(0):
            status[row] = code
        for turn in static_range(Q_TURNS):
            i = u32(thread + u32(THREADS * turn))
            if THREADS * (turn + 1) <= q_rank or i < u32(q_rank):
                value = f32(f32(values[i] * q_scale) * factors[turn])
                store(q, u32(u32(row * u32(q_rank)) + i), value)
        if code == i32(0):
            entry = advance(cache, u64(target * u64(WIDTH - q_rank)))
            for turn in static_range(KV_TURNS):
                i = u32(thread + u32(THREADS * turn))
                if THREADS * (turn + 1) <= rank or i < u32(rank):
                    value = f32(values[u32(u32(q_rank) + i)] * kv_scale)
                    store(entry, i, f32(value * factors[Q_TURNS + turn]))
            if thread < u32(pairs):
                at = u32(u32(LATENT_END) + u32(thread * u32(2)))
                a, b = values[at], values[u32(at + u32(1))]
                to = u32(u32(rank) + u32(thread * u32(2)))
                store(entry, to, fma(a, c, f32(-f32(b * s))))
                store(entry, u32(to + u32(1)), fma(b, c, f32(a * s)))

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
    [positions, pairs] fp32; position [rows] int32, slot [rows] int64, status [rows] int32.
    NotImplementedError for a part of qkv, or tables, of 2^32 elements."""
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
    if not dims["positions"]:
        raise ValueError("latent_append: cos has no position")
    if pairs > THREADS:
        raise NotImplementedError(f"latent_append: {pairs} pairs to rotate, at most {THREADS}")
    if q_rank % 4 or rank % 4 or pairs % 2:
        raise NotImplementedError(
            f"latent_append: {q_rank}, {rank} and {2 * pairs} columns, expected multiples of 4"
        )
    if 4 * width > 40 * 1024:
        raise NotImplementedError(f"latent_append: a row of {width} does not fit shared memory")
    for name, count in (("a part of qkv", rows * width), ("cos", dims["positions"] * pairs)):
        if count >= 2**32:
            raise NotImplementedError(f"latent_append: {name} has 2^32 elements or more")
    made = _latent_append(
        bf16=activation.is_bf16(q), parts=parts, q_rank=q_rank, rank=rank, pairs=pairs
    )
    made.launch(
        rows, qkv, q_weight, kv_weight, cos, sin, position, slot, eps, rows * width,
        dims["positions"], dims["slots"], q, cache, status, stream=stream,
    )  # fmt: skip
