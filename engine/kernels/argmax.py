"""Greedy choice: the token of the largest fp32 logit, ties to the lowest id.

A row is cut into at most CHUNKS ranges, one block each, and a second kernel picks among them; the
order of comparison cannot change the result, since (larger logit, lower id) orders all pairs. A NaN
wins over everything, so that it cannot hide. status[row] is 0, 1 if the row holds a NaN, 2 if all
of it is -inf; token is -1 in both cases.
"""

import math

from engine.device import cdiv, check, cuda, f32, function, i32, kernel, ptr, static_range, u32, u64
from engine.ptx import advance, pdl_launch_dependents, pdl_wait
from engine.warp import FULL

CHUNKS = 32
SMALLEST = 1024  # elements of a range
THREADS = 128
WARPS = THREADS // 32
NOT_A_NUMBER, ALL_MINUS_INFINITY = 1, 2
NOBODY = 0xFFFFFFFF


@function
def _wins(other, other_id, top, top_id):
    """Does (other, other_id) come before (top, top_id)? A NaN comes before every number."""
    tie = other == top or (other != other and top != top)
    wins = other > top or (other != other and top == top)
    return wins or (tie and other_id < top_id)


@kernel(threads=THREADS, registers=40, dependent_launch=True)
def _argmax_chunks(
    logits: ptr[f32],  # [rows, vocabulary]
    vocabulary: u32,
    chunk: u32,
    best: ptr[f32],  # [rows, CHUNKS], out
    best_id: ptr[i32],  # [rows, CHUNKS], out
):
    pdl_launch_dependents()
    pdl_wait()
    warp_best = cuda.shared.array(WARPS, f32)
    warp_id = cuda.shared.array(WARPS, i32)
    row = u32(cuda.blockIdx.y)
    thread = u32(cuda.threadIdx.x)
    source = advance(logits, u64(u64(row) * u64(vocabulary)))
    first = u32(u32(cuda.blockIdx.x) * chunk)
    last = min(vocabulary, u32(first + chunk))
    top = f32(-math.inf)
    top_id = u32(NOBODY)
    i = u32(first + thread)
    while i < last:
        value = source[i]
        if value > top or value != value or top_id == u32(NOBODY):
            if top == top:  # the first NaN stays
                top = value
                top_id = i
        i = u32(i + u32(THREADS))
    for step in static_range(5):
        other = cuda.shfl_xor_sync(FULL, top, 16 >> step)
        other_id = u32(cuda.shfl_xor_sync(FULL, i32(top_id), 16 >> step))
        if _wins(other, other_id, top, top_id):
            top = other
            top_id = other_id
    if u32(thread & u32(31)) == u32(0):
        warp_best[thread >> u32(5)] = top
        warp_id[thread >> u32(5)] = i32(top_id)
    cuda.syncthreads()
    if thread == u32(0):
        for w in static_range(1, WARPS):
            other = warp_best[w]
            other_id = u32(warp_id[w])
            if _wins(other, other_id, top, top_id):
                top = other
                top_id = other_id
        at = u32(u32(row * u32(CHUNKS)) + u32(cuda.blockIdx.x))
        best[at] = top
        best_id[at] = i32(top_id)


@kernel(threads=32, registers=32, dependent_launch=True)
def _argmax_rows(
    best: ptr[f32],  # [rows, CHUNKS]
    best_id: ptr[i32],  # [rows, CHUNKS]
    chunks: u32,
    token: ptr[i32],  # [rows], out
    status: ptr[i32],  # [rows], out
):
    pdl_launch_dependents()
    pdl_wait()
    row = u32(cuda.blockIdx.x)
    lane = u32(cuda.threadIdx.x)
    top = f32(-math.inf)
    top_id = u32(NOBODY)
    if lane < chunks:
        top = best[u32(u32(row * u32(CHUNKS)) + lane)]
        top_id = u32(best_id[u32(u32(row * u32(CHUNKS)) + lane)])
    for step in static_range(5):
        other = cuda.shfl_xor_sync(FULL, top, 16 >> step)
        other_id = u32(cuda.shfl_xor_sync(FULL, i32(top_id), 16 >> step))
        if _wins(other, other_id, top, top_id):
            top = other
            top_id = other_id
    if lane == u32(0):
        code = i32(0)
        if top != top:
            code = i32(NOT_A_NUMBER)
        elif top == f32(-math.inf):
            code = i32(ALL_MINUS_INFINITY)
        status[row] = code
        token[row] = i32(top_id) if code == i32(0) else i32(-1)


def argmax(logits, *, token, status, best, best_id, stream=None) -> None:
    """logits [rows, vocabulary] fp32; token, status [rows] int32; scratch best [rows, 32] fp32,
    best_id [rows, 32] int32."""
    dims = check(
        "argmax",
        logits=(logits, "rows vocabulary", "float32"),
        token=(token, "rows", "int32"),
        status=(status, "rows", "int32"),
        best=(best, f"rows {CHUNKS}", "float32"),
        best_id=(best_id, f"rows {CHUNKS}", "int32"),
    )
    rows, vocabulary = dims["rows"], dims["vocabulary"]
    chunk = max(cdiv(vocabulary, CHUNKS), SMALLEST)
    chunks = cdiv(vocabulary, chunk)
    _argmax_chunks.launch((chunks, rows), logits, vocabulary, chunk, best, best_id, stream=stream)
    _argmax_rows.launch(rows, best, best_id, chunks, token, status, stream=stream)
