"""The small models: configurations, weights from a seed, prompts, golden tokens.

tiny       4 layers (1 dense), 8 experts top-2, the shape of the pinned sample.
tiny2      6 layers (2 dense), 6 experts top-3, other head sizes.
tiny_k26   tiny by the public checkpoints' rule: only routed experts are INT4.
k26_sample the pinned checkpoint in public format (goldens/pinned/ORIGIN.md).

`tiny-fp32` and `tiny-int4` come from the same float32 weights: in the INT4 model the experts, the
shared expert and the dense MLP are quantised (84 matrices in tiny, 90 in tiny2) and everything
else but the router bias is rounded to bf16.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from goldens import dflash
from goldens.forward import greedy
from goldens.model import Weights
from goldens.numerics import BF16, Stream, pack_int4, quantise, round_to

NAMES = ("tiny-fp32", "tiny-int4", "tiny2-fp32", "tiny2-int4", "tiny_k26", "k26_sample")
MICRO = "micro-fp32"  # two dense layers: small enough to decode in the simulator, and only for that
MICRO_INT4 = "micro2-int4"  # a dense and a MoE layer: for whole passes in the simulator
DRAFTED = "-dflash"  # a target and its drafter: tiny-int4-dflash is tiny-int4 and more tensors
PINNED = Path(__file__).parent / "pinned"
STEPS = 32  # golden tokens a prompt
PROMPT_LENGTHS = (5, 8, 13)
_PROMPTS = {  # found by goldens/prompts.py
    "tiny-fp32": (424, 990, 287),
    "tiny-int4": (424, 990, 287),
    "tiny2-fp32": (315, 304, 291),
    "tiny2-int4": (315, 304, 291),
    "tiny_k26": (233, 217, 433),
    MICRO: (4785, 527, 0),  # the last one not searched: for a few tokens
    "k26_sample": (0, 1, 2),  # not searched: its weights let bf16 flip experts and tokens
}
LORA_EPS = 1e-6  # the default in DeepSeek's modeling file; config.json does not carry it

_ROPE_SCALING = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_COMMON = {
    "model_type": "kimi_k2",
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "lora_rms_norm_eps": LORA_EPS,
    "rope_theta": 50000.0,
    "rope_scaling": _ROPE_SCALING,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
    "tiny2": {
        "vocab_size": 384,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 2,
        "num_attention_heads": 6,
        "q_lora_rank": 64,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 4096,
    },
    "micro": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
    "micro2": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 0.05,  # unlike and large, so that taking the one for the other shows
        "lora_rms_norm_eps": 0.5,
    },
    "k26": {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 262144,
    },
}
_DRAFTERS = {  # config["drafter"], see goldens.dflash
    "tiny": {"num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256},
    "tiny2": {"num_attention_heads": 6, "head_dim": 32, "intermediate_size": 192},
    "micro": {
        "block_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    },
    "k26": {
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 18432,
    },
}
_TAPS = {  # one further in each is a layer too, so that an index off by one is no error but wrong
    "tiny": (0, 2),
    "tiny2": (1, 4),
    "micro": (0,),
    "k26": (1, 12, 24, 35, 47, 58),
}
_QUANTISED = {  # suffix of a bundle's name -> matrices that are INT4
    "fp32": re.compile(r"(?!)"),
    "int4": re.compile(r".*\.mlp\.(experts\.\d+\.|shared_experts\.|)(gate|up|down)_proj"),
    "k26": re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj"),
}


def config(name: str) -> dict[str, Any]:
    """A fresh config by bundle or shape name ("k26" too), with the public config.json's keys."""
    if name == "k26_sample":
        return public_config(PINNED)
    shape, _ = _split(name)
    made: dict[str, Any] = {**_COMMON, **_SHAPES[shape]}
    made["num_key_value_heads"] = made["num_attention_heads"]
    made["rope_scaling"] = dict(_ROPE_SCALING)
    if name.endswith(DRAFTED):
        made["drafter"] = {
            "block_size": 8,
            "mask_token_id": made["vocab_size"] - 2,
            "target_layer_ids": list(_TAPS[shape]),
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": made["rms_norm_eps"],
            "rope_theta": made["rope_theta"],
            "rope_scaling": dict(_ROPE_SCALING),
            **_DRAFTERS[shape],
        }
    return made


def shape_of(name: str) -> str:
    """tiny or tiny2 or k26: the shape of a bundle."""
    return "tiny" if name == "k26_sample" else _split(name)[0]


def _split(name: str) -> tuple[str, str]:
    """Shape and rule of quantisation: tiny-int4 -> tiny, int4."""
    name = name.removesuffix(DRAFTED)
    if name not in (*NAMES, MICRO, MICRO_INT4, *_SHAPES):
        raise KeyError(f"no bundle {name!r}; there are {', '.join(NAMES)}")
    shape, _, rule = name.replace("_k26", "-k26").partition("-")
    return shape, rule


# -- weights ---------------------------------------------------------------------------------------


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a model that is not quantised, in checkpoint order."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    v, experts = config["v_head_dim"], config["n_routed_experts"]

    def mlp(name: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.gate_proj.weight", (inner, hidden)
        yield f"{name}.up_proj.weight", (inner, hidden)
        yield f"{name}.down_proj.weight", (hidden, inner)

    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_a_proj.weight", (q_lora, hidden)
        yield f"{name}.self_attn.q_a_layernorm.weight", (q_lora,)
        yield f"{name}.self_attn.q_b_proj.weight", (heads * (nope + rope_dim), q_lora)
        yield f"{name}.self_attn.kv_a_proj_with_mqa.weight", (rank + rope_dim, hidden)
        yield f"{name}.self_attn.kv_a_layernorm.weight", (rank,)
        yield f"{name}.self_attn.kv_b_proj.weight", (heads * (nope + v), rank)
        yield f"{name}.self_attn.o_proj.weight", (hidden, heads * v)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{name}.mlp", config["intermediate_size"])
            continue
        yield f"{name}.mlp.gate.weight", (experts, hidden)
        yield f"{name}.mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from mlp(f"{name}.mlp.experts.{expert}", config["moe_intermediate_size"])
        inner = config["moe_intermediate_size"] * config["n_shared_experts"]
        yield from mlp(f"{name}.mlp.shared_experts", inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


# Standard deviation of each kind of tensor, times sqrt(inputs) for matrices. Each block adds a
# fifth to a third of the residual stream's size: enough for the context to matter (without
# attention every third token of tiny changes, every fourth of tiny2), little enough for rounding
# errors to grow slowly with depth.
_GAIN = {"embed_tokens": 0.9, "down_proj": 0.3, "gate": 0.3}
_ATTENTION_GAIN = {"tiny": 0.7, "tiny2": 0.4}  # of o_proj; tiny2 has six layers of it
_TOPIC = 0.9  # share of a token's topic in its embedding
_AFFINITY = 5.0  # how strongly experts answer to their topics
_BIAS = 0.05
_SUCCESSORS = 3  # tokens that are likely after a given one
_HABIT = 1.2  # how likely: each adds this share of a row of lm_head


def _seeded(shape_name: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 tensor from its own stream: integers times powers of two, then single operations.

    Noise alone makes near-ties that an honest bf16 engine may decide otherwise: one choice of
    experts in eight, one token in five within 4 standard deviations of the rounding error. So each
    token has a topic, one of E directions, in its embedding, and each expert of each layer answers
    to k topics; and each token makes three others likely to follow, so that the rest of the model
    chooses among few. That leaves fewer than one choice in a hundred and one token in twenty-five.
    """
    stream = Stream("bundles", shape_name, name)
    kind = name.removesuffix(".weight").rpartition(".")[2]
    bell = stream.bell(shape) * (np.sqrt(3) / 2)  # sd 1
    if "norm" in kind:
        return (1 + 0.2 * bell).astype(np.float32)
    if kind == "e_score_correction_bias":
        return (_BIAS * bell).astype(np.float32)
    gain, (rows, columns) = _GAIN.get(kind, 1.0), shape
    experts = _SHAPES[shape_name]["n_routed_experts"]
    topics = Stream("bundles", shape_name, "topics").signs((experts, columns))
    if kind == "embed_tokens":
        topic = stream.integers(0, experts, rows)
        return (gain * bell + _TOPIC * topics[topic]).astype(np.float32)
    if kind == "o_proj":
        gain = _ATTENTION_GAIN.get(shape_name, 1.0)
    matrix = gain / np.sqrt(columns) * bell
    if kind == "gate":
        order = stream.permutation(experts)
        for i in range(_SHAPES[shape_name]["num_experts_per_tok"]):
            matrix += _AFFINITY / columns * topics[np.roll(order, i)]
    elif kind == "lm_head":
        own = Stream("bundles", shape_name, "model.embed_tokens.weight").bell(shape)
        for _ in range(_SUCCESSORS):
            matrix += _HABIT * np.sqrt(0.75 / columns) * own[stream.permutation(rows)]
    elif ".mlp." in name:  # groups of unlike size: a neighbour's scale shows
        groups = matrix.reshape(rows, -1, 32)
        groups *= stream.choice([0.5, 0.75, 1.0, 1.5], (*groups.shape[:2], 1))
    return matrix.astype(np.float32)


@cache
def tensors(name: str) -> dict[str, np.ndarray]:
    """Every tensor of a bundle by name: `<x>.weight`, or `<x>.qw` and `<x>.sc` if INT4.

    Made once a process; the arrays are read-only.
    """
    if name == "k26_sample":
        return public_tensors(PINNED)
    shape_name, rule = _split(name)
    if name.endswith(DRAFTED):
        return tensors(name.removesuffix(DRAFTED)) | _drafter(name)
    if name not in (*NAMES, MICRO, MICRO_INT4):
        raise KeyError(f"{name!r} is a shape without weights; bundles are {', '.join(NAMES)}")
    made: dict[str, np.ndarray] = {}
    for tensor, shape in shapes(config(name)):
        value = _seeded(shape_name, tensor, shape)
        matrix = tensor.removesuffix(".weight")
        if _QUANTISED[rule].fullmatch(matrix):
            q, made[matrix + ".sc"] = quantise(value)
            made[matrix + ".qw"] = pack_int4(q)
        elif rule == "fp32" or tensor.endswith("bias"):
            made[tensor] = value
        else:
            made[tensor] = round_to(value, BF16)
    for value in made.values():
        value.flags.writeable = False
    return made


def _drafter(name: str) -> dict[str, np.ndarray]:
    """The drafter's bf16 tensors: trained on the FP32 target (goldens/calibrate.py) for tiny and
    tiny2, noise for micro. The FP32 and the INT4 bundle of a shape share them."""
    shape = shape_of(name)
    path = PINNED / f"drafter_{shape}.npz"
    made = {}
    if path.exists():
        with np.load(path) as file:
            made = {tensor: file[tensor].view(BF16) for tensor in file.files}
    for tensor, size in dflash.shapes(config(name)):
        if shape == "micro":
            bell = Stream("bundles", shape, tensor).bell(size)
            scale = np.sqrt(0.75 / size[1]) if len(size) == 2 else 0.2
            made[tensor] = round_to(scale * bell + (len(size) == 1), BF16)
        made[tensor].flags.writeable = False
    return made


def public_tensors(folder: Path) -> dict[str, np.ndarray]:
    """A small checkpoint in public format (one model.safetensors) under this project's names.

    Packed words and scales are the file's own; `engine.checkpoint` imports big and strange ones.
    """
    made = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for key in file.keys():
            name = key.removeprefix("language_model.")
            if not name.endswith("weight_shape"):
                name = name.replace(".weight_packed", ".qw").replace(".weight_scale", ".sc")
                made[name] = file.get_tensor(key)
                made[name].flags.writeable = False
    return made


def public_config(folder: Path) -> dict[str, Any]:
    """text_config of its config.json, with the epsilon that is not in there."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    return {**text, "lora_rms_norm_eps": LORA_EPS}


@cache
def weights(name: str) -> Weights:
    """`tensors(name)` as the reference takes them, converted to float64 once a process."""
    return Weights(tensors(name))


# -- prompts and golden tokens ---------------------------------------------------------------------


def prompt(shape_name: str, seed: int, length: int) -> np.ndarray:
    """int32 [length], the candidate prompt number `seed`; never bos or eos."""
    stream = Stream("bundles", shape_name, "prompt", seed)
    return stream.integers(2, _SHAPES[shape_name]["vocab_size"], length).astype(np.int32)


@cache
def prompts(name: str) -> list[np.ndarray]:
    """Three int32 prompts of 5, 8 and 13 tokens; the FP32 and the INT4 bundle of a shape share
    them. For 64 tokens after each, no honest engine can come out elsewhere (goldens/prompts.py);
    the sample alone makes no such promise."""
    name = name.removesuffix(DRAFTED)
    if name not in _PROMPTS:
        raise KeyError(f"no bundle {name!r}; there are {', '.join(NAMES)}")
    pairs = zip(_PROMPTS[name], PROMPT_LENGTHS, strict=True)
    return [prompt(shape_of(name), seed, length) for seed, length in pairs]


@cache
def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens int32 [3, STEPS] and top-2 margins float64 [3, STEPS] in faithful mode."""
    made = [greedy(weights(name), config(name), p, STEPS, faithful=True) for p in prompts(name)]
    return np.stack([tokens for tokens, _ in made]), np.stack([margin for _, margin in made])
