"""Best-first draft tree: the nodes are the most probable prefixes of the draft's factorised model.

Position l of a request offers k tokens, best first; a node at depth d is d ranks (r_1 .. r_d) and
  score(node) = fp32(score(parent) + log_prob[d - 1, r_d]),   score(root) = 0.
Nodes join in the order (higher score, then lexicographically smaller rank tuple, a prefix before
its extensions) until the budget is spent, nothing is left, or the next node n has a score below
floors[n]: a cost curve says what the n-th node must bring, in nats; -inf never stops. Since scores
do not rise along a path or among siblings, this order is that of a heap that holds for each node
its next child, and parents come before children. A token of log-probability -inf is never a node.

One block a request. Warp 0 is the heap: lane l keeps the best of the next children of nodes l,
l + 32, .., a reduction finds the best lane, and equal scores are told apart by walking up to the
common ancestor. A new node changes two lanes: its own, and that of its parent, which all lanes look
through together. One warp's time is the length of its chain of instructions, so scores are compared
as the bits of costs, rows of log-probabilities end in -inf instead of a test, and all lanes store
what one would. Then all warps write the outputs.

Rows past counts[r] are padding: token and parent -1, depth 0, ancestors themselves alone.
status[r]: 0; 1 = log-probabilities that rise, exceed 0 or are NaN, or a token below 0 that is not
marked -inf; 2 = a budget outside -1..nodes - 1. Such a request gets its root alone. Budget -1 is a
padding row of the batch: count 0.
"""

import math

from engine.device import cdiv, check, cuda, f32, function, i32, kernel, ptr, u32, u64
from engine.ptx import (
    advance,
    bits_to_f32,
    f32_to_bits,
    pdl_launch_dependents,
    pdl_wait,
    popc,
    warp_min_u32,
)
from engine.warp import FULL, SIGN

MAX_NODES = 1025  # root and a budget of 1024
MAX_LENGTH = 16  # draft positions
MAX_K = 1024
THREADS = 256
BAD_LOG_PROBS, BAD_BUDGET = 1, 2
OFFERS = 4640  # log-probabilities in shared memory: 16 rows of 289, or 4 of 1025 and one of -inf
NONE = 0x7F800000  # the cost of -inf, which is no candidate
LOW = 0xFFFF


@function
def _cost(score):
    """u32 that rises as the score (f32, at most 0) falls."""
    return u32(f32_to_bits(score) & u32(0x7FFFFFFF))


@function
def _before(nodes, links, a, b):
    """Is the rank tuple of node a's next child lexicographically before that of node b's?

    Neither is a prefix of the other: what extends a child that has not joined has not joined.
    """
    x, y = u32(a), u32(b)
    place_x, place_y = u32(nodes[x] & u32(LOW)), u32(nodes[y] & u32(LOW))
    while u32(nodes[x] >> u32(16)) > u32(nodes[y] >> u32(16)):
        place_x = u32(links[x] & u32(LOW))
        x = u32(links[x] >> u32(16))
    while u32(nodes[y] >> u32(16)) > u32(nodes[x] >> u32(16)):
        place_y = u32(links[y] & u32(LOW))
        y = u32(links[y] >> u32(16))
    while x != y:
        place_x, place_y = u32(links[x] & u32(LOW)), u32(links[y] & u32(LOW))
        x, y = u32(links[x] >> u32(16)), u32(links[y] >> u32(16))
    return place_x < place_y


@function
def _lowest(bits):
    """Index of the lowest set bit."""
    return popc(u32(u32(bits ^ u32(bits - u32(1))) >> u32(1)))


@function
def _first_of(nodes, links, equal, best):
    """Of the candidates in the lanes `equal`, all of the same cost, the node whose next child is
    first. best: a lane's own candidate."""
    first = u32(cuda.shfl_sync(FULL, i32(best), i32(_lowest(equal))))
    equal = u32(equal & u32(equal - u32(1)))
    while equal != u32(0):
        other = u32(cuda.shfl_sync(FULL, i32(best), i32(_lowest(equal))))
        if _before(nodes, links, other, first):
            first = other
        equal = u32(equal & u32(equal - u32(1)))
    return first


@kernel(threads=THREADS, registers=64, dependent_launch=True)
def _tree_build(
    log_probs: ptr[f32],  # [requests, length, k]
    tokens: ptr[i32],  # [requests, length, k]
    root_tokens: ptr[i32],  # [requests]
    budgets: ptr[i32],  # [requests]
    floors: ptr[f32],  # [nodes]
    length: u32,
    k: u32,
    nodes: u32,
    words: u32,
    tree_tokens: ptr[i32],  # [requests, nodes], out
    parents: ptr[i32],  # [requests, nodes], out
    depths: ptr[i32],  # [requests, nodes], out
    ancestors: ptr[u32],  # [requests, nodes, words], out
    counts: ptr[i32],  # [requests], out
    status: ptr[i32],  # [requests], out
):
    pdl_launch_dependents()
    pdl_wait()
    costs = cuda.shared.array(MAX_NODES, u32)  # of each node's next child, NONE if it has none
    scores = cuda.shared.array(MAX_NODES, f32)
    # Where the node's next child is among `offered`, and above it where the row of that begins.
    nodes_at = cuda.shared.array(MAX_NODES, u32)
    links = cuda.shared.array(MAX_NODES, u32)  # where the node is itself, and above it its parent
    offered = cuda.shared.array(OFFERS, f32)  # rows of `stride`: log_prob, then -inf; a row of -inf
    size = cuda.shared.array(1, u32)
    request = u32(cuda.blockIdx.x)
    thread = u32(cuda.threadIdx.x)
    lane = u32(thread & u32(31))
    offers = u32(length * k)
    log_prob = advance(log_probs, u64(u64(request) * u64(offers)))
    token = advance(tokens, u64(u64(request) * u64(offers)))
    budget = i32(budgets[request])
    stride = u32(min(k, u32(nodes - u32(1))) + u32(1))  # no rank is above the number of nodes
    fits = u32(u32(length + u32(1)) * stride) <= u32(OFFERS)

    bad = i32(0)
    i = thread
    while i < offers:
        value = log_prob[i]
        if not value <= f32(0) or (token[i] < i32(0) and value > f32(-math.inf)):
            bad = i32(1)
        if u32(i % k) != u32(0) and value > log_prob[u32(i - u32(1))]:
            bad = i32(1)
        at = u32(u32(u32(i // k) * stride) + u32(i % k))
        if u32(i % k) < u32(stride - u32(1)) and fits:
            offered[at] = value
        i = u32(i + u32(THREADS))
    bad = i32(cuda.syncthreads_or(bad))
    code = i32(BAD_LOG_PROBS) if bad != i32(0) else i32(0)
    if budget < i32(-1) or budget >= i32(nodes):
        code = i32(BAD_BUDGET)
    most = u32(0)
    if code == i32(0) and budget > i32(0):
        most = u32(budget)

    i = thread
    while i < u32(MAX_NODES):
        costs[i] = u32(NONE)
        i = u32(i + u32(THREADS))
    if fits:
        i = thread
        while i < u32(length + stride):
            if i < length:
                offered[u32(u32(u32(i + u32(1)) * stride) - u32(1))] = f32(-math.inf)
            else:
                offered[u32(u32(length * stride) + u32(i - length))] = f32(-math.inf)
            i = u32(i + u32(THREADS))
    cuda.syncthreads()

    if thread < u32(32):
        n = u32(1)
        best, best_slot = u32(NONE), lane  # of the next children of this lane's nodes
        if lane == u32(0):
            best = _cost(log_prob[u32(0)])
            costs[0] = best
            scores[0] = f32(0)
            nodes_at[0] = u32(0)
            links[0] = u32(0)
        cuda.syncwarp()
        lowest_score = f32(-math.inf)
        if most > u32(0):
            lowest_score = floors[u32(1)]
        while n <= most:
            next_floor = floors[min(u32(n + u32(1)), most)]  # for the next turn, so fetched now
            top = warp_min_u32(best)
            if top >= u32(NONE):
                break
            slot = warp_min_u32(best_slot if best == top else u32(FULL))
            tied = u32(cuda.ballot_sync(FULL, best == top))
            if u32(tied & u32(tied - u32(1))) != u32(0):
                slot = _first_of(nodes_at, links, tied, best_slot)
            score = bits_to_f32(u32(top | u32(SIGN)))
            if not score >= lowest_score:
                break
            lowest_score = next_floor
            node = u32(nodes_at[slot])
            place, row = u32(node & u32(LOW)), u32(node >> u32(16))
            further = u32(row + stride)  # the row of the new node's children
            above = scores[slot]
            if fits:
                sibling = _cost(f32(above + offered[u32(place + u32(1))]))
                child = _cost(f32(score + offered[further]))
            else:
                sibling, child = u32(NONE), u32(NONE)
                beside = u32(u32(place - row) + u32(1))
                depth = u32(further // stride)
                if beside < k:
                    at = u32(u32(u32(depth - u32(1)) * k) + beside)
                    sibling = _cost(f32(above + log_prob[at]))
                if depth < length:
                    child = _cost(f32(score + log_prob[u32(depth * k)]))
            cuda.syncwarp()  # all have read what all lanes store now
            costs[slot] = sibling
            nodes_at[slot] = u32(node + u32(1))
            costs[n] = child
            scores[n] = score
            nodes_at[n] = u32(further | u32(further << u32(16)))
            links[n] = u32(place | u32(slot << u32(16)))
            cuda.syncwarp()
            group = u32(slot & u32(31))
            mine = u32(group | u32(lane << u32(5)))
            cost = u32(costs[mine])
            lowest = warp_min_u32(cost)
            first = warp_min_u32(mine if cost == lowest else u32(FULL))
            tied = u32(cuda.ballot_sync(FULL, cost == lowest))
            if lowest < u32(NONE) and u32(tied & u32(tied - u32(1))) != u32(0):
                first = _first_of(nodes_at, links, tied, mine)
            if lane == group:
                best, best_slot = lowest, first
            elif lane == u32(n & u32(31)):
                if child < best:
                    best, best_slot = child, n
                elif child == best and child < u32(NONE):
                    if _before(nodes_at, links, n, best_slot):
                        best_slot = n
            n = u32(n + u32(1))
        if lane == u32(0):
            size[0] = u32(0) if budget == i32(-1) and code == i32(0) else n
    cuda.syncthreads()

    count = u32(size[0])
    if thread == u32(0):
        counts[request] = i32(count)
        status[request] = code
    base = u32(request * nodes)
    i = thread
    while i < nodes:
        out = u32(base + i)
        mine, parent, depth = i32(-1), i32(-1), u32(0)
        if i < count:
            mine = root_tokens[request]
            if i > u32(0):
                place = u32(links[i] & u32(LOW))
                depth = u32(u32(place // stride) + u32(1))
                parent = i32(links[i] >> u32(16))
                mine = token[u32(u32(u32(place // stride) * k) + u32(place % stride))]
        tree_tokens[out] = mine
        parents[out] = parent
        depths[out] = i32(depth)
        row = advance(ancestors, u64(u64(out) * u64(words)))
        node = i32(i)
        w = words
        while w > u32(0):
            w = u32(w - u32(1))
            bits = u32(0)
            while node >= i32(w * u32(32)):
                bits = u32(bits | u32(u32(1) << u32(u32(node) & u32(31))))
                node = i32(links[u32(node)] >> u32(16)) if node > i32(0) and i < count else i32(-1)
            row[w] = bits
        i = u32(i + u32(THREADS))


def tree_build(
    log_probs, tokens, root_tokens, budgets, floors, *, tree_tokens, parents, depths, ancestors,
    counts, status, stream=None,
) -> None:  # fmt: skip
    """log_probs fp32 and tokens int32 [requests, length, k], descending along k; root_tokens and
    budgets int32 [requests]; floors fp32 [nodes]; tree_tokens, parents and depths int32
    [requests, nodes], node 0 the root; ancestors uint32 [requests, nodes, words], bit j of a row
    set where node j is the node or above it, words = nodes / 32 rounded up; counts (root included)
    and status int32 [requests]. nodes > 1025, length > 16, k > 1024 or 2^32 elements of
    tree_tokens is NotImplementedError."""
    dims = check(
        "tree_build",
        log_probs=(log_probs, "requests length k", "float32"),
        tokens=(tokens, "requests length k", "int32"),
        root_tokens=(root_tokens, "requests", "int32"),
        budgets=(budgets, "requests", "int32"),
        floors=(floors, "nodes", "float32"),
        tree_tokens=(tree_tokens, "requests nodes", "int32"),
        parents=(parents, "requests nodes", "int32"),
        depths=(depths, "requests nodes", "int32"),
        ancestors=(ancestors, "requests nodes words", "uint32"),
        counts=(counts, "requests", "int32"),
        status=(status, "requests", "int32"),
    )
    for name, most in (("nodes", MAX_NODES), ("length", MAX_LENGTH), ("k", MAX_K)):
        if dims[name] < 1:
            raise ValueError(f"tree_build: {name} is {dims[name]}, expected 1 or more")
        if dims[name] > most:
            raise NotImplementedError(f"tree_build: {name} is {dims[name]}, more than {most}")
    if dims["words"] != cdiv(dims["nodes"], 32):
        raise ValueError(
            f"tree_build: ancestors has {dims['words']} words a row, "
            f"expected {cdiv(dims['nodes'], 32)} for {dims['nodes']} nodes"
        )
    if dims["requests"] * dims["nodes"] >= 2**32:
        raise NotImplementedError(
            f"tree_build: tree_tokens {tree_tokens.shape} has 2^32 elements or more"
        )
    _tree_build.launch(
        dims["requests"], log_probs, tokens, root_tokens, budgets, floors, dims["length"],
        dims["k"], dims["nodes"], dims["words"], tree_tokens, parents, depths, ancestors, counts,
        status, stream=stream,
    )  # fmt: skip
