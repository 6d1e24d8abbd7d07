"""The whole model: a forward pass over a prompt or a tree, and greedy decoding."""

from collections.abc import Mapping, Sequence

import numpy as np

from goldens.model import (
    Config,
    Weights,
    Window,
    chain,
    decoder_layer,
    embed,
    head,
)
from goldens.rounding import EXACT, Rounding


def forward(
    weights: Mapping[str, np.ndarray] | Weights,
    config: Config,
    tokens: Sequence[int] | np.ndarray,
    *,
    parents: Sequence[int] | np.ndarray | None = None,
    prefix_cache: np.ndarray | None = None,
    faithful: bool = False,
    rounding: Rounding | None = None,
    chosen: np.ndarray | None = None,
    naive: bool = False,
) -> dict[str, np.ndarray]:
    """Logits and everything on the way, for the tokens [t] of one request.

    parents   [t], a tree of nodes (parents[0] = -1, parents[i] < i); None: a causal chain.
    prefix_cache   [layers, P, R + rope], the `latents` of what came before; every node sees all of
        it. Node i sits at position P + depth(i).
    faithful   round where the engine rounds (goldens/rounding.py); `rounding` gives any other.
    chosen   int64 [moe layers, t, k], experts to use in place of the router's choice.
    naive   attention by its definition (goldens.model.mla_naive), exact only.

    Returns float64 unless said otherwise:
    logits [t, vocab], hidden [layers + 1, t, hidden] (the residual stream after the embedding and
    after each layer), attention and mlp [layers, t, hidden] (what each block added), latents
    [layers, t, R + rope], and for the MoE layers router_index int64 and router_weight
    [moe layers, t, k] in ascending expert id, router_gap [moe layers, t] and router_logits
    [moe layers, t, E].

    Weights in use are converted to float64 once if `weights` is a `goldens.model.Weights`, once a
    call otherwise. ValueError for tokens outside the vocabulary or a cache of another shape.
    """
    weights = Weights.of(weights)
    tokens = np.asarray(tokens, np.int64)
    layers, row = config["num_hidden_layers"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
    if tokens.ndim != 1 or not len(tokens) or not (0 <= tokens).all():
        raise ValueError(f"forward: tokens must be a non-empty list of ids, got {tokens}")
    if tokens.max() >= config["vocab_size"]:
        raise ValueError(f"forward: token {tokens.max()} is not below {config['vocab_size']}")
    if prefix_cache is None:
        prefix_cache = np.zeros((layers, 0, row))
    if prefix_cache.ndim != 3 or (prefix_cache.shape[0], prefix_cache.shape[2]) != (layers, row):
        raise ValueError(
            f"forward: prefix_cache must be [{layers}, P, {row}], got {prefix_cache.shape}"
        )
    r = rounding or (Rounding(weights.activations) if faithful else EXACT)
    window = Window.of(chain(len(tokens)) if parents is None else parents, prefix_cache.shape[1])
    if len(window.positions) != len(tokens):
        raise ValueError(f"forward: {len(tokens)} tokens but {len(window.positions)} parents")

    x = embed(tokens, weights)
    hidden, run = [x], []
    dense = config["first_k_dense_replace"]
    for layer in range(layers):
        forced = chosen[layer - dense] if chosen is not None and layer >= dense else None
        done = decoder_layer(
            x, prefix_cache[layer], weights, layer, config, window, r, forced, naive=naive
        )
        x = done.x
        hidden.append(x)
        run.append(done)
    routed = [layer.routing for layer in run if layer.routing is not None]
    none = np.zeros((0, len(tokens), 0))
    return {
        "logits": head(x, weights, config, r),
        "hidden": np.stack(hidden),
        "attention": np.stack([layer.attention for layer in run]),
        "mlp": np.stack([layer.mlp for layer in run]),
        "latents": np.stack([layer.latent for layer in run]),
        "router_index": np.stack([g.index for g in routed]) if routed else none.astype(np.int64),
        "router_weight": np.stack([g.weight for g in routed]) if routed else none,
        "router_gap": np.stack([g.gap for g in routed]) if routed else none.sum(-1),
        "router_logits": np.stack([g.logits for g in routed]) if routed else none,
    }


def greedy(
    weights: Mapping[str, np.ndarray] | Weights,
    config: Config,
    prompt: Sequence[int] | np.ndarray,
    steps: int,
    faithful: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [steps] and the margin float64 [steps] of each over the runner-up.

    One forward for the prompt, then one a token through the latent cache. Ties go to the lowest
    id. In faithful mode logits are float32 values, as an engine compares them.
    """
    weights = Weights.of(weights)
    run = forward(weights, config, prompt, faithful=faithful)
    cache, logits = run["latents"], run["logits"][-1]
    tokens, margins = np.zeros(steps, np.int32), np.zeros(steps)
    for step in range(steps):
        tokens[step] = logits.argmax()
        runner_up, best = np.partition(logits, -2)[-2:]
        margins[step] = best - runner_up
        if step + 1 < steps:
            run = forward(
                weights, config, tokens[step : step + 1], prefix_cache=cache, faithful=faithful
            )
            cache = np.concatenate([cache, run["latents"]], axis=1)
            logits = run["logits"][-1]
    return tokens, margins
