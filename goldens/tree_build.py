"""Best-first draft trees, with a heap (the reference implementation of DDTree, arXiv 2604.12989,
does the same in float64 and leaves ties among equal log-probabilities to the sort; here a score is
one fp32 addition and every tie has a rule).
"""

import heapq

import numpy as np

from goldens.numerics import Stream

BAD_LOG_PROBS, BAD_BUDGET = 1, 2


def inputs(
    rng: Stream, *, requests: int, length: int, k: int, nodes: int, pattern: str, budget: str
) -> dict[str, np.ndarray]:
    """pattern: "random" (with floors); "ties" (multiples of 1/2); "coarse" (0 to -3); "equal" (all
    the same); "certain" (rank 0 at log-probability 0); "absorbed" (steps so small that fp32
    addition makes ties of unequal parents); "minus_infinity" (ranks past the first few masked);
    "nothing" (a position wholly masked); "rising", "nan", "positive" (bad input in the last
    request); "steep" (overflow). budget: "full", "mixed" (0, full, then random), "padding" (some
    -1), "bad" (one too large)."""
    shape = (requests, length, k)
    scale = np.array([0.25, 1, 4])[rng.integers(0, 3, (requests, length, 1))]
    x = -np.abs(rng.bell(shape)) * scale
    if pattern == "ties":
        x = np.floor(x) / 2
    elif pattern == "coarse":
        x = -np.sort(rng.integers(0, 4, shape)).astype(np.float64)
    elif pattern == "equal":
        x = np.full(shape, -1.0)
    elif pattern == "certain":
        x[..., 0] = 0
    elif pattern == "absorbed":
        x = np.where(np.arange(length)[:, None] % 2, x * 2.0**-24, np.floor(x * 2))
    elif pattern == "minus_infinity":
        x[..., rng.integers(1, k) :] = -np.inf
    elif pattern == "steep":
        x = x * 2e37
    x = -np.sort(-x, axis=-1)
    if pattern == "nothing":
        x[:, length // 2] = -np.inf
    elif pattern in ("rising", "nan", "positive"):
        x[-1, -1, -1] = {"rising": x[-1, -1, -2] / 2, "nan": np.nan, "positive": 0.5}[pattern]
    tokens = np.stack([rng.permutation(4 * k)[:k] for _ in range(requests * length)])
    tokens = np.where(np.isneginf(x), -1, tokens.reshape(shape))
    budgets = np.full(requests, nodes - 1)
    if budget != "full":
        budgets[2:] = rng.integers(0, nodes, requests)[2:]
        budgets[0] = {"mixed": 0, "padding": -1, "bad": nodes}[budget]
    return {
        "log_probs": x.astype(np.float32),
        "tokens": tokens.astype(np.int32),
        "root_tokens": rng.integers(0, 1 << 17, requests).astype(np.int32),
        "budgets": budgets.astype(np.int32),
        "floors": _floors(nodes, pattern),
    }


def derived(*, k: int, nodes: int, pattern: str) -> dict[str, int | str]:
    """The patterns that look at two ranks need them."""
    pair = pattern in ("minus_infinity", "rising", "nan", "positive")
    return {"words": -(-nodes // 32), "pattern": "random" if pair and k < 2 else pattern}


def _floors(nodes: int, pattern: str) -> np.ndarray:
    """No floor at all, but for "random": then one that rises from -6 to 0 nats."""
    if pattern != "random":
        return np.full(nodes, -np.inf, np.float32)
    return (-6 + 6 * np.arange(nodes) / nodes).astype(np.float32)


def reference(
    *,
    log_probs: np.ndarray,
    tokens: np.ndarray,
    root_tokens: np.ndarray,
    budgets: np.ndarray,
    floors: np.ndarray,
) -> dict[str, np.ndarray]:
    """Trees [requests, nodes], nodes = len(floors); rows past counts are padding."""
    requests, nodes = len(root_tokens), len(floors)
    out = {
        "tree_tokens": np.full((requests, nodes), -1, np.int32),
        "parents": np.full((requests, nodes), -1, np.int32),
        "depths": np.zeros((requests, nodes), np.int32),
        "ancestors": np.zeros((requests, nodes, -(-nodes // 32)), np.uint32),
        "counts": np.zeros(requests, np.int32),
        "status": np.zeros(requests, np.int32),
    }
    for r in range(requests):
        budget = int(budgets[r])
        if not -1 <= budget < nodes:
            out["status"][r] = BAD_BUDGET
        elif not _sound(log_probs[r], tokens[r]):
            out["status"][r] = BAD_LOG_PROBS
        if out["status"][r]:
            budget = 0
        tree = grow(log_probs[r], budget, floors) if budget >= 0 else []
        out["counts"][r] = len(tree)
        for n, (parent, ranks) in enumerate(tree):
            depth = len(ranks)
            out["parents"][r, n], out["depths"][r, n] = parent, depth
            out["tree_tokens"][r, n] = tokens[r, depth - 1, ranks[-1]] if n else root_tokens[r]
        for n in range(nodes):
            at = n
            while at >= 0:
                out["ancestors"][r, n, at // 32] |= np.uint32(1 << at % 32)
                at = out["parents"][r, at]
    return out


def _sound(log_probs: np.ndarray, tokens: np.ndarray) -> bool:
    ordered = (log_probs[:, 1:] <= log_probs[:, :-1]).all()
    known = (tokens >= 0) | np.isneginf(log_probs)
    return bool(ordered and (log_probs <= 0).all() and known.all())


def grow(
    log_probs: np.ndarray, budget: int, floors: np.ndarray
) -> list[tuple[int, tuple[int, ...]]]:
    """(parent, rank tuple) of each node, the root first. log_probs [length, k] float32."""
    length, k = log_probs.shape
    tree: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    scores = [np.float32(0)]
    heap: list[tuple] = []

    def offer(parent: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) <= length and ranks[-1] < k:
            with np.errstate(over="ignore"):
                score = np.float32(scores[parent] + log_probs[len(ranks) - 1, ranks[-1]])
            if score > -np.inf:
                heapq.heappush(heap, (-score, ranks, parent))

    offer(0, (0,))
    while heap and len(tree) <= budget:
        cost, ranks, parent = heapq.heappop(heap)
        if not -cost >= floors[len(tree)]:
            break
        tree.append((parent, ranks))
        scores.append(-cost)
        offer(parent, (*ranks[:-1], ranks[-1] + 1))
        offer(len(tree) - 1, (*ranks, 0))
    return tree


def work(*, log_probs: np.ndarray, budgets: np.ndarray) -> dict[str, int]:
    """A budget of B nodes for R requests, over L positions."""
    return {"B": int(budgets.max()), "R": len(budgets), "L": log_probs.shape[1]}
