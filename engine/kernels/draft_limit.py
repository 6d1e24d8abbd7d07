"""Proposals for positions that a request has no room for are taken back.

A request that may emit `reaches[r]` + 1 more tokens, of which the target's own is one, has no use
for drafts at positions from reaches[r] on (from 0): they become log-probability -inf and token -1,
which tree_build leaves out. One thread a proposal.
"""

import math

from engine.device import cdiv, check, cuda, f32, i32, kernel, ptr, u32
from engine.ptx import pdl_launch_dependents, pdl_wait

THREADS = 256


@kernel(threads=THREADS, registers=32, dependent_launch=True)
def _draft_limit(
    reaches: ptr[i32],  # [requests]
    length: u32,
    k: u32,
    count: u32,  # requests * length * k
    log_probs: ptr[f32],  # [requests, length, k], in and out
    tokens: ptr[i32],  # [requests, length, k], in and out
):
    pdl_launch_dependents()
    pdl_wait()
    i = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if i < count:
        row = u32(i // k)
        if i32(row % length) >= i32(reaches[u32(row // length)]):
            log_probs[i] = f32(-math.inf)
            tokens[i] = i32(-1)


def draft_limit(reaches, *, log_probs, tokens, stream=None) -> None:
    """reaches [requests] int32; log_probs fp32 and tokens int32 [requests, length, k], changed in
    place; below 2^32 elements (NotImplementedError)."""
    dims = check(
        "draft_limit",
        reaches=(reaches, "requests", "int32"),
        log_probs=(log_probs, "requests length k", "float32"),
        tokens=(tokens, "requests length k", "int32"),
    )
    count = dims["requests"] * dims["length"] * dims["k"]
    if count >= 2**32:
        raise NotImplementedError(f"draft_limit: tokens {tokens.shape} has 2^32 elements or more")
    _draft_limit.launch(
        cdiv(count, THREADS), reaches, dims["length"], dims["k"], count, log_probs, tokens,
        stream=stream,
    )  # fmt: skip
