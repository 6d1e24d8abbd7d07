"""Group tokens by expert on the GPU: blocks of slots that share an expert, without a host's help.

A slot is one (row, choice) pair, row * top_k + choice. An expert's slots go into consecutive blocks
of `width`, rows ascending; experts ascend over the blocks; an expert without rows has no block.
What is not used says -1: the rest of an expert's last block, and the blocks behind the last.
`max_blocks` is the worst case, so a grid over the blocks depends on shapes alone.

One thread block does it all: for every expert a bit mask of its rows in shared memory (an OR in any
order is the same mask), counts by popc, a prefix sum over the experts, and a slot's place is the
number of mask bits below its row. An expert id outside [0, count) marks a slot that goes nowhere.
A rank that owns some of the experts alone counts from its first.
`moe_prepare` copies the activations into the order of engine/int4.py too, in further blocks.
"""

import math

from engine.device import cdiv, check, cuda, i32, kernel, ptr, static_range, u16, u32
from engine.int4 import BLOCK, GROUP, padded, permute_chunk
from engine.ptx import (
    pdl_launch_dependents,
    pdl_wait,
    popc,
)
from engine.warp import FULL

THREADS = 1024
WARPS = THREADS // 32
MAX_EXPERTS = THREADS  # a thread an expert in the prefix sum
MAX_ROWS = 256
WORDS = MAX_ROWS // 32  # of an expert's mask
MASK_WORDS = MAX_EXPERTS * WORDS  # 32 KB


@kernel(threads=THREADS, registers=64, dependent_launch=True)
def _moe_route(
    experts: ptr[i32],  # [rows, top_k]
    rows: u32,
    top_k: u32,
    first: u32,  # expert that is number 0 here
    count: u32,  # of experts
    blocks: u32,
    width: u32,
    block_expert: ptr[i32],  # [blocks], out
    block_slot: ptr[i32],  # [blocks, width], out
    x: ptr[u16],  # [rows, groups * 32] bf16
    groups: u32,
    x_permuted: ptr[u16],  # [rows, groups * 32 up to 128] bf16, out
):
    masks = cuda.shared.array(MASK_WORDS, u32)
    first_block = cuda.shared.array(MAX_EXPERTS, u32)
    warp_total = cuda.shared.array(WARPS, u32)
    thread = u32(cuda.threadIdx.x)
    pdl_wait()
    pdl_launch_dependents()
    if u32(cuda.blockIdx.x) > u32(0):
        chunks = u32(u32(u32(groups + u32(3)) // u32(4)) * u32(16))  # of 8 values, a row
        chunk = u32(u32(u32(u32(cuda.blockIdx.x) - u32(1)) * u32(THREADS)) + thread)
        if chunk < u32(rows * chunks):
            permute_chunk(x, rows, groups, x_permuted, chunk)
    else:
        i = thread
        while i < u32(count * u32(WORDS)):
            masks[i] = u32(0)
            i = u32(i + u32(THREADS))
        cuda.syncthreads()
        slots = u32(rows * top_k)
        i = thread
        while i < slots:
            expert = u32(u32(experts[i]) - first)
            if expert < count:
                row = u32(i // top_k)
                word = u32(u32(expert * u32(WORDS)) + u32(row >> u32(5)))
                cuda.atomic.or_(masks, word, u32(u32(1) << u32(row & u32(31))))
            i = u32(i + u32(THREADS))
        cuda.syncthreads()

        tokens = u32(0)
        if thread < count:
            for j in static_range(WORDS):
                tokens = u32(tokens + popc(masks[u32(u32(thread * u32(WORDS)) + u32(j))]))
        needed = u32(u32(u32(tokens + width) - u32(1)) // width)
        lane = u32(thread & u32(31))
        before = needed  # inclusive, until the end of the scan
        for step in static_range(5):
            other = u32(cuda.shfl_up_sync(FULL, i32(before), 1 << step))
            if lane >= u32(1 << step):
                before = u32(before + other)
        if lane == u32(31):
            warp_total[u32(thread >> u32(5))] = before
        cuda.syncthreads()
        before = u32(before - needed)
        used = u32(0)
        for w in range(WARPS):
            if u32(w) < u32(thread >> u32(5)):
                before = u32(before + warp_total[u32(w)])
            used = u32(used + warp_total[u32(w)])
        if thread < count:
            first_block[thread] = before
            i = u32(0)
            while i < needed:
                block_expert[u32(before + i)] = i32(thread)
                i = u32(i + u32(1))
            i = tokens
            while i < u32(needed * width):
                block_slot[u32(u32(before * width) + i)] = i32(-1)
                i = u32(i + u32(1))
        i = u32(used + thread)
        while i < blocks:
            block_expert[i] = i32(-1)
            i = u32(i + u32(THREADS))
        i = u32(u32(used * width) + thread)
        while i < u32(blocks * width):
            block_slot[i] = i32(-1)
            i = u32(i + u32(THREADS))
        cuda.syncthreads()
        i = thread
        while i < slots:
            expert = u32(u32(experts[i]) - first)
            if expert < count:
                row = u32(i // top_k)
                word = u32(expert * u32(WORDS))
                last = u32(word + u32(row >> u32(5)))
                below = u32(u32(u32(1) << u32(row & u32(31))) - u32(1))
                place = popc(u32(masks[last] & below))
                while word < last:
                    place = u32(place + popc(masks[word]))
                    word = u32(word + u32(1))
                block_slot[u32(u32(first_block[expert] * width) + place)] = i32(i)
            i = u32(i + u32(THREADS))


def max_blocks(rows: int, top_k: int, count: int, width: int) -> int:
    """Blocks that any choice of top_k distinct experts by `rows` rows fits in."""
    slots = rows * top_k
    return (slots + (width - 1) * min(count, slots)) // width


def moe_route(experts, *, count: int, width: int, block_expert, block_slot, stream=None) -> None:
    """experts [rows, top_k] int32, distinct in a row, top_k <= count; block_expert [blocks] and
    block_slot [blocks, width] int32 with blocks = max_blocks(rows, top_k, count, width).

    At most 256 rows, 1024 experts and 2^31 - 1 elements of an array (NotImplementedError).
    """
    top_k = check("moe_route", experts=(experts, "rows top_k", "int32"))["top_k"]
    if top_k > count:
        raise ValueError(f"moe_route: experts has top {top_k} of {count} experts")
    moe_route_share(
        experts, None, first=0, count=count, width=width, block_expert=block_expert,
        block_slot=block_slot, x_permuted=None, stream=stream,
    )  # fmt: skip


def moe_prepare(
    experts, x, *, count: int, width: int, block_expert, block_slot, x_permuted, stream=None
) -> None:
    """`moe_route`, and x_permuted [rows, hidden up to a multiple of 128] bf16, the activations
    x [rows, hidden] bf16 in the order of engine/int4.py, zeros behind. hidden: a multiple of 32.
    """
    dims = check(
        "moe_prepare",
        experts=(experts, "rows top_k", "int32"),
        x=(x, "rows hidden", "bfloat16"),
    )
    if dims["top_k"] > count:
        raise ValueError(f"moe_prepare: experts has top {dims['top_k']} of {count} experts")
    moe_route_share(
        experts, x, first=0, count=count, width=width, block_expert=block_expert,
        block_slot=block_slot, x_permuted=x_permuted, stream=stream,
    )  # fmt: skip


def moe_route_share(
    experts, x, *, first: int, count: int, width: int, block_expert, block_slot, x_permuted,
    stream=None,
) -> None:  # fmt: skip
    """`moe_prepare`, or without x and x_permuted (None) `moe_route`, for the `count` experts from
    `first` on: those are numbered from 0 in block_expert, slots of others go nowhere. top_k may be
    more than count."""
    arrays = {
        "experts": (experts, "rows top_k", "int32"),
        "block_expert": (block_expert, "blocks", "int32"),
        "block_slot": (block_slot, "blocks width", "int32"),
    }
    if x is not None:
        arrays["x"] = (x, "rows hidden", "bfloat16")
        arrays["x_permuted"] = (x_permuted, "rows padded", "bfloat16")
    dims = check("moe_route_share", **arrays)
    rows, top_k, blocks = (dims[n] for n in ("rows", "top_k", "blocks"))
    hidden, columns = dims.get("hidden", 0), dims.get("padded", 0)
    if width < 1 or dims["width"] != width:
        raise ValueError(
            f"moe_route_share: block_slot has {dims['width']} columns, expected {width} (width), "
            "1 or more"
        )
    if hidden % GROUP or columns != padded(hidden):
        raise ValueError(
            f"moe_route_share: x has {hidden} columns, expected a multiple of {GROUP}, and "
            f"x_permuted {columns}, expected them up to a multiple of {BLOCK}"
        )
    if rows > MAX_ROWS or not 1 <= count <= MAX_EXPERTS:
        raise NotImplementedError(
            f"moe_route_share: {rows} rows and {count} experts, at most {MAX_ROWS} and "
            f"{MAX_EXPERTS}"
        )
    if blocks != max_blocks(rows, top_k, count, width):
        raise ValueError(
            f"moe_route_share: {rows} rows x top {top_k} of {count} experts take "
            f"{max_blocks(rows, top_k, count, width)} blocks of {width}, block_expert has {blocks}"
        )
    for name, array in arrays.items():
        if math.prod(array[0].shape) >= 2**31:  # block_slot counts slots in int32
            raise NotImplementedError(
                f"moe_route_share: {name} {array[0].shape} has 2^31 elements or more"
            )
    copies = cdiv(rows * columns // 8, THREADS)
    _moe_route.launch(
        1 + copies,
        experts, rows, top_k, first, count, blocks, width, block_expert, block_slot, x,
        hidden // GROUP, x_permuted, stream=stream,
    )  # fmt: skip
