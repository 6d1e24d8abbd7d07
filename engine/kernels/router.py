"""Router: which experts a token goes to, and with what weight.

s = sigmoid(logits); the top_k experts by (s + bias) descending, ties to the lower id; their weights
are the unbiased scores, s / (sum of the chosen s + 1e-20) * scale. All fp32. Experts are listed in
ascending id and the sum runs in that order, so nothing depends on how the selection went. The bias
steers the choice only: taking weights from s + bias is a known mistake.

One warp a row; lane l holds experts l, l + 32, ... status[row] is 0, or 1 if a score is NaN: its
experts are then 0..top_k-1, which no reader can trip over, and its weights NaN.
"""

import math

from engine.device import cdiv, check, cuda, f32, family, i32, kernel, ptr, static_range, u32
from engine.ptx import (
    bits_to_f32,
    f32_to_bits,
    pdl_launch_dependents,
    pdl_wait,
    popc,
    warp_max_u32,
    warp_min_u32,
)
from engine.warp import FULL, order_key

THREADS = 32
MAX_EXPERTS = 1024
MAX_TOP_K = 32
NOT_A_NUMBER = 1
NAN = 0x7FC00000


@family(
    {"per_lane": 1, "parts": 1},
    {"per_lane": 12, "parts": 1},
    {"per_lane": 12, "parts": 7},  # what gemm_bf16.parts says for 384 experts
)
def _router(*, per_lane: int, parts: int):
    @kernel(threads=THREADS, registers=96, dependent_launch=True)
    def router(
        logits: ptr[f32],  # [parts, rows, experts]
        bias: ptr[f32],  # [experts]
        part_size: u32,  # rows * experts
        count: u32,  # of experts
        top_k: u32,
        scale: f32,
        experts: ptr[i32],  # [rows, top_k], out
        expert_weights: ptr[f32],  # [rows, top_k], out
        status: ptr[i32],  # [rows], out
    ):
        pdl_launch_dependents()
        scores = cuda.local.array(per_lane, f32)
        biases = cuda.local.array(per_lane, f32)
        keys = cuda.local.array(per_lane, u32)  # order as s + bias; 0 once chosen, or no expert
        chosen = cuda.shared.array(MAX_TOP_K, f32)
        row = u32(cuda.blockIdx.x)
        lane = u32(cuda.threadIdx.x)
        before = u32(u32(u32(1) << lane) - u32(1))  # the lanes below
        bad = u32(0)
        for j in static_range(per_lane):  # the bias is known before the previous kernel is done
            biases[j] = bias[min(u32(lane + u32(32 * j)), u32(count - u32(1)))]
        pdl_wait()
        for j in static_range(per_lane):  # loads alone, so that all are in flight at once
            at = u32(u32(row * count) + min(u32(lane + u32(32 * j)), u32(count - u32(1))))
            logit = logits[at]
            for part in static_range(1, parts):
                logit = f32(logit + logits[u32(at + u32(part_size * u32(part)))])
            scores[j] = logit
        for j in static_range(per_lane):
            expert = u32(lane + u32(32 * j))
            score = f32(f32(1) / f32(f32(1) + f32(math.exp(f32(-scores[j])))))
            scores[j] = score
            rank_by = f32(score + biases[j])
            if rank_by != rank_by:
                bad = u32(1)
            keys[j] = order_key(f32_to_bits(rank_by))
            if expert >= count:
                keys[j] = u32(0)
        if cuda.any_sync(FULL, bad == u32(1)):
            i = lane
            while i < top_k:
                experts[u32(u32(row * top_k) + i)] = i32(i)
                expert_weights[u32(u32(row * top_k) + i)] = bits_to_f32(u32(NAN))
                i = u32(i + u32(32))
            if lane == u32(0):
                status[row] = i32(NOT_A_NUMBER)
        else:
            taken = u32(0)  # bit j: this lane's expert lane + 32 j is chosen
            turn = u32(0)
            while turn < top_k:
                best = u32(0)
                best_id = u32(MAX_EXPERTS)
                for j in static_range(per_lane):  # ascending ids: a tie keeps the first
                    if keys[j] > best:
                        best = u32(keys[j])
                        best_id = u32(lane + u32(32 * j))
                if best < warp_max_u32(best):
                    best_id = u32(MAX_EXPERTS)
                winner = warp_min_u32(best_id)
                for j in static_range(per_lane):
                    if winner == u32(lane + u32(32 * j)):
                        taken = u32(taken | u32(1 << j))
                        keys[j] = u32(0)
                turn = u32(turn + u32(1))
            rank = u32(0)
            for j in static_range(per_lane):
                mine = u32(u32(taken >> u32(j)) & u32(1))
                ballot = u32(cuda.ballot_sync(FULL, mine == u32(1)))
                if mine == u32(1):
                    to = u32(rank + popc(u32(ballot & before)))
                    experts[u32(u32(row * top_k) + to)] = i32(lane + u32(32 * j))
                    chosen[to] = scores[j]
                rank = u32(rank + popc(ballot))
            cuda.syncwarp()
            total = f32(0)
            turn = u32(0)
            while turn < top_k:
                total = f32(total + chosen[turn])
                turn = u32(turn + u32(1))
            total = f32(total + f32(1e-20))
            i = lane
            while i < top_k:
                expert_weights[u32(u32(row * top_k) + i)] = f32(f32(chosen[i] / total) * scale)
                i = u32(i + u32(32))
            if lane == u32(0):
                status[row] = i32(0)

    return router


def router(
    logits, bias, *, top_k: int, scale: float, experts, expert_weights, status, stream=None
) -> None:
    """logits [parts, rows, count] fp32, parts >= 1, added in ascending order; bias [count] fp32;
    experts [rows, top_k] int32, expert_weights [rows, top_k] fp32, status [rows] int32.

    top_k at most 32, count at most 1024 and logits below 2^32 elements (NotImplementedError).
    """
    dims = check(
        "router",
        logits=(logits, "parts rows count", "float32"),
        bias=(bias, "count", "float32"),
        experts=(experts, "rows top_k", "int32"),
        expert_weights=(expert_weights, "rows top_k", "float32"),
        status=(status, "rows", "int32"),
    )
    parts, rows, count = dims["parts"], dims["rows"], dims["count"]
    if not parts or dims["top_k"] != top_k or not 1 <= top_k <= count:
        raise ValueError(
            f"router: {parts} parts, top_k {top_k}, {count} experts and experts {experts.shape}"
        )
    if top_k > MAX_TOP_K or count > MAX_EXPERTS:
        raise NotImplementedError(
            f"router: top_k {top_k} of {count}, at most {MAX_TOP_K} of {MAX_EXPERTS}"
        )
    if parts * rows * count >= 2**32:
        raise NotImplementedError(f"router: logits {logits.shape} has 2^32 elements or more")
    _router(per_lane=cdiv(count, 32), parts=parts).launch(
        rows, logits, bias, rows * count, count, top_k, scale, experts, expert_weights,
        status, stream=stream,
    )  # fmt: skip
