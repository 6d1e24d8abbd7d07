"""What follows a drafter's projection: head-wise norm, half rotation, and rows of keys and values.

A row of qkv is the sum, in ascending order, of the projection's parts (ranges of K), rounded to
bf16: queries of all heads, keys, values, each head of `size` columns. Per head of queries and of
  keys n = x / sqrt(mean(x^2) + eps) * weight,   (a, b) = (n_i, n_{i + size/2})  ->
  (a cos_i - b sin_i, b cos_i + a sin_i)    with the tables' row `position`
in fp32, rounded once at the store: queries to q, keys and values to cache[slot] = (k of all heads,
v of all heads). A context row has no queries. One warp a head, so that its bits follow from the row
and `size` alone. A row of slot -1 is padding: nothing of it goes to the cache, its queries are 0.
status[row] is 0, 1 for a position outside the tables, 2 for a slot outside the cache (not -1); such
a row is treated like padding.
"""

import math

from engine.device import cdiv, check, cuda, f32, i32, i64, kernel, ptr, static_range, u16, u32, u64
from engine.ptx import advance, bf16_to_f32, f32_to_bf16, fma, pdl_launch_dependents, pdl_wait
from engine.warp import warp_sum

THREADS = 128
WARPS = THREADS // 32
MAX_SIZE = 256  # of a head
PAIRS = MAX_SIZE // 2 // 32  # that a lane holds at most
NO_SUCH_POSITION, NO_SUCH_SLOT = 1, 2


@kernel(threads=THREADS, registers=64, dependent_launch=True)
def _draft_append(
    qkv: ptr[f32],  # [parts, rows, (heads + 2 groups) size]
    q_weight: ptr[u16],  # [size]
    k_weight: ptr[u16],  # [size]
    cos: ptr[f32],  # [positions, size / 2]
    sin: ptr[f32],  # [positions, size / 2]
    position: ptr[i32],  # [rows]
    slot: ptr[i64],  # [rows]
    eps: f32,
    parts: u32,
    part_size: u64,  # rows * (heads + 2 groups) * size
    heads: u32,
    groups: u32,
    size: u32,
    positions: u32,
    slots: u64,
    q: ptr[u16],  # [rows, heads, size], out
    cache: ptr[u16],  # [slots, 2 groups size], in and out
    status: ptr[i32],  # [rows], out
):
    pdl_launch_dependents()
    pdl_wait()
    row = u32(cuda.blockIdx.y)
    thread = u32(cuda.threadIdx.x)
    lane = u32(thread & u32(31))
    head = u32(u32(u32(cuda.blockIdx.x) * u32(WARPS)) + u32(thread >> u32(5)))
    place = u32(position[row])
    target = u64(slot[row])  # a negative slot is a large one
    padding = i64(slot[row]) == i64(-1)
    code = i32(0)
    if not padding:
        if place >= positions:
            code = i32(NO_SUCH_POSITION)
        elif target >= slots:
            code = i32(NO_SUCH_SLOT)
    if head == u32(0) and lane == u32(0):
        status[row] = code
    all_heads = u32(heads + u32(groups * u32(2)))
    if head >= all_heads:
        return
    sound = code == i32(0) and not padding
    half = u32(size >> u32(1))
    a = cuda.local.array(PAIRS, f32)
    b = cuda.local.array(PAIRS, f32)
    source = advance(qkv, u64(u64(u64(row) * u64(all_heads) + u64(head)) * u64(size)))
    squares = f32(0)
    for j in static_range(PAIRS):
        a[j] = f32(0)
        b[j] = f32(0)
        i = u32(lane + u32(32 * j))
        if i < half:
            first = source[i]
            second = source[u32(i + half)]
            part = u32(1)
            while part < parts:
                more = advance(source, u64(u64(part) * part_size))
                first = f32(first + more[i])
                second = f32(second + more[u32(i + half)])
                part = u32(part + u32(1))
            a[j] = bf16_to_f32(f32_to_bf16(first))
            b[j] = bf16_to_f32(f32_to_bf16(second))
        squares = f32(squares + f32(a[j] * a[j]))
        squares = f32(squares + f32(b[j] * b[j]))
    squares = warp_sum(squares)
    scale = f32(f32(1) / f32(math.sqrt(f32(squares / f32(size) + eps))))
    is_query = head < heads
    is_value = head >= u32(heads + groups)
    weight = q_weight if is_query else k_weight
    table = u32((place if sound else u32(0)) * half)
    for j in static_range(PAIRS):
        i = u32(lane + u32(32 * j))
        if i < half:
            first, second = a[j], b[j]
            if not is_value:
                x = f32(f32(first * scale) * bf16_to_f32(u32(weight[i])))
                y = f32(f32(second * scale) * bf16_to_f32(u32(weight[u32(i + half)])))
                c, s = cos[u32(table + i)], sin[u32(table + i)]
                first = fma(x, c, f32(-f32(y * s)))
                second = fma(y, c, f32(x * s))
            if is_query:
                into = advance(q, u64(u64(u64(row) * u64(heads) + u64(head)) * u64(size)))
                into[i] = u16(f32_to_bf16(first if sound else f32(0)))
                into[u32(i + half)] = u16(f32_to_bf16(second if sound else f32(0)))
            elif sound:
                entry = u64(target * u64(u32(groups * u32(2))))
                entry = u64(entry + u64(u32(head - heads)))
                into = advance(cache, u64(entry * u64(size)))
                into[i] = u16(f32_to_bf16(first))
                into[u32(i + half)] = u16(f32_to_bf16(second))


def draft_append(
    qkv, q_weight, k_weight, cos, sin, position, slot, *, eps: float, q, cache, status, stream=None
) -> None:
    """qkv [parts, rows, (heads + 2 groups) size] fp32; q_weight, k_weight [size], q
    [rows, heads, size] and cache [slots, 2 groups size] bf16; cos, sin [positions, size / 2] fp32;
    position int32, slot int64, status int32 [rows]. An even size of at most 256 and
    tables below 2^32 elements, else NotImplementedError."""
    dims = check(
        "draft_append",
        qkv=(qkv, "parts rows width", "float32"),
        q_weight=(q_weight, "size", "bfloat16"),
        q=(q, "rows heads size", "bfloat16"),
    )
    _append(qkv, q_weight, k_weight, cos, sin, position, slot, eps, dims["heads"], q, cache, status,
            stream)  # fmt: skip


def draft_append_context(
    kv, k_weight, cos, sin, position, slot, *, eps: float, cache, status, stream=None
) -> None:
    """The same for rows without queries: kv [parts, rows, 2 groups size] fp32."""
    _append(kv, k_weight, k_weight, cos, sin, position, slot, eps, 0, cache, cache, status, stream)


def _append(
    qkv, q_weight, k_weight, cos, sin, position, slot, eps, heads, q, cache, status, stream
) -> None:
    dims = check(
        "draft_append",
        qkv=(qkv, "parts rows width", "float32"),
        k_weight=(k_weight, "size", "bfloat16"),
        cos=(cos, "positions half", "float32"),
        sin=(sin, "positions half", "float32"),
        position=(position, "rows", "int32"),
        slot=(slot, "rows", "int64"),
        cache=(cache, "slots entry", "bfloat16"),
        status=(status, "rows", "int32"),
    )
    parts, rows, width, size = dims["parts"], dims["rows"], dims["width"], dims["size"]
    if not size:
        raise ValueError("draft_append: k_weight is empty, expected the columns of a head")
    groups = dims["entry"] // (2 * size)
    if not parts or 2 * dims["half"] != size or width != (heads + 2 * groups) * size:
        raise ValueError(
            f"draft_append: qkv {tuple(qkv.shape)}, tables of {dims['half']} pairs and a cache row "
            f"of {dims['entry']} do not fit {heads} query heads of {size}"
        )
    if dims["entry"] != 2 * groups * size or not groups:
        raise ValueError(
            f"draft_append: a cache row of {dims['entry']}, expected a multiple of {2 * size}"
        )
    if not dims["positions"]:
        raise ValueError("draft_append: cos has no position")
    if size > MAX_SIZE:
        raise NotImplementedError(f"draft_append: heads of {size}, more than {MAX_SIZE}")
    if dims["positions"] * dims["half"] >= 2**32:
        raise NotImplementedError(f"draft_append: cos {cos.shape} has 2^32 elements or more")
    _draft_append.launch(
        (cdiv(heads + 2 * groups, WARPS), rows), qkv, q_weight, k_weight, cos, sin, position, slot,
        eps, parts, rows * width, heads, groups, size, dims["positions"], dims["slots"], q, cache,
        status, stream=stream,
    )  # fmt: skip
