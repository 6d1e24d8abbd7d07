"""The forward pass of the pinned sample, and what transformers got for it."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from goldens.bundles import PINNED
from goldens.forward import forward
from goldens.model import Weights, chain
from goldens.numerics import Stream
from goldens.rounding import EXACT, Rounding, companions

FLOATS = ("logits", "hidden_states", "attention", "mlp", "router_logits", "router_weight")


@cache
def captured() -> Mapping[str, np.ndarray]:
    """The arrays of golden.npz by the names in ORIGIN.md."""
    with np.load(PINNED / "golden.npz") as file:
        return dict(file)


def inputs(rng: Stream, *, prefix_tokens: int) -> dict[str, np.ndarray]:
    """The captured prompt as a chain, or the captured tree with that prompt before it."""
    prompt = captured()["prompt"][0].astype(np.int32)
    if not prefix_tokens:
        return {"prefix": prompt[:0], "tokens": prompt, "parents": chain(48).astype(np.int32)}
    nodes, parents = captured()["tree_tokens"], captured()["tree_parent"]
    return {
        "prefix": prompt,
        "tokens": nodes.astype(np.int32),
        "parents": parents.astype(np.int32),
    }


def reference(
    *,
    prefix: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    ready = Weights(weights)

    def run(r: Rounding, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        cached = before = None
        if len(prefix):
            before = like["before"] if like else None
            first = forward(ready, config, prefix, rounding=r, chosen=before)
            cached, before = first["latents"], first["router_index"]
        done = forward(
            ready,
            config,
            tokens,
            parents=parents,
            prefix_cache=cached,
            rounding=r,
            chosen=like["router_index"] if like else None,
        )
        done["hidden_states"] = done["hidden"][1:]
        return {**done, "before": before}

    exact = run(EXACT)

    def floats(r: Rounding) -> dict[str, np.ndarray]:
        done = run(r, exact)
        return {name: done[name] for name in FLOATS}

    size = companions(floats, np.dtype(np.float32), Stream("sample_forward"))
    wanted = {name: exact[name] for name in (*FLOATS, "router_index")}
    return wanted | {f"{name}.magnitude": size[name] for name in FLOATS}


def witness(*, prefix: np.ndarray) -> dict[str, np.ndarray]:
    """The capture, with experts in ascending order and without its batch axis."""
    half = "float32/tree/" if len(prefix) else "float32/prompt/"

    def stored(name: str, layers: range) -> np.ndarray:
        values = [captured()[f"{half}{name}{layer}"] for layer in layers]
        return np.stack([v.reshape(-1, v.shape[-1]) for v in values])

    chosen = stored("rindex", range(1, 4))
    order = chosen.argsort(-1)
    return {
        "logits": captured()[half + "logits"][0],
        "hidden_states": stored("hidden", range(4)),
        "attention": stored("attn", range(4)),
        "mlp": stored("mlp", range(4)),
        "router_logits": stored("rlogit", range(1, 4)),
        "router_weight": np.take_along_axis(stored("rweight", range(1, 4)), order, axis=-1),
        "router_index": np.take_along_axis(chosen, order, axis=-1),
    }
