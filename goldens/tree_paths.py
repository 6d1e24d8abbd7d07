"""A tree in one pass, and each of its paths alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from goldens.forward import forward
from goldens.model import Weights, chain, tree
from goldens.numerics import Stream, unit_roundoff
from goldens.rounding import EXACT, Rounding, companions


def random_tree(rng: Stream, nodes: int, pattern: str) -> np.ndarray:
    """int32 parents; pattern: "random", "star" (all but the root are siblings), "chain"."""
    parents = chain(nodes)
    if pattern == "star":
        parents = np.minimum(parents, 0)
    elif pattern == "random":
        parents = np.array([-1, *(int(rng.integers(0, i)) for i in range(1, nodes))])
    return parents.astype(np.int32)


def inputs(
    rng: Stream, *, prefix_tokens: int, nodes: int, pattern: str, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """pattern: see `random_tree`."""
    parents = random_tree(rng, nodes, pattern)
    vocab = config["vocab_size"]
    return {
        "prefix": rng.integers(0, vocab, prefix_tokens).astype(np.int32),
        "tokens": rng.integers(0, vocab, nodes).astype(np.int32),
        "parents": parents,
    }


def reference(
    *,
    prefix: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """The bound is that of float32 arithmetic scaled to float64: first-order errors are linear."""
    ready = Weights(weights)
    cached = forward(ready, config, prefix)["latents"] if len(prefix) else None

    def run(r: Rounding, chosen: np.ndarray | None = None) -> dict[str, np.ndarray]:
        return forward(
            ready, config, tokens, parents=parents, prefix_cache=cached, rounding=r, chosen=chosen
        )

    exact = run(EXACT)

    def floats(r: Rounding) -> dict[str, np.ndarray]:
        done = run(r, exact["router_index"])
        return {name: done[name] for name in ("logits", "latents")}

    size = companions(floats, np.dtype(np.float32), Stream("tree_paths"))
    scale = unit_roundoff(np.float64) / unit_roundoff(np.float32)
    return {name: exact[name] for name in size} | {
        f"{name}.magnitude": value * scale for name, value in size.items()
    }


def witness(
    *,
    prefix: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    ready, ancestors = Weights(weights), tree(parents)[1]
    logits, latents = [], []
    for node in range(len(tokens)):
        path = np.concatenate([prefix, tokens[ancestors[node]]])
        alone = forward(ready, config, path, naive=True)
        logits.append(alone["logits"][-1])
        latents.append(alone["latents"][:, -1])
    return {"logits": np.stack(logits), "latents": np.stack(latents, axis=1)}
