"""One token a row drawn from softmax(logits / temperature), decided by integers.

The weight of a token is e^(x - max x), x = fp32(logit / temperature), as an integer in units of
2^-44, with the arithmetic of draft_top_k. u is 64 random bits: SplitMix64's finaliser over seed,
request and position in turn (Steele, Lea and Flood, OOPSLA 2014). The first token whose cumulated
weight exceeds floor(u * total / 2^64) is drawn. Sums of integers have no order, so the token
follows from the row's logits and its key alone, not from where the row stands in a batch or tree.

A block a row. Each warp owns a range of neighbouring tokens and sums its weights; the totals tell
in which range the draw falls, and that warp goes over its range once more, 32 tokens at a time.

status[row]: 0; 1 = a NaN or +inf after the division; 2 = every logit is -inf. token is -1 then.
"""

import math

from engine.device import cdiv, check, cuda, f32, function, i32, kernel, ptr, static_range, u32, u64
from engine.kernels.draft_top_k import UNIT, _exponential, _warp_sum_u64
from engine.ptx import (
    advance,
    mul_high_u64,
    pdl_launch_dependents,
    pdl_wait,
)
from engine.warp import FULL, warp_max

THREADS = 512
WARPS = THREADS // 32
NOT_A_NUMBER, ALL_MINUS_INFINITY = 1, 2


@function
def _mixed(z):
    z = u64(z + u64(0x9E3779B97F4A7C15))
    z = u64(u64(z ^ u64(z >> u64(30))) * u64(0xBF58476D1CE4E5B9))
    z = u64(u64(z ^ u64(z >> u64(27))) * u64(0x94D049BB133111EB))
    return u64(z ^ u64(z >> u64(31)))


@function
def _weight(x, top):
    """e^(x - top) in units of 2^-44."""
    mantissa, shift = _exponential(f32(x - top))
    return u64(u64(u64(mantissa) << u64(UNIT - 23)) >> u64(shift))


@function
def _shifted_up(value, by):
    """The u64 of the lane `by` below, by < 32; a lane's own where there is none."""
    low = u32(cuda.shfl_up_sync(FULL, i32(value & u64(FULL)), by))
    high = u32(cuda.shfl_up_sync(FULL, i32(value >> u64(32)), by))
    return u64(u64(u64(high) << u64(32)) | u64(low))


@kernel(threads=THREADS, registers=64, dependent_launch=True)
def _sample(
    logits: ptr[f32],  # [rows, vocabulary]
    request: ptr[i32],  # [rows]
    position: ptr[i32],  # [rows]
    temperature: f32,
    seed: u64,
    vocabulary: u32,
    share: u32,  # tokens of a warp, a multiple of 32
    token: ptr[i32],  # [rows], out
    status: ptr[i32],  # [rows], out
):
    pdl_launch_dependents()
    pdl_wait()
    warp_top = cuda.shared.array(WARPS, f32)
    warp_total = cuda.shared.array(WARPS, u64)
    row, thread = u32(cuda.blockIdx.x), u32(cuda.threadIdx.x)
    warp, lane = u32(thread >> u32(5)), u32(thread & u32(31))
    source = advance(logits, u64(u64(row) * u64(vocabulary)))
    first = u32(warp * share)
    last = min(vocabulary, u32(first + share))
    top = f32(-math.inf)
    bad = False
    i = u32(first + lane)
    while i < last:
        x = f32(source[i] / temperature)
        bad = bad or not x < f32(math.inf)
        top = max(top, x)
        i = u32(i + u32(32))
    top = warp_max(top)
    if lane == u32(0):
        warp_top[warp] = top
    any_bad = cuda.syncthreads_or(i32(1) if bad else i32(0))
    for w in static_range(WARPS):
        top = max(top, warp_top[u32(w)])
    code = i32(0)
    if any_bad != i32(0):
        code = i32(NOT_A_NUMBER)
    elif top == f32(-math.inf):
        code = i32(ALL_MINUS_INFINITY)
    if thread == u32(0):
        status[row] = code
        if code != i32(0):
            token[row] = i32(-1)
    if code != i32(0):
        return

    total = u64(0)
    i = u32(first + lane)
    while i < last:
        total = u64(total + _weight(f32(source[i] / temperature), top))
        i = u32(i + u32(32))
    total = _warp_sum_u64(total)
    if lane == u32(0):
        warp_total[warp] = total
    cuda.syncthreads()
    before, total = u64(0), u64(0)
    for w in static_range(WARPS):
        if u32(w) < warp:
            before = u64(before + u64(warp_total[u32(w)]))
        total = u64(total + u64(warp_total[u32(w)]))
    key = _mixed(u64(_mixed(seed) ^ u64(u32(request[row]))))
    u = _mixed(_mixed(u64(_mixed(key) ^ u64(u32(position[row])))))
    threshold = mul_high_u64(u, total)
    if threshold < before or threshold >= u64(before + u64(warp_total[warp])):
        return  # another warp's

    base, searching = first, True
    while searching:
        i = u32(base + lane)
        mine = u64(0)
        if i < last:
            mine = _weight(f32(source[i] / temperature), top)
        behind = mine  # cumulated over the lanes up to this one
        for step in static_range(5):
            other = _shifted_up(behind, 1 << step)
            if lane >= u32(1 << step):
                behind = u64(behind + other)
        drawn = threshold < u64(before + behind)
        if drawn and threshold >= u64(before + u64(behind - mine)):
            token[row] = i32(i)
        searching = not cuda.any_sync(FULL, drawn)
        whole_low = u32(cuda.shfl_sync(FULL, i32(behind & u64(FULL)), 31))
        whole_high = u32(cuda.shfl_sync(FULL, i32(behind >> u64(32)), 31))
        before = u64(before + u64(u64(u64(whole_high) << u64(32)) | u64(whole_low)))
        base = u32(base + u32(32))


def sample(
    logits, request, position, *, temperature: float, seed: int, token, status, stream=None
) -> None:
    """logits [rows, vocabulary] fp32; request, position [rows] int32, the row's key; token, status
    [rows] int32. temperature > 0; the seed's low 64 bits count."""
    dims = check(
        "sample",
        logits=(logits, "rows vocabulary", "float32"),
        request=(request, "rows", "int32"),
        position=(position, "rows", "int32"),
        token=(token, "rows", "int32"),
        status=(status, "rows", "int32"),
    )
    if not 0 < temperature < math.inf:
        raise ValueError(f"sample: temperature is {temperature}, expected a number above 0")
    share = cdiv(dims["vocabulary"], THREADS) * 32
    _sample.launch(
        dims["rows"], logits, request, position, temperature, seed & (1 << 64) - 1,
        dims["vocabulary"], share, token, status, stream=stream,
    )  # fmt: skip
