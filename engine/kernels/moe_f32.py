"""Routed experts of FP32 models: y[row] = sum over its experts of weight * expert(x[row]).

expert(h) = W_down (silu(W_gate h) * (W_up h)), all fp32. The launches are those of moe_w4a16.py:
route, gate and up with SwiGLU, down, combine. A warp takes one row of a weight matrix (of gate and
of up the same one) and the eight slots of a block: lane l multiplies columns 4 l .. 4 l + 3 of
every 128 in ascending order, then the lanes are added in a butterfly. A slot's bits depend on K
alone, not on the slots that share its block.
"""

from engine.activation import silu
from engine.device import cdiv, check, cuda, f32, family, i32, kernel, ptr, static_range, u32, u64
from engine.kernels.moe_combine import moe_combine
from engine.kernels.moe_route import max_blocks, moe_route_share
from engine.ptx import (
    address,
    fma_dot4,
    load_global_v4,
    pdl_launch_dependents,
    pdl_wait,
    zeros,
)
from engine.warp import warp_sum

WARPS = 8
WIDTH = 8  # slots of a block


@family({"swiglu": True}, {"swiglu": False})
def _moe_f32(*, swiglu: bool):
    ROWS = 2 if swiglu else 1  # of the weights, a warp
    multiply_add, no_sums = fma_dot4(ROWS, WIDTH), zeros(f32, ROWS * WIDTH)

    @kernel(threads=32 * WARPS, registers=128, dependent_launch=True)
    def moe_f32(
        x: ptr[f32],  # [slots / choices, k]
        block_expert: ptr[i32],  # [blocks]
        block_slot: ptr[i32],  # [blocks, 8]
        w: ptr[f32],  # [experts, n, k], or [experts, 2 n, k]: gate, then up
        choices: u32,  # slots that share a row of x
        n: u32,
        k: u32,
        out: ptr[f32],  # [slots, n], out
    ):
        lane = u32(u32(cuda.threadIdx.x) & u32(31))
        row = u32(u32(cuda.blockIdx.x) * u32(WARPS) + u32(u32(cuda.threadIdx.x) >> u32(5)))
        block = u32(cuda.blockIdx.y)
        pdl_wait()
        pdl_launch_dependents()
        expert = i32(block_expert[block])
        if expert >= i32(0) and row < n:
            first_slot = u32(block * u32(WIDTH))
            own = i32(block_slot[u32(first_slot + u32(lane % u32(WIDTH)))])
            first = u32(block_slot[first_slot])  # never empty
            column = u32(lane * u32(4))
            w_row = u64(u64(u64(u32(expert)) * u64(u32(n * u32(ROWS))) + u64(row)) * u64(k))
            gate_at = address(w, u64(w_row + u64(column)))
            up_at = address(w, u64(w_row + u64(u64(n) * u64(k)) * u64(ROWS - 1) + u64(column)))
            x_at = (address(x, u64(u64(u32(first // choices)) * u64(k) + u64(column))),)
            for s in static_range(1, WIDTH):
                slot = i32(block_slot[u32(first_slot + u32(s))])
                if slot < i32(0):
                    slot = i32(first)
                x_at = x_at + (
                    address(x, u64(u64(u32(u32(slot) // choices)) * u64(k) + u64(column))),
                )
            sums = no_sums()
            offset = u64(0)
            while column < k:
                weights = load_global_v4(u64(gate_at + offset))
                if swiglu:
                    weights = weights + load_global_v4(u64(up_at + offset))
                values = load_global_v4(u64(x_at[0] + offset))
                for s in static_range(1, WIDTH):
                    values = values + load_global_v4(u64(x_at[s] + offset))
                sums = multiply_add(sums, weights, values)
                offset = u64(offset + u64(512))
                column = u32(column + u32(128))
            for s in static_range(WIDTH):
                total = warp_sum(sums[s])
                if swiglu:
                    other = warp_sum(sums[WIDTH + s])
                    total = f32(silu(total) * other)
                if lane == u32(s) and own >= i32(0):
                    out[u64(u64(u32(own)) * u64(n) + u64(row))] = total

    return moe_f32


def scratch_shapes(
    *, rows: int, top_k: int, experts: int, hidden: int, inner: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype name of each scratch array of `moe_f32`."""
    blocks = max_blocks(rows, top_k, experts, WIDTH)
    return {
        "block_expert": ((blocks,), "int32"),
        "block_slot": ((blocks, WIDTH), "int32"),
        "activated": ((rows * top_k, inner), "float32"),
        "parts": ((rows * top_k, hidden), "float32"),
    }


def moe_f32(
    x,
    experts,
    expert_weights,
    gate_up,
    down,
    *,
    block_expert,
    block_slot,
    activated,
    parts,
    y,
    stream=None,
) -> None:
    """y = the routed experts' weighted sum, without the shared expert.

    x [rows, hidden] fp32. experts [rows, top_k] int32, distinct in a row and added in that order;
    an id outside [0, count) adds nothing. expert_weights [rows, top_k] fp32. gate_up [count,
    2 inner, hidden] fp32: each expert's gate_proj above its up_proj; down [count, hidden, inner]
    fp32; hidden and inner multiples of 4 (NotImplementedError). y [rows, hidden] fp32. Scratch as
    `scratch_shapes` says. At most 256 rows and 1024 experts (NotImplementedError).
    """
    dims = check(
        "moe_f32",
        x=(x, "rows hidden", "float32"),
        experts=(experts, "rows top_k", "int32"),
        expert_weights=(expert_weights, "rows top_k", "float32"),
        parts=(parts, "slots hidden", "float32"),
        y=(y, "rows hidden", "float32"),
    )
    count = gate_up.shape[0]
    if dims["top_k"] > count:
        raise ValueError(f"moe_f32: top {dims['top_k']} of {count} experts")
    moe_f32_share(
        x, experts, gate_up, down, first=0, block_expert=block_expert, block_slot=block_slot,
        activated=activated, parts=parts, stream=stream,
    )  # fmt: skip
    moe_combine(parts, experts, expert_weights, count=count, y=y, stream=stream)


def moe_f32_share(
    x, experts, gate_up, down, *, first: int, block_expert, block_slot, activated, parts,
    stream=None,
) -> None:  # fmt: skip
    """engine.kernels.moe_w4a16.moe_w4a16_share for fp32 weights."""
    dims = check(
        "moe_f32_share",
        x=(x, "rows hidden", "float32"),
        experts=(experts, "rows top_k", "int32"),
        gate_up=(gate_up, "count gate_up_rows hidden", "float32"),
        down=(down, "count hidden inner", "float32"),
        block_expert=(block_expert, "blocks", "int32"),
        block_slot=(block_slot, f"blocks {WIDTH}", "int32"),
        activated=(activated, "slots inner", "float32"),
        parts=(parts, "slots hidden", "float32"),
    )
    rows, top_k, count = dims["rows"], dims["top_k"], dims["count"]
    hidden, inner, blocks = dims["hidden"], dims["inner"], dims["blocks"]
    if dims["gate_up_rows"] != 2 * inner or dims["slots"] != rows * top_k:
        raise ValueError(
            f"moe_f32: gate_up has {dims['gate_up_rows']} rows and activated {dims['slots']}, "
            f"expected 2 x {inner} and {rows} x {top_k}"
        )
    if hidden % 4 or inner % 4:
        raise NotImplementedError(f"moe_f32: hidden {hidden} and inner {inner}, not multiples of 4")
    moe_route_share(
        experts, None, first=first, count=count, width=WIDTH,
        block_expert=block_expert, block_slot=block_slot, x_permuted=None, stream=stream,
    )  # fmt: skip
    _moe_f32(swiglu=True).launch(
        (cdiv(inner, WARPS), blocks),
        x, block_expert, block_slot, gate_up, top_k, inner, hidden, activated, stream=stream,
    )  # fmt: skip
    _moe_f32(swiglu=False).launch(
        (cdiv(hidden, WARPS), blocks),
        activated, block_expert, block_slot, down, 1, hidden, inner, parts, stream=stream,
    )  # fmt: skip
