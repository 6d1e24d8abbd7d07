"""One layer at the real shape, its routed experts made of a few base arrays.

384 experts of 44 million weights each are 8.5 GB. Expert e takes its INT4 words from base e mod the
number of word bases and its scales from base e mod the number of scale bases (coprime, so that few
experts are alike); only those that the router chooses are ever dequantised here. The maths is
goldens.model.decoder_layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from goldens import bundles, model
from goldens.numerics import BF16, Stream, dequantise, round_to
from goldens.rounding import EXACT, Rounding, companions
from goldens.tree_paths import random_tree

CLEAR = 0.01  # gap between biased scores, by an added bias
SAMPLES = 1  # of the bound: a row of thousands of elements averages well enough


def config_of(hidden: int) -> dict[str, Any]:
    """The shape with this hidden size: 7168 is K2.6."""
    name = next(n for n in ("tiny", "tiny2", "k26") if bundles.config(n)["hidden_size"] == hidden)
    return {**bundles.config(name), "num_hidden_layers": 1, "vocab_size": 16}


def matrix(rng: Stream, rows: int, columns: int) -> np.ndarray:
    """bf16, uniform, of variance 1 / columns; one draw gives four values."""
    raw = rng.raw(rows * columns // 4).view(np.int16).astype(np.float32)
    scaled = raw * np.float32(2.0**-15 * (3 / columns) ** 0.5)
    return scaled.astype(BF16).reshape(rows, columns)


def attention_inputs(
    rng: Stream, rows: int, keys: int, config: Mapping[str, Any], pattern: str
) -> dict[str, np.ndarray]:
    """A window of `rows` nodes behind `keys` cached rows, norms and MLA weights."""
    hidden, heads, rank, q_rank = (
        config[name]
        for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, turned, v = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "x": round_to(rng.bell((rows, hidden)), np.float32),
        "parents": random_tree(rng, rows, pattern),
        "prefix": round_to(rng.bell((keys, rank + turned)), BF16),
        "input_norm": round_to(1 + 0.25 * rng.uniform(hidden), BF16),
        "q_a": matrix(rng, q_rank, hidden),
        "q_a_norm": round_to(1 + 0.25 * rng.uniform(q_rank), BF16),
        "q_b": matrix(rng, heads * (nope + turned), q_rank),
        "kv_a": matrix(rng, rank + turned, hidden),
        "kv_a_norm": round_to(1 + 0.25 * rng.uniform(rank), BF16),
        "kv_b": matrix(rng, heads * (nope + v), rank),
        "o": matrix(rng, hidden, heads * v),
        "post_norm": round_to(1 + 0.25 * rng.uniform(hidden), BF16),
    }


def inputs(
    rng: Stream,
    *,
    rows: int,
    keys: int,
    hidden: int,
    word_bases: int,
    scale_bases: int,
    pattern: str,
    page_size: int,
) -> dict[str, np.ndarray]:
    """The router's bias leaves no choice of experts to a rounding. Nothing may depend on
    page_size."""
    config = config_of(hidden)
    made = layer_inputs(rng, rows, keys, config, word_bases, scale_bases, pattern)
    made["bias"] = _clear_bias(rng, made, config)
    return made


def layer_inputs(
    rng: Stream,
    rows: int,
    keys: int,
    config: Mapping[str, Any],
    word_bases: int,
    scale_bases: int,
    pattern: str,
) -> dict[str, np.ndarray]:
    """All of `inputs`, with a bias of zero."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]

    def words(count: int, columns: int) -> np.ndarray:
        raw = rng.raw((word_bases, count, columns // 16)).view(np.int32)
        return raw.reshape(word_bases, count, columns // 8)

    def scales(count: int, columns: int) -> np.ndarray:
        shape = (scale_bases, count, columns // 32)
        unit = 0.2 / columns**0.5  # codes have a standard deviation of 4.6
        return round_to(unit * (1 + 0.5 * rng.uniform(shape)), BF16)

    experts = config["n_routed_experts"]
    return attention_inputs(rng, rows, keys, config, pattern) | {
        "gate": matrix(rng, experts, hidden),
        "bias": np.zeros(experts, np.float32),
        "gate_up_qw": words(2 * inner, hidden),
        "gate_up_sc": scales(2 * inner, hidden),
        "down_qw": words(hidden, inner),
        "down_sc": scales(hidden, inner),
        "shared_gate_up": matrix(rng, 2 * inner, hidden),
        "shared_down": matrix(rng, hidden, inner),
    }


def _clear_bias(rng: Stream, made: Mapping[str, np.ndarray], config: dict) -> np.ndarray:
    """A small random bias under which every row's choice is clear."""
    given = {**made, "bias": np.zeros(config["n_routed_experts"])}
    ready = model.Weights(_tensors(given, config))
    h = _post_attention(given, ready, config)
    while True:
        bias = round_to(0.2 * rng.bell(config["n_routed_experts"]), np.float32)
        gate = ready("model.layers.0.mlp.gate")
        if model.router(h, gate, bias.astype(np.float64), config).gap.min() > CLEAR:
            return bias


def _post_attention(given: Mapping[str, np.ndarray], ready: model.Weights, config: dict):
    """float64 [rows, hidden]: what the router sees."""
    name, eps = "model.layers.0.", config["rms_norm_eps"]
    x = given["x"].astype(np.float64)
    h = model.rms_norm(x, ready(name + "input_layernorm"), eps)
    window = model.Window.of(given["parents"], len(given["prefix"]))
    attention, _ = model.mla(h, given["prefix"].astype(np.float64), ready, 0, config, window)
    return model.rms_norm(x + attention, ready(name + "post_attention_layernorm"), eps)


class _Experts(Mapping):
    """The layer's tensors by their public names; an expert is dequantised when it is asked for."""

    def __init__(self, tensors: dict[str, np.ndarray], given: Mapping[str, np.ndarray], inner: int):
        self.tensors, self.given, self.inner = tensors, given, inner

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.tensors:
            return self.tensors[name]
        before, found, rest = name.partition(".mlp.experts.")
        expert, _, which = rest.removesuffix("_proj.weight").partition(".")
        if not (found and before and which in ("gate", "up", "down")):
            raise KeyError(name)
        kind = "down" if which == "down" else "gate_up"
        qw, sc = self.given[kind + "_qw"], self.given[kind + "_sc"]
        qw, sc = qw[int(expert) % len(qw)], sc[int(expert) % len(sc)]
        if which != "down":
            half = slice(0, self.inner) if which == "gate" else slice(self.inner, None)
            qw, sc = qw[half], sc[half]
        return dequantise(qw, sc)

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return text in self.tensors or (".mlp.experts." in text and text.endswith(".weight"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def attention_tensors(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `attention_inputs` makes, by the public names."""
    name = "model.layers.0."
    attention = name + "self_attn."
    return {
        "model.embed_tokens.weight": np.zeros(0, BF16),  # says that activations are bf16
        name + "input_layernorm.weight": given["input_norm"],
        attention + "q_a_proj.weight": given["q_a"],
        attention + "q_a_layernorm.weight": given["q_a_norm"],
        attention + "q_b_proj.weight": given["q_b"],
        attention + "kv_a_proj_with_mqa.weight": given["kv_a"],
        attention + "kv_a_layernorm.weight": given["kv_a_norm"],
        attention + "kv_b_proj.weight": given["kv_b"],
        attention + "o_proj.weight": given["o"],
        name + "post_attention_layernorm.weight": given["post_norm"],
    }


def _tensors(given: Mapping[str, np.ndarray], config: dict) -> Mapping[str, np.ndarray]:
    inner, mlp = config["moe_intermediate_size"], "model.layers.0.mlp."
    shared = mlp + "shared_experts."
    tensors = attention_tensors(given) | {
        mlp + "gate.weight": given["gate"],
        mlp + "gate.e_score_correction_bias": given["bias"],
        shared + "gate_proj.weight": given["shared_gate_up"][:inner],
        shared + "up_proj.weight": given["shared_gate_up"][inner:],
        shared + "down_proj.weight": given["shared_down"],
    }
    return _Experts(tensors, given, inner)


def layer_outputs(
    given: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """y, latent, attention and mlp of goldens.model.decoder_layer, exact, with their magnitudes."""
    ready = model.Weights(tensors)
    window = model.Window.of(given["parents"], len(given["prefix"]))
    x, cached = given["x"].astype(np.float64), given["prefix"].astype(np.float64)

    def run(r: Rounding, chosen: np.ndarray | None = None) -> model.Layer:
        return model.decoder_layer(x, cached, ready, 0, config, window, r, chosen)

    exact = run(EXACT)
    chosen = exact.routing.index if exact.routing else None

    def floats(r: Rounding) -> dict[str, np.ndarray]:
        done = exact if r is EXACT else run(r, chosen)
        return {"y": done.x, "latent": done.latent, "attention": done.attention, "mlp": done.mlp}

    size = companions(floats, BF16, Stream("k26_layer"), samples=SAMPLES)
    return floats(EXACT) | {f"{name}.magnitude": value for name, value in size.items()}


def reference(
    *,
    x: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    input_norm: np.ndarray,
    q_a: np.ndarray,
    q_a_norm: np.ndarray,
    q_b: np.ndarray,
    kv_a: np.ndarray,
    kv_a_norm: np.ndarray,
    kv_b: np.ndarray,
    o: np.ndarray,
    post_norm: np.ndarray,
    gate: np.ndarray,
    bias: np.ndarray,
    gate_up_qw: np.ndarray,
    gate_up_sc: np.ndarray,
    down_qw: np.ndarray,
    down_sc: np.ndarray,
    shared_gate_up: np.ndarray,
    shared_down: np.ndarray,
) -> dict[str, np.ndarray]:
    given = dict(locals())
    config = {**config_of(x.shape[1]), "first_k_dense_replace": 0}
    return layer_outputs(given, _tensors(given, config), config)
