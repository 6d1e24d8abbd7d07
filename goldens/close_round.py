"""The end of a decoding round: next roots and prefixes, and the first fault of each request."""

import numpy as np

from goldens.numerics import Stream


def inputs(
    rng: Stream, *, sites: int, requests: int, nodes: int, pattern: str
) -> dict[str, np.ndarray]:
    """pattern: "well" (no fault), "faults" (one status in eight is set), "padding" (requests of
    count 0 and short trees, statuses set behind them only), "last" (the last status of all)."""
    shape = (sites, requests, nodes)
    status = np.zeros(shape, np.int64)
    counts = np.full(requests, nodes)
    if pattern == "faults":
        status = np.where(rng.integers(0, 8, shape) == 0, rng.integers(1, 9, shape), 0)
        counts = rng.integers(0, nodes + 1, requests)
    elif pattern == "padding":
        counts = rng.integers(0, nodes, requests)
        counts[0] = 0
        status = np.where(np.arange(nodes) >= counts[:, None], 1, status)
    elif pattern == "last":
        status[-1, -1, -1] = 3
    next_tokens = rng.integers(0, 1 << 17, requests)
    next_tokens[-1] = 0
    made = {
        "status": status.reshape(sites, requests * nodes),
        "counts": counts,
        "next_tokens": np.where(counts > 0, next_tokens, -1),  # token 0 is one like the others
        "new_prefix_len": rng.integers(0, 1 << 18, requests),
        "root_tokens": rng.integers(0, 1 << 17, requests),
    }
    return {name: value.astype(np.int32) for name, value in made.items()}


def derived(*, requests: int, nodes: int) -> dict[str, int]:
    return {"rows": requests * nodes}


def reference(
    *,
    status: np.ndarray,
    counts: np.ndarray,
    next_tokens: np.ndarray,
    new_prefix_len: np.ndarray,
    root_tokens: np.ndarray,
) -> dict[str, np.ndarray]:
    """fault: 0, or 1 + site * nodes + node of the first status set among a request's nodes."""
    requests = len(counts)
    nodes = status.shape[1] // requests
    fault = np.zeros(requests, np.int32)
    for r in range(requests):
        own = status[:, r * nodes : r * nodes + int(counts[r])]
        bad = np.argwhere(own)
        if len(bad):
            site, node = bad[0]
            fault[r] = 1 + site * nodes + node
    return {
        "root_tokens": np.where(next_tokens >= 0, next_tokens, root_tokens),
        "prefix_len": new_prefix_len.copy(),
        "fault": fault,
    }
