"""Routed experts with INT4 weights: y[row] = sum over its experts of weight * expert(x[row]).

expert(h) = W_down act(silu(W_gate h) * (W_up h)), W = RN_bf16(q s), fp32 accumulation, act = bf16.
Four launches, sized by shapes alone, so that a CUDA graph can hold them:

1. moe_route_share: slots (row, choice) grouped by expert into blocks, activations permuted;
2. gate_up: a block of slots times 16 rows of gate and the same 16 of up (8 and 8 where there is one
   row of x); SwiGLU on the fp32 sums, rounded once to bf16, stored in the order that the next GEMM
   reads;
3. down: a block of slots times 32 rows (16 where there is one row of x); fp32, one row a slot;
4. moe_combine: the weighted sum in the order of the choices.

Blocks beyond the last that is used end at once. engine/int4.py has the inner loop and the order of
K. Slots are columns of an mma and the split of K is one number for each GEMM, so a row's bits do
not depend on how many rows there are, on its index or on where its slots landed.
"""

from engine.activation import silu
from engine.device import (
    cdiv,
    check,
    cuda,
    f32,
    family,
    function,
    i32,
    kernel,
    ptr,
    static_range,
    u16,
    u32,
    u64,
)
from engine.int4 import FRAGMENT, GROUP, add_slices, expert_rows, keep_slice, padded, place_in_row
from engine.kernels.moe_combine import moe_combine
from engine.kernels.moe_route import max_blocks, moe_route_share
from engine.ptx import (
    address,
    f32_to_bf16,
    f32_to_bits,
    pdl_launch_dependents,
    pdl_wait,
    shared_address,
    store_global_u16,
    store_global_u32,
)

GATE_UP_SLICES = 4  # of K, a warp each
DOWN_SLICES = 2
WIDTHS = (8, 16)  # slots of a block
SHAPES = ((1, 1), (1, 2), (2, 2))  # column tiles of a block of slots, row tiles of a warp
HIDDEN, INNER = (192, 256, 7168), (96, 128, 2048)  # of tiny2, tiny and K2.6


def _options(slices: int, columns: int, tiles: int) -> dict:
    """As many warps an SM as their registers allow."""
    warps = {(1, 1): 32, (1, 2): 24, (2, 2): 16, (1, 4): 16, (2, 4): 12}[columns, tiles]
    return {
        "threads": 32 * slices,
        "blocks_per_sm": warps // slices,
        "registers": 65536 // (32 * warps),
        "dependent_launch": True,
        "sass": ("HMMA", "HFMA2", "LDG"),
    }


def _slot(columns: int):
    """Makes a device function: the slot of operand column `column` of a block, never empty."""
    WIDTH = 8 * columns

    @function
    def slot(block_slot, block, column):
        first = u32(block * u32(WIDTH))
        slot = i32(block_slot[u32(first + column)])
        if slot < i32(0):  # the first slot of a block is in use
            slot = i32(block_slot[first])
        return u32(slot)

    return slot


@family(*({"k": k, "columns": c, "tiles": t} for k in HIDDEN for c, t in SHAPES))
def _gate_up(*, k: int, columns: int, tiles: int):
    """A block makes 8 `tiles` columns of the activations. With one tile, gate is rows 0-7 of it and
    up rows 8-15; otherwise each has half the tiles."""
    WIDTH, ROW = 8 * columns, padded(k)
    FRAGMENTS = tiles * columns
    PITCH = FRAGMENTS * FRAGMENT  # bytes of a slice
    SUMS = GATE_UP_SLICES * FRAGMENTS * FRAGMENT // 4
    PAIRS = max(FRAGMENTS // 2, columns)  # fragments with gates
    multiply = expert_rows(
        k=k, slices=GATE_UP_SLICES, tiles=tiles, columns=columns, ahead=2, matrices=2
    )
    keep, add = keep_slice(FRAGMENTS), add_slices(GATE_UP_SLICES, FRAGMENTS)
    slot_of = _slot(columns)

    @kernel(**_options(GATE_UP_SLICES, columns, tiles))
    def gate_up(
        x: ptr[u16],  # [rows, k up to 128] bf16, permuted
        block_expert: ptr[i32],  # [blocks]
        block_slot: ptr[i32],  # [blocks, width]
        qw: ptr[u32],  # [experts, 2 inner, k/8]: gate, then up
        sc: ptr[u16],  # [experts, 2 inner, k/32] bf16
        top_k: u32,
        inner: u32,
        inner_padded: u32,
        activated: ptr[u16],  # [slots, inner up to 128] bf16, permuted, out
    ):
        sums_of = cuda.shared.array(SUMS, f32, alignment=16)
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        part = u32(thread >> u32(5))
        g = u32(lane >> u32(2))
        t = u32(lane & u32(3))
        block = u32(cuda.blockIdx.y)
        # In this order: `down` reads the blocks before its own wait, so it must not begin until
        # moe_route_share, which makes them, is done.
        pdl_wait()
        pdl_launch_dependents()
        expert = i32(block_expert[block])
        if expert >= i32(0):
            first_row = u32(u32(cuda.blockIdx.x) * u32(8 * tiles))
            row = u64(u64(u32(expert)) * u64(u32(inner * u32(2))) + u64(u32(first_row + g)))
            gate_words = address(qw, u64(row * u64(k // 8)))
            gate_scales = address(sc, u64(row * u64(k // GROUP)))
            row = u64(row + u64(inner))
            up_words = address(qw, u64(row * u64(k // 8)))
            up_scales = address(sc, u64(row * u64(k // GROUP)))
            x_row = u32(slot_of(block_slot, block, g) // top_k)
            x_0 = address(x, u64(u64(x_row) * u64(ROW)))
            x_at = (x_0,)
            if columns == 2:
                x_row = u32(slot_of(block_slot, block, u32(g + u32(8))) // top_k)
                x_at = (x_0, address(x, u64(u64(x_row) * u64(ROW))))
            sums = multiply((gate_words, up_words), (gate_scales, up_scales), x_at, part, t)

            shared = u32(u32(shared_address(sums_of, u32(0))) + u32(lane * u32(16)))
            keep(u32(shared + u32(part * u32(PITCH))), sums)
            cuda.syncthreads()
            for turn in static_range(cdiv(PAIRS, GATE_UP_SLICES)):
                pair = u32(part + u32(turn * GATE_UP_SLICES))
                if pair < u32(PAIRS):
                    gate = add(u32(shared + u32(pair * u32(FRAGMENT))))
                    if tiles == 1:
                        up = (gate[2], gate[3])
                    else:
                        up = add(u32(shared + u32(u32(pair + u32(PAIRS)) * u32(FRAGMENT))))
                    column = u32(u32(u32(pair % u32(columns)) * u32(8)) + u32(t * u32(2)))
                    row = u32(first_row + u32(u32(pair // u32(columns)) * u32(16)) + g)
                    for i in static_range(2 if tiles == 1 else 4):
                        at = u32(u32(block * u32(WIDTH)) + column + u32(i & 1))
                        slot = i32(block_slot[at])
                        if slot >= i32(0):
                            value = f32(silu(gate[i]) * up[i])
                            to = u64(place_in_row(u32(row + u32(8 * (i >> 1)))))
                            to = u64(u64(u32(slot)) * u64(inner_padded) + to)
                            store_global_u16(address(activated, to), f32_to_bf16(value))

    return gate_up


@family(*({"k": k, "columns": c, "tiles": t} for k in INNER for c, t in SHAPES))
def _down(*, k: int, columns: int, tiles: int):
    WIDTH, ROW = 8 * columns, padded(k)
    FRAGMENTS = tiles * columns
    PITCH = FRAGMENTS * FRAGMENT  # bytes of a slice
    SUMS = DOWN_SLICES * FRAGMENTS * FRAGMENT // 4
    multiply = expert_rows(
        k=k, slices=DOWN_SLICES, tiles=tiles, columns=columns, ahead=4 // columns, matrices=1
    )
    keep, add = keep_slice(FRAGMENTS), add_slices(DOWN_SLICES, FRAGMENTS)
    slot_of = _slot(columns)

    @kernel(**_options(DOWN_SLICES, columns, tiles))
    def down(
        activated: ptr[u16],  # [slots, k up to 128] bf16, permuted
        block_expert: ptr[i32],  # [blocks]
        block_slot: ptr[i32],  # [blocks, width]
        qw: ptr[u32],  # [experts, hidden, k/8]
        sc: ptr[u16],  # [experts, hidden, k/32] bf16
        hidden: u32,
        parts: ptr[f32],  # [slots, hidden], out
    ):
        sums_of = cuda.shared.array(SUMS, f32, alignment=16)
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        part = u32(thread >> u32(5))
        g = u32(lane >> u32(2))
        t = u32(lane & u32(3))
        block = u32(cuda.blockIdx.y)
        # Blocks are read before the wait (in multiply): gate_up lets this kernel begin only after
        # moe_route_share is done. So weights are fetched while gate_up ends.
        expert = i32(block_expert[block])
        if expert >= i32(0):
            first_row = u32(u32(cuda.blockIdx.x) * u32(16 * tiles))
            row = u64(u64(u32(expert)) * u64(hidden) + u64(u32(first_row + g)))
            words = address(qw, u64(row * u64(k // 8)))
            scales = address(sc, u64(row * u64(k // GROUP)))
            x_0 = address(activated, u64(u64(slot_of(block_slot, block, g)) * u64(ROW)))
            x_at = (x_0,)
            if columns == 2:
                x_row = slot_of(block_slot, block, u32(g + u32(8)))
                x_at = (x_0, address(activated, u64(u64(x_row) * u64(ROW))))
            sums = multiply((words,), (scales,), x_at, part, t)

            shared = u32(u32(shared_address(sums_of, u32(0))) + u32(lane * u32(16)))
            keep(u32(shared + u32(part * u32(PITCH))), sums)
            cuda.syncthreads()
            for turn in static_range(cdiv(FRAGMENTS, DOWN_SLICES)):
                pair = u32(part + u32(turn * DOWN_SLICES))
                if pair < u32(FRAGMENTS):
                    total = add(u32(shared + u32(pair * u32(FRAGMENT))))
                    column = u32(u32(u32(pair % u32(columns)) * u32(8)) + u32(t * u32(2)))
                    row = u64(u32(first_row + u32(u32(pair // u32(columns)) * u32(16)) + g))
                    for i in static_range(4):
                        at = u32(u32(block * u32(WIDTH)) + column + u32(i & 1))
                        slot = i32(block_slot[at])
                        if slot >= i32(0):
                            to = u64(u64(u32(slot)) * u64(hidden) + row)
                            place = address(parts, u64(to + u64(8 * (i >> 1))))
                            store_global_u32(place, f32_to_bits(total[i]))
        else:  # all of a rank's blocks may be empty, and the end of this kernel means gate_up's too
            pdl_wait()

    return down


def scratch_shapes(
    *, rows: int, top_k: int, experts: int, hidden: int, inner: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype name of each scratch array of `moe_w4a16`.

    Blocks hold 8 slots, or 16 where experts have more than 8 on average: a block reads all of its
    expert's weights.
    """
    width = WIDTHS[rows * top_k > WIDTHS[0] * experts]
    blocks = max_blocks(rows, top_k, experts, width)
    return {
        "block_expert": ((blocks,), "int32"),
        "block_slot": ((blocks, width), "int32"),
        "x_permuted": ((rows, padded(hidden)), "bfloat16"),
        "activated": ((rows * top_k, padded(inner)), "bfloat16"),
        "parts": ((rows * top_k, hidden), "float32"),
    }


def moe_w4a16(
    x,
    experts,
    expert_weights,
    gate_up_qw,
    gate_up_sc,
    down_qw,
    down_sc,
    *,
    block_expert,
    block_slot,
    x_permuted,
    activated,
    parts,
    y,
    stream=None,
) -> None:
    """y = the routed experts' weighted sum, without the shared expert.

    x [rows, hidden] bf16. experts [rows, top_k] int32, distinct in a row and added in that order;
    an id outside [0, count) adds nothing. expert_weights [rows, top_k] fp32.
    gate_up_qw [count, 2 inner, hidden/8] int32, gate_up_sc [count, 2 inner, hidden/32] bf16: each
    expert's gate_proj above its up_proj, words and scales as in a pack-quantized checkpoint;
    down_qw [count, hidden, inner/8], down_sc [count, hidden, inner/32]. hidden and inner are
    multiples of 32. y [rows, hidden] fp32. Scratch as `scratch_shapes` says; block_slot may be 8 or
    16 wide, which changes no bit of y. At most 256 rows and 1024 experts (NotImplementedError).
    """
    dims = check(
        "moe_w4a16",
        x=(x, "rows hidden", "bfloat16"),
        experts=(experts, "rows top_k", "int32"),
        expert_weights=(expert_weights, "rows top_k", "float32"),
        parts=(parts, "slots hidden", "float32"),
        y=(y, "rows hidden", "float32"),
    )
    count = gate_up_qw.shape[0]
    if dims["top_k"] > count:
        raise ValueError(f"moe_w4a16: top {dims['top_k']} of {count} experts")
    moe_w4a16_share(
        x, experts, gate_up_qw, gate_up_sc, down_qw, down_sc, first=0, block_expert=block_expert,
        block_slot=block_slot, x_permuted=x_permuted, activated=activated, parts=parts,
        stream=stream,
    )  # fmt: skip
    moe_combine(parts, experts, expert_weights, count=count, y=y, stream=stream)


def moe_w4a16_share(
    x,
    experts,
    gate_up_qw,
    gate_up_sc,
    down_qw,
    down_sc,
    *,
    first: int,
    block_expert,
    block_slot,
    x_permuted,
    activated,
    parts,
    stream=None,
) -> None:
    """What each expert makes of its rows, for a rank that has the `count` experts from `first` on:
    all of `moe_w4a16` but the weighted sum. parts [rows * top_k, hidden] fp32: only the slots of
    these experts are written. Ids in `experts` are those of the whole model.
    """
    dims = check(
        "moe_w4a16_share",
        x=(x, "rows hidden", "bfloat16"),
        experts=(experts, "rows top_k", "int32"),
        gate_up_qw=(gate_up_qw, "count gate_up_rows hidden_words", "int32"),
        gate_up_sc=(gate_up_sc, "count gate_up_rows hidden_groups", "bfloat16"),
        down_qw=(down_qw, "count hidden inner_words", "int32"),
        down_sc=(down_sc, "count hidden inner_groups", "bfloat16"),
        block_expert=(block_expert, "blocks", "int32"),
        block_slot=(block_slot, "blocks width", "int32"),
        x_permuted=(x_permuted, "rows hidden_padded", "bfloat16"),
        activated=(activated, "slots inner_padded", "bfloat16"),
        parts=(parts, "slots hidden", "float32"),
    )
    rows, top_k, count, hidden = (dims[n] for n in ("rows", "top_k", "count", "hidden"))
    inner, width = dims["gate_up_rows"] // 2, dims["width"]
    found = (
        dims["hidden_words"] * 8, dims["hidden_groups"] * GROUP, dims["inner_words"] * 8,
        dims["inner_groups"] * GROUP, dims["gate_up_rows"],
    )  # fmt: skip
    if hidden % GROUP or inner % GROUP or found != (hidden, hidden, inner, inner, 2 * inner):
        raise ValueError(
            f"moe_w4a16: gate_up_qw {tuple(gate_up_qw.shape)}, gate_up_sc {tuple(gate_up_sc.shape)}"
            f", down_qw {tuple(down_qw.shape)} and down_sc {tuple(down_sc.shape)} do not hold "
            f"[{count}, 2 x {inner}, {hidden}] and [{count}, {hidden}, {inner}] weights in groups "
            f"of {GROUP}"
        )
    if dims["slots"] != rows * top_k or dims["inner_padded"] != padded(inner):
        raise ValueError(
            f"moe_w4a16: activated is {tuple(activated.shape)} and parts {tuple(parts.shape)}, "
            f"expected {rows} x {top_k} rows and {padded(inner)} columns of activated"
        )
    if width not in WIDTHS:
        raise ValueError(f"moe_w4a16: block_slot is {width} wide, expected 8 or 16")
    moe_route_share(
        experts, x, first=first, count=count, width=width,
        block_expert=block_expert, block_slot=block_slot, x_permuted=x_permuted, stream=stream,
    )  # fmt: skip
    blocks, columns = dims["blocks"], width // 8
    tiles = 1 if rows == 1 and columns == 1 else 2  # few blocks otherwise: 1.3 waves at K2.6
    _gate_up(k=hidden, columns=columns, tiles=tiles).launch(
        (inner // (8 * tiles), blocks),
        x_permuted, block_expert, block_slot, gate_up_qw, gate_up_sc, top_k, inner, padded(inner),
        activated, stream=stream,
    )  # fmt: skip
    _down(k=inner, columns=columns, tiles=tiles).launch(
        (hidden // (16 * tiles), blocks),
        activated, block_expert, block_slot, down_qw, down_sc, hidden, parts, stream=stream,
    )  # fmt: skip
