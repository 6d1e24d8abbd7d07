"""The path that the target agrees with, through each tree of a batch.

From the root, follow the child whose token is the target's choice at its parent, the first in node
order if several are, until there is none; the target's choice at the last node is the next token.
Lossless: each accepted token is what the target itself would have said.

One block a request. Every node looks whether its parent chose its token; a minimum over nodes in
shared memory leaves the first such child of each parent, and thread 0 follows these links. A child
comes after its parent, so a walk ends; a tree that breaks this is refused before any walk.

status[r]: 0, or code + 16 * node, with the lowest node at fault:
  1  count outside 0..nodes (node 0)
  2  parent missing: the root's is not -1, another's is outside 0..count - 1 (an orphan)
  3  parent not before its child (a cycle has such a node)
  4  the target has no choice at a node on the path: its status is not 0 or its token is negative
  5  the path is longer than accepted has room for (the first node that found none)
Such a request accepts nothing: count 0, next token -1; so does one of count 0, a padding row.
"""

from engine.device import check, cuda, i32, kernel, ptr, u32
from engine.ptx import pdl_launch_dependents, pdl_wait

THREADS = 256
MAX_NODES = 1025
BAD_COUNT, NO_PARENT, NOT_BEFORE, NO_CHOICE, TOO_LONG = 1, 2, 3, 4, 5
NODE = 16  # a status is code + NODE * node
NONE = 0x7FFFFFFF


@kernel(threads=THREADS, registers=40, dependent_launch=True)
def _greedy_accept(
    target_tokens: ptr[i32],  # [requests, nodes]
    target_status: ptr[i32],  # [requests, nodes]
    tree_tokens: ptr[i32],  # [requests, nodes]
    parents: ptr[i32],  # [requests, nodes]
    counts: ptr[i32],  # [requests]
    nodes: u32,
    room: u32,
    accepted: ptr[i32],  # [requests, room], out
    accepted_counts: ptr[i32],  # [requests], out
    next_tokens: ptr[i32],  # [requests], out
    status: ptr[i32],  # [requests], out
):
    pdl_launch_dependents()
    pdl_wait()
    target = cuda.shared.array(MAX_NODES, i32)  # -1 where there is no choice
    follower = cuda.shared.array(MAX_NODES, i32)  # first child that the target chose
    fault = cuda.shared.array(1, i32)
    length = cuda.shared.array(1, u32)
    request = u32(cuda.blockIdx.x)
    thread = u32(cuda.threadIdx.x)
    base = u32(request * nodes)
    to = u32(request * room)
    count = i32(counts[request])
    known = count >= i32(0) and count <= i32(nodes)
    size = u32(count) if known else u32(0)
    if thread == u32(0):
        fault[0] = i32(NONE) if known else i32(BAD_COUNT)
        length[0] = u32(0)
    i = thread
    while i < size:
        chosen = target_tokens[u32(base + i)]
        target[i] = chosen if target_status[u32(base + i)] == i32(0) else i32(-1)
        follower[i] = i32(NONE)
        i = u32(i + u32(THREADS))
    cuda.syncthreads()

    i = thread
    while i < size:
        parent = i32(parents[u32(base + i)])
        code = i32(0)
        if i == u32(0):
            if parent != i32(-1):
                code = i32(NO_PARENT)
        elif parent < i32(0) or parent >= count:
            code = i32(NO_PARENT)
        elif parent >= i32(i):
            code = i32(NOT_BEFORE)
        elif tree_tokens[u32(base + i)] == target[u32(parent)] and target[u32(parent)] >= i32(0):
            cuda.atomic.min(follower, u32(parent), i32(i))
        if code != i32(0):
            cuda.atomic.min(fault, 0, i32(code + i32(i32(i) * i32(NODE))))
        i = u32(i + u32(THREADS))
    cuda.syncthreads()

    if thread == u32(0):
        code = i32(fault[0])
        done = u32(0)
        next_token = i32(-1)
        if code == i32(NONE):
            code = i32(0)
            node = i32(0) if size > u32(0) else i32(NONE)
            while node != i32(NONE):
                next_token = target[u32(node)]
                if done == room or next_token < i32(0):
                    code = i32(TOO_LONG) if done == room else i32(NO_CHOICE)
                    code = i32(code + i32(node * i32(NODE)))
                    node = i32(NONE)
                else:
                    accepted[u32(to + done)] = node
                    done = u32(done + u32(1))
                    node = i32(follower[u32(node)])
        if code != i32(0):
            done = u32(0)
            next_token = i32(-1)
        accepted_counts[request] = i32(done)
        next_tokens[request] = next_token
        status[request] = code
        length[0] = done
    cuda.syncthreads()
    i = u32(length[0] + thread)
    while i < room:
        accepted[u32(to + i)] = i32(-1)
        i = u32(i + u32(THREADS))


def greedy_accept(
    target_tokens, target_status, tree_tokens, parents, counts, *, max_accepted: int, accepted,
    accepted_counts, next_tokens, status, stream=None,
) -> None:  # fmt: skip
    """target_tokens, target_status (argmax of the target at each node), tree_tokens and parents
    int32 [requests, nodes]; counts int32 [requests]; accepted int32 [requests, max_accepted],
    nodes from the root on, -1 past accepted_counts int32 [requests]; next_tokens and status int32
    [requests]. nodes > 1025 and 2^32 elements of an array are NotImplementedError."""
    dims = check(
        "greedy_accept",
        target_tokens=(target_tokens, "requests nodes", "int32"),
        target_status=(target_status, "requests nodes", "int32"),
        tree_tokens=(tree_tokens, "requests nodes", "int32"),
        parents=(parents, "requests nodes", "int32"),
        counts=(counts, "requests", "int32"),
        accepted=(accepted, "requests room", "int32"),
        accepted_counts=(accepted_counts, "requests", "int32"),
        next_tokens=(next_tokens, "requests", "int32"),
        status=(status, "requests", "int32"),
    )
    if dims["nodes"] > MAX_NODES:
        raise NotImplementedError(f"greedy_accept: nodes is {dims['nodes']}, more than {MAX_NODES}")
    if dims["room"] != max_accepted:
        raise ValueError(
            f"greedy_accept: accepted has {dims['room']} columns, expected {max_accepted}"
        )
    if dims["requests"] * max(dims["nodes"], dims["room"]) >= 2**32:
        raise NotImplementedError(
            f"greedy_accept: tree_tokens {tree_tokens.shape} or accepted {accepted.shape} has 2^32 "
            "elements or more"
        )
    _greedy_accept.launch(
        dims["requests"], target_tokens, target_status, tree_tokens, parents, counts,
        dims["nodes"], dims["room"], accepted, accepted_counts, next_tokens, status, stream=stream,
    )  # fmt: skip
