"""The end of a decoding round: next roots and prefixes, and the first fault of each request.

root_tokens[r] becomes next_tokens[r], but for a request without a tree (-1), which keeps its root;
prefix_len[r] becomes new_prefix_len[r]. fault[r] is 0, or 1 + site * nodes + node for the first
status, by site and then by node, that is set among the counts[r] nodes of request r: what the host
reads once a round in place of the whole table. Rows behind a tree's nodes are padding and may say
what they like. A block a request.
"""

from engine.device import check, cuda, i32, kernel, ptr, static_range, u32
from engine.ptx import (
    pdl_launch_dependents,
    pdl_wait,
    warp_min_u32,
)
from engine.warp import FULL

THREADS = 128
WARPS = THREADS // 32


@kernel(threads=THREADS, registers=32, dependent_launch=True)
def _close_round(
    status: ptr[i32],  # [sites, requests, nodes]
    counts: ptr[i32],  # [requests]
    next_tokens: ptr[i32],  # [requests]
    new_prefix_len: ptr[i32],  # [requests]
    sites: u32,
    requests: u32,
    nodes: u32,
    root_tokens: ptr[i32],  # [requests], in and out
    prefix_len: ptr[i32],  # [requests], out
    fault: ptr[i32],  # [requests], out
):
    pdl_launch_dependents()
    pdl_wait()
    first = cuda.shared.array(WARPS, u32)
    request, thread = u32(cuda.blockIdx.x), u32(cuda.threadIdx.x)
    count = u32(counts[request])
    found = u32(FULL)
    site = u32(0)
    while site < sites and found == u32(FULL):
        row = u32(u32(u32(site * requests) + request) * nodes)
        node = thread
        while node < count:
            if status[u32(row + node)] != i32(0):
                found = min(found, u32(u32(site * nodes) + node))
            node = u32(node + u32(THREADS))
        site = u32(site + u32(1))
    found = warp_min_u32(found)
    if thread & u32(31) == u32(0):
        first[thread >> u32(5)] = found
    cuda.syncthreads()
    if thread == u32(0):
        for w in static_range(WARPS):
            found = min(found, u32(first[u32(w)]))
        fault[request] = i32(0) if found == u32(FULL) else i32(u32(found + u32(1)))
        token = next_tokens[request]
        if token >= i32(0):
            root_tokens[request] = token
        prefix_len[request] = new_prefix_len[request]


def close_round(
    status, counts, next_tokens, new_prefix_len, *, root_tokens, prefix_len, fault, stream=None
) -> None:
    """status int32 [sites, requests * nodes]; everything else int32 [requests], root_tokens changed
    in place. NotImplementedError for a status of 2^31 elements."""
    dims = check(
        "close_round",
        status=(status, "sites rows", "int32"),
        counts=(counts, "requests", "int32"),
        next_tokens=(next_tokens, "requests", "int32"),
        new_prefix_len=(new_prefix_len, "requests", "int32"),
        root_tokens=(root_tokens, "requests", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        fault=(fault, "requests", "int32"),
    )
    rows, requests = dims["rows"], dims["requests"]
    if not requests or rows % requests:
        raise ValueError(
            f"close_round: status has {rows} rows, expected as many for each of {requests} "
            "requests in counts, at least one"
        )
    if dims["sites"] * rows >= 2**31:  # a fault counts them in int32
        raise NotImplementedError(f"close_round: status {status.shape} has 2^31 elements or more")
    _close_round.launch(
        requests, status, counts, next_tokens, new_prefix_len, dims["sites"], requests,
        rows // requests, root_tokens, prefix_len, fault, stream=stream,
    )  # fmt: skip
