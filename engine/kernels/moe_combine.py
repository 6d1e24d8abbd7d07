"""y[row] = sum over a row's experts of weight times what the expert made of it, in fp32.

Choices are added one by one as listed (the router lists ascending experts), each a fused
multiply-add, so a row's bits depend on its own choices alone. A choice outside [0, count) adds
nothing, and what its part holds is not read. One thread makes four elements.

Where experts are split over ranks, parts come from all of them: `moe_combine_ranks` reads each from
the rank that owns its expert, in the same order, so the bits are those of one rank.
"""

from engine.device import cdiv, check, cuda, f32, i32, kernel, ptr, static_range, u32, u64
from engine.ptx import (
    address,
    bits_to_f32,
    f32_to_bits,
    fma,
    load_global_v4,
    pdl_launch_dependents,
    pdl_wait,
    store_global_v4,
)

THREADS = 128
WIDTH = 4  # elements of a thread, 16 bytes
FLIGHT = 8  # choices whose parts are fetched together
WORDS = FLIGHT * WIDTH


@kernel(threads=THREADS, registers=80, dependent_launch=True)
def _moe_combine(
    parts: ptr[f32],  # [ranks, slots, hidden]
    experts: ptr[i32],  # [rows, top_k]
    expert_weights: ptr[f32],  # [rows, top_k]
    count: u32,  # of experts
    share: u32,  # of experts, a rank
    slots: u32,
    top_k: u32,
    hidden: u32,
    y: ptr[f32],  # [rows, hidden], out
):
    pdl_wait()
    pdl_launch_dependents()
    row = u32(cuda.blockIdx.y)
    column = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS) + u32(cuda.threadIdx.x)) * u32(WIDTH))
    if column < hidden:
        a = f32(0)
        b = f32(0)
        c = f32(0)
        d = f32(0)
        slot = u32(row * top_k)
        end = u32(slot + top_k)
        values = cuda.local.array(WORDS, u32)
        weights = cuda.local.array(FLIGHT, f32)
        known = cuda.local.array(FLIGHT, u32)
        while slot < end:
            for j in static_range(FLIGHT):  # loads alone, so that all are in flight at once
                known[j] = u32(0)
                if u32(slot + u32(j)) < end:
                    expert = u32(experts[u32(slot + u32(j))])
                    if expert < count:
                        known[j] = u32(1)
                        weights[j] = expert_weights[u32(slot + u32(j))]
                        source = u64(u64(u32(expert // share)) * u64(slots) + u64(slot) + u64(j))
                        part = load_global_v4(
                            address(parts, u64(source * u64(hidden) + u64(column)))
                        )
                        for i in static_range(4):
                            values[4 * j + i] = part[i]
            for j in static_range(FLIGHT):
                if known[j] == u32(1):
                    a = fma(weights[j], bits_to_f32(values[4 * j]), a)
                    b = fma(weights[j], bits_to_f32(values[4 * j + 1]), b)
                    c = fma(weights[j], bits_to_f32(values[4 * j + 2]), c)
                    d = fma(weights[j], bits_to_f32(values[4 * j + 3]), d)
            slot = u32(slot + u32(FLIGHT))
        store_global_v4(
            address(y, u64(u64(row) * u64(hidden) + u64(column))),
            f32_to_bits(a),
            f32_to_bits(b),
            f32_to_bits(c),
            f32_to_bits(d),
        )


def moe_combine(parts, experts, expert_weights, *, count: int, y, stream=None) -> None:
    """parts [rows * top_k, hidden] fp32, one a choice; experts [rows, top_k] int32, of `count`;
    expert_weights [rows, top_k] fp32; y [rows, hidden] fp32. hidden is a multiple of 4 and
    experts below 2^32 elements (NotImplementedError).
    """
    dims = check(
        "moe_combine",
        parts=(parts, "slots hidden", "float32"),
        experts=(experts, "rows top_k", "int32"),
        expert_weights=(expert_weights, "rows top_k", "float32"),
        y=(y, "rows hidden", "float32"),
    )
    if dims["slots"] != dims["rows"] * dims["top_k"]:
        raise ValueError(
            f"moe_combine: parts has {dims['slots']} rows, expected {dims['rows']} x "
            f"{dims['top_k']} of experts"
        )
    _launch("moe_combine", parts, experts, expert_weights, count, count, dims, y, stream)


def moe_combine_ranks(parts, experts, expert_weights, *, count: int, y, stream=None) -> None:
    """`moe_combine` of parts [ranks, slots, hidden] fp32, slots >= rows * top_k. Rank r owns the
    r-th of equal ranges of the `count` experts; the other parts of its slots are not read.
    """
    dims = check(
        "moe_combine_ranks",
        parts=(parts, "ranks slots hidden", "float32"),
        experts=(experts, "rows top_k", "int32"),
        expert_weights=(expert_weights, "rows top_k", "float32"),
        y=(y, "rows hidden", "float32"),
    )
    ranks = dims["ranks"]
    if dims["slots"] < dims["rows"] * dims["top_k"] or not ranks or count % ranks:
        raise ValueError(
            f"moe_combine_ranks: parts is {tuple(parts.shape)} for {count} experts and "
            f"{dims['rows']} x {dims['top_k']} choices"
        )
    _launch(
        "moe_combine_ranks", parts, experts, expert_weights, count, count // ranks, dims, y, stream
    )


def _launch(op, parts, experts, expert_weights, count, share, dims, y, stream) -> None:
    rows, top_k, hidden = dims["rows"], dims["top_k"], dims["hidden"]
    if hidden % WIDTH:
        raise NotImplementedError(f"{op}: hidden {hidden} must be a multiple of {WIDTH}")
    if rows * top_k >= 2**32:
        raise NotImplementedError(f"{op}: experts {experts.shape} has 2^32 elements or more")
    _moe_combine.launch(
        (cdiv(hidden, WIDTH * THREADS), rows),
        parts, experts, expert_weights, count, share, dims["slots"], top_k, hidden, y,
        stream=stream,
    )  # fmt: skip
