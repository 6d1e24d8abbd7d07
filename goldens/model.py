"""The layers of a K2.6-shaped model (DeepSeek-V3 family) in numpy, one copy of the maths.

Every function takes float64 arrays and a `Rounding` that says where it rounds, if at all
(goldens/rounding.py). Formulas were read in DeepSeek's modeling file and in transformers'
deepseek_v3, and are checked against the latter's results (tests/test_reference.py).

Names of axes: t tokens (of one request), H heads, R kv_lora_rank, nope / rope / v the parts of a
head, E routed experts, k experts a token, P keys before the window, S = P + t keys in all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from goldens.numerics import BF16, dequantise, softmax
from goldens.rounding import EXACT, Rounding

Config = Mapping[str, Any]


class Weights:
    """Tensors of a bundle by name, in float64; each is converted when first asked for and kept.

    `tensors` maps `<name>.weight` to a bf16 or float32 array, or `<name>.qw` (int32 [out, in/8])
    and `<name>.sc` (bf16 [out, in/group]) for an INT4 matrix.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = tensors
        self._kept: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, tensors: "Mapping[str, np.ndarray] | Weights") -> "Weights":
        return tensors if isinstance(tensors, Weights) else cls(tensors)

    @cached_property
    def activations(self) -> np.dtype:
        """float32 in a float32 model, bf16 in every other."""
        embedding = self.tensors["model.embed_tokens.weight"]
        return np.dtype(np.float32) if embedding.dtype == np.float32 else BF16

    def __call__(self, name: str) -> np.ndarray:
        """Matrix [out, in] or vector by the name without ".weight"; KeyError if there is none."""
        if name not in self._kept:
            if name + ".qw" in self.tensors:
                value = dequantise(self.tensors[name + ".qw"], self.tensors[name + ".sc"])
            elif name + ".weight" in self.tensors:
                value = self.tensors[name + ".weight"]
            else:
                value = self.tensors[name]
            self._kept[name] = np.asarray(value).astype(np.float64)
        return self._kept[name]


# -- trees -----------------------------------------------------------------------------------------


def tree(parents: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth int64 [t] and ancestors bool [t, t] of a window of nodes.

    parents[0] is -1, parents[i] < i. Entry (i, j) is True if j is i or an ancestor of i.
    """
    count = len(parents)
    depth, ancestors = np.zeros(count, np.int64), np.eye(count, dtype=bool)
    for i, parent in enumerate(parents):
        if not (parent == -1 if i == 0 else 0 <= parent < i):
            raise ValueError(f"tree: parent of node {i} is {parent}, not an earlier node")
        if i:
            depth[i] = depth[parent] + 1
            ancestors[i] |= ancestors[parent]
    return depth, ancestors


def chain(count: int) -> np.ndarray:
    """int64 [count]: the parents of a window that is one path."""
    return np.arange(count) - 1


def ancestor_words(ancestors: np.ndarray, words: int | None = None) -> np.ndarray:
    """bool [t, t] -> uint32 [t, words]: bit j % 32 of word j // 32 is entry j of a row."""
    count = len(ancestors)
    words = -(-count // 32) if words is None else words
    padded = np.zeros((count, words * 32), bool)
    padded[:, :count] = ancestors
    shifts = np.arange(32, dtype=np.uint32)
    bits = padded.reshape(count, words, 32).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(bits, axis=-1)


# -- pieces ----------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float | np.floating) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x [..., n], weight [n]."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1 + small)


def yarn_inverse_frequencies(config: Config) -> np.ndarray:
    """float64 [rope/2]: radians a position for each pair (YaRN, arXiv 2309.00071, section 3.2).

    Pairs that turn more than beta_fast times in the original context keep their frequency, those
    that turn less than beta_slow times are slowed by `factor`, a linear ramp lies between.
    """
    scaling, theta, dim = (
        config["rope_scaling"],
        config["rope_theta"],
        config["qk_rope_head_dim"],
    )
    pairs = np.arange(dim // 2)
    base = theta ** (-2 * pairs / dim)
    if not scaling:
        return base

    def pair_that_turns(times: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return dim * np.log(context / (times * 2 * np.pi)) / (2 * np.log(theta))

    low = max(np.floor(pair_that_turns(scaling["beta_fast"])), 0)
    high = min(np.ceil(pair_that_turns(scaling["beta_slow"])), dim - 1)
    ramp = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    return base * (1 - ramp) + base / scaling["factor"] * ramp


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1; 1 where nothing is stretched."""
    return 0.1 * mscale * float(np.log(factor)) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: Config) -> float:
    """(nope + rope)^-1/2 times mscale_all_dim's factor squared: 0.14468 for K2.6."""
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config["rope_scaling"]
    if not scaling:
        return scale
    return scale * yarn_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0)) ** 2


def rope_tables(config: Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float64 [t, rope/2], at integer positions [t].

    Both carry mscale / mscale_all_dim, which is 1 in every public K2 configuration.
    """
    angles = np.asarray(positions, np.float64)[:, None] * yarn_inverse_frequencies(config)
    scaling, size = config["rope_scaling"], 1.0
    if scaling:
        size = yarn_mscale(scaling["factor"], scaling.get("mscale", 1))
        size /= yarn_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0))
    return np.cos(angles) * size, np.sin(angles) * size


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate the pairs (x0, x1), (x2, x3), ... of the last axis in place; x [t, ..., rope].

    DeepSeek's code de-interleaves the result ([evens | odds]); queries and keys share any fixed
    permutation, so leaving the pairs where they are gives the same scores.
    """
    shape = (len(cos),) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape)


# -- multi-head latent attention -------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """What the tokens of one forward can see: positions int64 [t], visible bool [t, S]."""

    positions: np.ndarray
    visible: np.ndarray

    @classmethod
    def of(cls, parents: Sequence[int] | np.ndarray, prefix: int) -> "Window":
        """A tree after `prefix` keys, all of which every node sees. Siblings share a position."""
        depth, ancestors = tree(parents)
        prefix_part = np.ones((len(depth), prefix), bool)
        return cls(prefix + depth, np.concatenate([prefix_part, ancestors], axis=1))


def _attention(config: Config) -> tuple[int, int, int, int, int]:
    return (
        config["num_attention_heads"],
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
        config["kv_lora_rank"],
    )


def up_projections(weights: Weights, layer: int, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Wuk [H, nope, R] and Wuv [H, v, R], the two halves of kv_b_proj."""
    heads, nope, _, v, rank = _attention(config)
    both = weights(f"model.layers.{layer}.self_attn.kv_b_proj").reshape(heads, nope + v, rank)
    return both[:, :nope], both[:, nope:]


def mla_project(
    h: np.ndarray,
    weights: Weights,
    layer: int,
    config: Config,
    positions: np.ndarray,
    r: Rounding = EXACT,
) -> dict[str, np.ndarray]:
    """Queries and the latent row of each token; h [t, hidden] is the normed input.

    q_nope [t, H, nope], q_rope [t, H, rope] (rotated), latent [t, R + rope]: the normed latent and
    the rotated key, the only things that are cached.
    """
    heads, nope, rope_dim, _, rank = _attention(config)
    name, eps = f"model.layers.{layer}.self_attn.", config["lora_rms_norm_eps"]
    cos, sin = (r.single(table) for table in rope_tables(config, positions))
    q_a = r.act(r.product(h, weights(name + "q_a_proj")))  # [t, q_lora]
    q_a = r.act(rms_norm(q_a, weights(name + "q_a_layernorm"), eps))
    q = r.act(r.product(q_a, weights(name + "q_b_proj"))).reshape(-1, heads, nope + rope_dim)
    kv = r.act(r.product(h, weights(name + "kv_a_proj_with_mqa")))  # [t, R + rope]
    c = r.act(rms_norm(kv[:, :rank], weights(name + "kv_a_layernorm"), eps))
    k_rope = r.act(rope(kv[:, rank:], cos, sin))
    return {
        "q_nope": q[..., :nope],
        "q_rope": r.act(rope(q[..., nope:], cos, sin)),
        "latent": np.concatenate([c, k_rope], axis=-1),
    }


def mla_absorb(q_nope: np.ndarray, w_uk: np.ndarray, r: Rounding = EXACT) -> np.ndarray:
    """q' = Wuk^T q_nope: [t, H, nope], [H, nope, R] -> [t, H, R]."""
    by_head = r.product(q_nope.swapaxes(0, 1), w_uk.swapaxes(1, 2))  # [H, t, R]
    return r.act(by_head.swapaxes(0, 1))


def mla_attend(
    query: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    scale: float,
    rank: int,
    r: Rounding = EXACT,
) -> np.ndarray:
    """Absorbed attention: query [t, H, R + rope], keys [S, R + rope] -> latent output [t, H, R].

    The values are the first R entries of the keys. Probabilities are exp(score - row maximum),
    rounded as activations before they meet the values; the divisor is the sum of the unrounded
    ones. A row that sees no key gives zeros.
    """
    by_head = query.swapaxes(0, 1)  # [H, t, R + rope]
    scores = r.single(r.product(by_head, keys) * scale)  # [H, t, S]
    masked = np.where(visible, scores, -np.inf)
    peak = masked.max(-1, keepdims=True, initial=-np.finfo(np.float64).max)
    p = r.single(np.exp(r.single(masked - peak)))
    total = r.single(p.sum(-1, keepdims=True))
    mixed = r.product(r.act(p), keys[:, :rank].T)  # [H, t, R]
    return r.act((mixed / np.where(total == 0, 1, total)).swapaxes(0, 1))


def mla(
    h: np.ndarray,
    cache: np.ndarray,
    weights: Weights,
    layer: int,
    config: Config,
    window: Window,
    r: Rounding = EXACT,
) -> tuple[np.ndarray, np.ndarray]:
    """Absorbed attention: h [t, hidden] normed, cache [P, R + rope].

    Returns o_proj's output [t, hidden] and the latents [t, R + rope] of these tokens.
    """
    heads, _, _, v, rank = _attention(config)
    w_uk, w_uv = up_projections(weights, layer, config)
    part = mla_project(h, weights, layer, config, window.positions, r)
    keys = np.concatenate([cache, part["latent"]])  # [S, R + rope]
    query = np.concatenate([mla_absorb(part["q_nope"], w_uk, r), part["q_rope"]], axis=-1)
    mixed = mla_attend(query, keys, window.visible, softmax_scale(config), rank, r)  # [t, H, R]
    o = r.act(r.product(mixed.swapaxes(0, 1), w_uv).swapaxes(0, 1))  # [t, H, v]
    o_proj = weights(f"model.layers.{layer}.self_attn.o_proj")
    return r.single(r.product(o.reshape(-1, heads * v), o_proj)), part["latent"]


def mla_naive(
    h: np.ndarray,
    cache: np.ndarray,
    weights: Weights,
    layer: int,
    config: Config,
    window: Window,
    r: Rounding = EXACT,
) -> tuple[np.ndarray, np.ndarray]:
    """The same by the definition: keys and values of every head are expanded.

    No engine computes this, so there is no place where it would round: `r` must be exact.
    """
    if r != EXACT:
        raise ValueError("mla_naive: only exact; the engine's roundings belong to `mla`")
    heads, _, rope_dim, v, rank = _attention(config)
    w_uk, w_uv = up_projections(weights, layer, config)
    part = mla_project(h, weights, layer, config, window.positions)
    latents = np.concatenate([cache, part["latent"]])
    c, k_rope = latents[:, :rank], latents[:, rank:]
    k_nope = np.einsum("hnr,sr->hsn", w_uk, c)
    shared = np.broadcast_to(k_rope, (heads, len(latents), rope_dim))
    k = np.concatenate([k_nope, shared], axis=-1)  # [H, S, nope + rope]
    values = np.einsum("hvr,sr->hsv", w_uv, c)
    q = np.concatenate([part["q_nope"], part["q_rope"]], axis=-1)  # [t, H, nope + rope]
    scores = np.einsum("thd,hsd->hts", q, k) * softmax_scale(config)
    o = np.einsum("hts,hsv->thv", softmax(scores, window.visible), values)
    o_proj = weights(f"model.layers.{layer}.self_attn.o_proj")
    return o.reshape(-1, heads * v) @ o_proj.T, part["latent"]


# -- feed-forward ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Experts of each token, ascending ids.

    index int64 [t, k], weight float64 [t, k]; gap float64 [t]: how far the last chosen expert's
    biased score lies above the best one not chosen. A gap within the rounding error of the scores
    may go either way in an engine. logits float64 [t, E], before the sigmoid.
    """

    index: np.ndarray
    weight: np.ndarray
    gap: np.ndarray
    logits: np.ndarray


def router(
    h: np.ndarray,
    gate: np.ndarray,
    bias: np.ndarray,
    config: Config,
    r: Rounding = EXACT,
    chosen: np.ndarray | None = None,
) -> Routing:
    """Sigmoid scores; the k largest of score + bias are chosen (ties: the lower id).

    h [t, hidden], gate [E, hidden], bias [E]. The bias takes part in the choice only; weights are
    the unbiased scores, divided by their sum plus 1e-20, times routed_scaling_factor. `chosen`
    int64 [t, k] overrides the choice.
    """
    count = config["num_experts_per_tok"]
    logits = r.single(r.product(h, gate))  # [t, E]
    scores = r.single(sigmoid(logits))
    biased = r.single(scores + bias)
    order = np.argsort(-biased, axis=-1, kind="stable")
    ranked = np.take_along_axis(biased, order, axis=-1)
    last, following = ranked[:, count - 1], ranked[:, count:]
    gap = last - following[:, 0] if following.size else np.full(len(h), np.inf)
    index = np.sort(order[:, :count], axis=-1) if chosen is None else chosen
    picked = np.take_along_axis(scores, index, axis=-1)
    weight = picked
    if config.get("norm_topk_prob", True):
        weight = picked / (picked.sum(-1, keepdims=True) + 1e-20)
    return Routing(index, r.single(weight * config["routed_scaling_factor"]), gap, logits)


def mlp(h: np.ndarray, weights: Weights, name: str, r: Rounding = EXACT) -> np.ndarray:
    """SwiGLU: (silu(h Wg^T) * (h Wu^T)) Wd^T; h [n, hidden] -> [n, hidden]."""
    gate = r.single(r.product(h, weights(name + ".gate_proj")))
    up = r.single(r.product(h, weights(name + ".up_proj")))
    return r.single(r.product(r.act(silu(gate) * up), weights(name + ".down_proj")))


def routed_experts(
    h: np.ndarray, routing: Routing, weights: Weights, name: str, r: Rounding = EXACT
) -> np.ndarray:
    """Sum over a token's experts, in ascending id, of weight * expert(h); [t, hidden]."""
    y = np.zeros((len(h), h.shape[1]))
    for expert in np.unique(routing.index):
        token, slot = np.nonzero(routing.index == expert)
        part = mlp(h[token], weights, f"{name}.experts.{expert}", r)
        y[token] = r.single(y[token] + routing.weight[token, slot, None] * part)
    return y


def moe(
    h: np.ndarray,
    weights: Weights,
    layer: int,
    config: Config,
    r: Rounding = EXACT,
    chosen: np.ndarray | None = None,
) -> tuple[np.ndarray, Routing]:
    """Routed experts, then the shared expert: h [t, hidden] -> [t, hidden]."""
    name = f"model.layers.{layer}.mlp"
    gate, bias = weights(name + ".gate"), weights(name + ".gate.e_score_correction_bias")
    routing = router(h, gate, bias, config, r, chosen)
    y = routed_experts(h, routing, weights, name, r)
    if config.get("n_shared_experts", 1):
        y = r.single(y + mlp(h, weights, name + ".shared_experts", r))
    return y, routing


# -- layers ----------------------------------------------------------------------------------------


def is_dense(layer: int, config: Config) -> bool:
    return layer < config["first_k_dense_replace"]


@dataclass(frozen=True)
class Layer:
    """What one decoder layer gives: x [t, hidden] and what led to it."""

    x: np.ndarray  # residual stream after the layer
    attention: np.ndarray  # [t, hidden], o_proj's output
    latent: np.ndarray  # [t, R + rope], to be appended to the cache
    mlp: np.ndarray  # [t, hidden], the feed-forward block's output
    routing: Routing | None  # None in a dense layer


def decoder_layer(
    x: np.ndarray,
    cache: np.ndarray,
    weights: Weights,
    layer: int,
    config: Config,
    window: Window,
    r: Rounding = EXACT,
    chosen: np.ndarray | None = None,
    *,
    naive: bool = False,
) -> Layer:
    """x [t, hidden] residual stream, cache [P, R + rope] latents of the prefix in this layer."""
    attend = mla_naive if naive else mla
    name, eps = f"model.layers.{layer}.", config["rms_norm_eps"]
    h = r.act(rms_norm(x, weights(name + "input_layernorm"), eps))
    attention, latent = attend(h, cache, weights, layer, config, window, r)
    x = r.single(x + attention)
    h = r.act(rms_norm(x, weights(name + "post_attention_layernorm"), eps))
    if is_dense(layer, config):
        y, routing = mlp(h, weights, name + "mlp", r), None
    else:
        y, routing = moe(h, weights, layer, config, r, chosen)
    return Layer(r.single(x + y), attention, latent, y, routing)


def embed(tokens: np.ndarray, weights: Weights) -> np.ndarray:
    """tokens int [t] -> residual stream [t, hidden]."""
    return weights("model.embed_tokens")[tokens]


def head(x: np.ndarray, weights: Weights, config: Config, r: Rounding = EXACT) -> np.ndarray:
    """Final norm and lm_head: x [t, hidden] -> logits [t, vocab]."""
    h = r.act(rms_norm(x, weights("model.norm"), config["rms_norm_eps"]))
    return r.single(r.product(h, weights("lm_head")))
