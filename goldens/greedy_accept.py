"""The path through a tree that a greedy target agrees with, node by node."""

import numpy as np

from goldens.numerics import Stream

BAD_COUNT, NO_PARENT, NOT_BEFORE, NO_CHOICE, TOO_LONG = 1, 2, 3, 4, 5
NODE = 16  # a status is code + NODE * node


def inputs(
    rng: Stream, *, requests: int, nodes: int, pattern: str, vocabulary: int
) -> dict[str, np.ndarray]:
    """Random trees; the target says what the last child of a node says three times out of four, and
    there are few different tokens, so that siblings share them.

    pattern: "random"; "chain" (all accepted), "star"; "twins" (all tokens equal); "padding" (rows
    of count 0 and short ones, hostile past the count); "orphan", "root_has_parent", "cycle",
    "itself", "outside", "far_outside" (a bad parent in the first request, off the path where
    possible); "bad_count"; "no_choice" (a status on the path of the first request, and in the last
    one off it); "negative_choice"."""
    parents = np.array([[int(rng.integers(-1, i)) for i in range(nodes)] for _ in range(requests)])
    parents[:, 1:] = np.maximum(parents[:, 1:], 0)
    if pattern in ("chain", "no_choice", "negative_choice"):
        parents[:] = np.arange(nodes) - 1
    elif pattern == "star":
        parents[:, 1:] = 0
    parents[:, 0] = -1
    tokens = rng.integers(0, vocabulary, (requests, nodes))
    if pattern == "twins":
        tokens[:] = 7
    target = rng.integers(0, vocabulary, (requests, nodes))
    agrees = rng.integers(0, 4, (requests, nodes)) > 0
    if pattern in ("chain", "no_choice", "negative_choice"):
        agrees[:] = True
    for r in range(requests):
        for i in range(1, nodes):
            if agrees[r, parents[r, i]]:
                target[r, parents[r, i]] = tokens[r, i]
    counts = np.full(requests, nodes)
    status = np.zeros((requests, nodes), np.int64)
    last = nodes - 1
    if pattern == "padding":
        counts = rng.integers(1, nodes + 1, requests)
        counts[::2] = 0
        for r in range(requests):
            parents[r, counts[r] :] = rng.choice(
                [-1, 0, 1 << 30, nodes, last], int(nodes - counts[r])
            )
            status[r, counts[r] :] = 1
    elif pattern == "bad_count":
        counts[0], counts[-1] = nodes + 1, -1
    elif pattern == "cycle":
        parents[0, last - 1], parents[0, last] = last, last - 1
    elif pattern == "root_has_parent":
        parents[0, 0] = 0
    elif pattern in ("no_choice", "negative_choice"):
        status[0, 1 if pattern == "no_choice" else 0] = pattern == "no_choice"
        target[0, 1] = -1 if pattern == "negative_choice" else target[0, 1]
        tokens[0, 2] = -1 if pattern == "negative_choice" else tokens[0, 2]
        target[-1, 0], status[-1, 1:] = vocabulary, 2
    elif pattern in (
        bad := {"orphan": -1, "itself": last, "outside": nodes, "far_outside": 1 << 30}
    ):
        parents[0, last] = bad[pattern]
    return {
        "target_tokens": target.astype(np.int32),
        "target_status": status.astype(np.int32),
        "tree_tokens": tokens.astype(np.int32),
        "parents": parents.astype(np.int32),
        "counts": counts.astype(np.int32),
    }


def derived(*, nodes: int, max_accepted: int, pattern: str) -> dict[str, int | str]:
    """The patterns with a flaw need a root and two nodes."""
    few = nodes < 3 and pattern not in ("chain", "star", "twins", "padding", "bad_count")
    return {"room": max_accepted, "pattern": "random" if few else pattern}


def reference(
    *,
    target_tokens: np.ndarray,
    target_status: np.ndarray,
    tree_tokens: np.ndarray,
    parents: np.ndarray,
    counts: np.ndarray,
    max_accepted: int,
) -> dict[str, np.ndarray]:
    """accepted [requests, max_accepted] and the rest [requests]; at fault, nothing is accepted."""
    requests, nodes = parents.shape
    accepted = np.full((requests, max_accepted), -1, np.int32)
    accepted_counts, status = np.zeros((2, requests), np.int32)
    next_tokens = np.full(requests, -1, np.int32)
    for r in range(requests):
        count = int(counts[r])
        if not 0 <= count <= nodes:
            status[r] = BAD_COUNT
            continue
        fault = tree_fault(parents[r, :count])
        path: list[int] = []
        node: int | None = 0 if count else None
        while node is not None and not fault:
            choice = int(target_tokens[r, node])
            if len(path) == max_accepted:
                fault = TOO_LONG + NODE * node
            elif target_status[r, node] or choice < 0:
                fault = NO_CHOICE + NODE * node
            else:
                path.append(node)
                children = np.flatnonzero(parents[r, :count] == node)
                node = next((int(c) for c in children if tree_tokens[r, c] == choice), None)
        status[r] = fault
        if path and not fault:
            accepted[r, : len(path)] = path
            accepted_counts[r], next_tokens[r] = len(path), choice
    return {
        "accepted": accepted,
        "accepted_counts": accepted_counts,
        "next_tokens": next_tokens,
        "status": status,
    }


def tree_fault(parents: np.ndarray) -> int:
    """0, or what is wrong with the first node whose parent is impossible."""
    for node, parent in enumerate(parents):
        if node == 0 and parent == -1:
            continue
        if node == 0 or not 0 <= parent < len(parents):
            return NO_PARENT + NODE * node
        if parent >= node:
            return NOT_BEFORE + NODE * node
    return 0


def work(*, parents: np.ndarray) -> dict[str, int]:
    """Trees of T nodes of R requests."""
    return {"T": parents.shape[1], "R": len(parents)}
