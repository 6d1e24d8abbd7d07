"""DFlash, a drafter that reads the target's hidden states: one block of guesses a pass, in numpy.

The block has b slots: the root token (the last of the text, which the target has not seen yet), and
b - 1 mask tokens; slot i guesses the token i places behind the root. A few decoder layers with
grouped-query attention let every slot see every slot and the context: for each token before the
root, the target's residual stream after the tap layers, side by side, projected and normalised.
Embedding and head are the target's. Context keys and values depend on their own token alone, so
they are kept from round to round; the block's are dropped.

Shapes and names are those of the public drafters (z-lab's DFlash; for K2.5: 6 layers, 64 query and
8 key heads of 128, block 8, taps 1, 12, 24, 35, 47, 58). `config["drafter"]` holds block_size,
mask_token_id, target_layer_ids and the layers' sizes; tensors are `drafter.<public name>`, bf16.

Axes: t tokens, b slots, H query heads, G key heads, D head size, P tokens of context.
A row of keys and values is k of all heads, then v of all heads: [2 G D].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from goldens import model
from goldens.model import Config, Weights, rms_norm
from goldens.numerics import BF16
from goldens.rounding import EXACT, Rounding

FAITHFUL = Rounding(BF16)  # a drafter's activations are bf16, whatever the target's are


def shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the drafter, in the order of the forward pass."""
    drafter, hidden = config["drafter"], config["hidden_size"]
    size, inner = drafter["head_dim"], drafter["intermediate_size"]
    heads, groups = drafter["num_attention_heads"], drafter["num_key_value_heads"]
    yield "drafter.fc.weight", (hidden, len(drafter["target_layer_ids"]) * hidden)
    yield "drafter.hidden_norm.weight", (hidden,)
    for layer in range(drafter["num_hidden_layers"]):
        name = f"drafter.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (heads * size, hidden)
        yield f"{name}.self_attn.k_proj.weight", (groups * size, hidden)
        yield f"{name}.self_attn.v_proj.weight", (groups * size, hidden)
        yield f"{name}.self_attn.q_norm.weight", (size,)
        yield f"{name}.self_attn.k_norm.weight", (size,)
        yield f"{name}.self_attn.o_proj.weight", (hidden, heads * size)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
    yield "drafter.norm.weight", (hidden,)


def rope_tables(drafter: Mapping[str, Any], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float64 [t, D/2]; YaRN as the target's where the drafter's config has it."""
    like = {
        "qk_rope_head_dim": drafter["head_dim"],
        "rope_theta": drafter["rope_theta"],
        "rope_scaling": drafter.get("rope_scaling"),
    }
    return model.rope_tables(like, positions)


def rotate_half(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate the pairs (x_i, x_{i + D/2}) of the last axis; x [t, heads, D], cos, sin [t, D/2]."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def features(hidden: np.ndarray, drafter: Mapping[str, Any], r: Rounding = EXACT) -> np.ndarray:
    """[t, taps hidden] from the residual stream [layers + 1, t, hidden] of goldens.forward, whose
    entry i + 1 is the stream after layer i."""
    taps = [hidden[layer + 1] for layer in drafter["target_layer_ids"]]
    return r.act(np.concatenate(taps, axis=-1))


def project(
    taps: np.ndarray, weights: Weights, drafter: Mapping[str, Any], r: Rounding = EXACT
) -> np.ndarray:
    """[t, taps hidden] -> [t, hidden], what every layer's context keys and values are made of."""
    mixed = r.act(r.product(taps, weights("drafter.fc")))
    return r.act(rms_norm(mixed, weights("drafter.hidden_norm"), drafter["rms_norm_eps"]))


def keys_values(
    h: np.ndarray,
    weights: Weights,
    layer: int,
    drafter: Mapping[str, Any],
    positions: np.ndarray,
    r: Rounding = EXACT,
) -> np.ndarray:
    """[t, 2 G D] of h [t, hidden]: normed and rotated keys, then values."""
    name, size = f"drafter.layers.{layer}.self_attn.", drafter["head_dim"]
    cos, sin = (r.single(table) for table in rope_tables(drafter, positions))
    k = r.act(r.product(h, weights(name + "k_proj"))).reshape(len(h), -1, size)
    v = r.act(r.product(h, weights(name + "v_proj")))
    k = rms_norm(k, weights(name + "k_norm"), drafter["rms_norm_eps"])
    k = r.act(rotate_half(k, cos, sin))
    return np.concatenate([k.reshape(len(h), -1), v], axis=-1)


def attend(q: np.ndarray, rows: np.ndarray, scale: float, r: Rounding = EXACT) -> np.ndarray:
    """q [b, H, D] over rows [S, 2 G D] -> [b, H, D]; query head h reads key head h // (H / G).

    Probabilities are exp(score - maximum), rounded as activations before they meet the values; the
    divisor is the sum of the unrounded ones.
    """
    slots, heads, size = q.shape
    k, v = rows.reshape(len(rows), 2, -1, size).transpose(1, 2, 0, 3)  # [G, S, D] each
    groups = len(k)
    grouped = q.reshape(slots, groups, -1, size).transpose(1, 2, 0, 3)  # [G, H/G, b, D]
    scores = r.single(r.product(grouped, k[:, None]) * scale)  # [G, H/G, b, S]
    p = r.single(np.exp(r.single(scores - scores.max(-1, keepdims=True))))
    total = r.single(p.sum(-1, keepdims=True))
    mixed = r.product(r.act(p), v.swapaxes(1, 2)[:, None]) / total
    return r.act(mixed.transpose(2, 0, 1, 3).reshape(slots, heads, size))


def layer(
    x: np.ndarray,
    context: np.ndarray,
    weights: Weights,
    number: int,
    drafter: Mapping[str, Any],
    positions: np.ndarray,
    r: Rounding = EXACT,
) -> np.ndarray:
    """x [b, hidden], the block's stream; context [P, 2 G D]; positions [b] -> the stream behind."""
    name, eps = f"drafter.layers.{number}.", drafter["rms_norm_eps"]
    size = drafter["head_dim"]
    h = r.act(rms_norm(x, weights(name + "input_layernorm"), eps))
    cos, sin = (r.single(table) for table in rope_tables(drafter, positions))
    q = r.act(r.product(h, weights(name + "self_attn.q_proj"))).reshape(len(x), -1, size)
    q = r.act(rotate_half(rms_norm(q, weights(name + "self_attn.q_norm"), eps), cos, sin))
    own = keys_values(h, weights, number, drafter, positions, r)
    o = attend(q, np.concatenate([context, own]), size**-0.5, r).reshape(len(x), -1)
    x = r.single(x + r.single(r.product(o, weights(name + "self_attn.o_proj"))))
    h = r.act(rms_norm(x, weights(name + "post_attention_layernorm"), eps))
    return r.single(x + model.mlp(h, weights, name + "mlp", r))


def block_tokens(root: int, drafter: Mapping[str, Any]) -> np.ndarray:
    """int64 [b]: the root token, which anchors the block, and mask tokens."""
    return np.array([root] + [drafter["mask_token_id"]] * (drafter["block_size"] - 1))


def context_rows(
    hidden: np.ndarray, weights: Weights, config: Config, start: int, r: Rounding = EXACT
) -> np.ndarray:
    """[layers, t, 2 G D]: context of the tokens at positions start.., of which the target's stream
    is hidden [layers + 1, t, hidden]."""
    drafter = config["drafter"]
    h = project(features(hidden, drafter, r), weights, drafter, r)
    positions = start + np.arange(len(h))
    return np.stack(
        [
            keys_values(h, weights, number, drafter, positions, r)
            for number in range(drafter["num_hidden_layers"])
        ]
    )


def block_logits(
    root: int, context: np.ndarray, weights: Weights, config: Config, r: Rounding = EXACT
) -> np.ndarray:
    """[b - 1, vocab]: slot i's row, for i = 1.., is about the token i places behind the root, which
    stands at position P of the text. context [layers, P, 2 G D]."""
    drafter = config["drafter"]
    positions = context.shape[1] + np.arange(drafter["block_size"])
    x = model.embed(block_tokens(root, drafter), weights)
    for number, rows in enumerate(context):
        x = layer(x, rows, weights, number, drafter, positions, r)
    if r.activations is not None:  # the head is the target's, and so is its input
        r = replace(r, activations=weights.activations)
    h = r.act(rms_norm(x[1:], weights("drafter.norm"), drafter["rms_norm_eps"]))
    return r.single(r.product(h, weights("lm_head")))


def text_logits(
    hidden: np.ndarray, root: int, weights: Weights, config: Config, r: Rounding = EXACT
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [b - 1, vocab] and context behind a text whose last token is the root; hidden
    [layers + 1, P, hidden] is the target's stream of all others."""
    context = context_rows(hidden, weights, config, 0, r)
    return block_logits(root, context, weights, config, r), context


def sizes(config: Config) -> Sequence[int]:
    """Layers, and width of a row of keys and values."""
    drafter = config["drafter"]
    return drafter["num_hidden_layers"], 2 * drafter["num_key_value_heads"] * drafter["head_dim"]
