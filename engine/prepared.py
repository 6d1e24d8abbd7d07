"""A bundle's weights as the launches want them: stacked, transposed, on the device.

q_a_proj and kv_a_proj become one projection, gate_proj and up_proj another, kv_b_proj is cut into
the absorbed keys and the values of every head, and the routed experts of a layer are one array.
Tensors that need none of it are used where they are, if they are on the device already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device import copy_to_device, empty, to_device, to_host
from engine.layers import Attention, Config, Layer, Matrix, Mlp, Moe


@dataclass(frozen=True)
class Prepared:
    embedding: Any  # [vocab, hidden]
    layers: list[Layer]
    final_norm: Any  # [hidden]
    head: Any  # [vocab, hidden]

    @property
    def act(self) -> str:
        """dtype of the activations: float32 in an FP32 model, bfloat16 in every other."""
        return str(self.embedding.dtype)


def prepare(
    weights: Mapping[str, Any], config: Config, only: Sequence[int] | None = None
) -> Prepared:
    """weights: a bundle's tensors by name, in host or device memory. only: these layers alone."""
    source = _Source(weights)
    chosen = range(config["num_hidden_layers"]) if only is None else only
    return Prepared(
        embedding=source.device("model.embed_tokens.weight"),
        layers=[_layer(source, index, config) for index in chosen],
        final_norm=source.device("model.norm.weight"),
        head=source.device("lm_head.weight"),
    )


class _Source:
    """A bundle's tensors, in host or device memory, as the launches want them on the device."""

    def __init__(self, tensors: Mapping[str, Any]):
        self.tensors = tensors

    def device(self, name: str) -> Any:
        tensor = self.tensors[name]
        return to_device(tensor) if isinstance(tensor, np.ndarray) else tensor

    def host(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return tensor if isinstance(tensor, np.ndarray) else to_host(tensor)

    def stacked(self, names: Sequence[str]) -> Any:
        """The tensors below each other along their first axis."""
        shapes = [tuple(self.tensors[name].shape) for name in names]
        rows = [shape[0] for shape in shapes]
        out = empty((sum(rows), *shapes[0][1:]), self.tensors[names[0]].dtype)
        for name, end, count in zip(names, np.cumsum(rows).tolist(), rows, strict=True):
            copy_to_device(self.host(name), out[end - count : end])
        return out

    def matrix(self, *names: str) -> Matrix:
        """The projections `names` as one, below each other; INT4 if the first one is."""
        if names[0] + ".qw" in self.tensors:
            qw = self.stacked([name + ".qw" for name in names])
            sc = self.stacked([name + ".sc" for name in names])
            return Matrix(qw.shape[0], 8 * qw.shape[1], qw=qw, sc=sc)
        if len(names) == 1:
            w = self.device(names[0] + ".weight")
        else:
            w = self.stacked([name + ".weight" for name in names])
        return Matrix(w.shape[0], w.shape[1], w=w)

    def mlp(self, name: str) -> Mlp:
        return Mlp(
            self.matrix(f"{name}.gate_proj", f"{name}.up_proj"), self.matrix(f"{name}.down_proj")
        )


def _layer(source: _Source, index: int, config: Config) -> Layer:
    name = f"model.layers.{index}"
    dense = index < config["first_k_dense_replace"]
    return Layer(
        input_norm=source.device(f"{name}.input_layernorm.weight"),
        attention=_attention(source, f"{name}.self_attn", config),
        post_norm=source.device(f"{name}.post_attention_layernorm.weight"),
        mlp=source.mlp(f"{name}.mlp") if dense else None,
        moe=None if dense else _moe(source, f"{name}.mlp", config),
    )


def _attention(source: _Source, name: str, config: Config) -> Attention:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    both = source.host(f"{name}.kv_b_proj.weight").reshape(heads, nope + v, rank)
    return Attention(
        qkv=source.matrix(f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa"),
        q_norm=source.device(f"{name}.q_a_layernorm.weight"),
        kv_norm=source.device(f"{name}.kv_a_layernorm.weight"),
        q=source.device(f"{name}.q_b_proj.weight"),
        absorb=to_device(both[:, :nope].swapaxes(1, 2)),
        values=to_device(both[:, nope:]),
        o=source.matrix(f"{name}.o_proj"),
    )


def _moe(source: _Source, name: str, config: Config) -> Moe:
    experts = [f"{name}.experts.{e}" for e in range(config["n_routed_experts"])]
    kinds = (".qw", ".sc") if experts[0] + ".gate_proj.qw" in source.tensors else (".weight",)
    routed = {}
    for kind in kinds:
        suffix = "" if kind == ".weight" else kind.replace(".", "_")
        gate_up = [f"{e}.{which}_proj{kind}" for e in experts for which in ("gate", "up")]
        down = [f"{e}.down_proj{kind}" for e in experts]
        for target, names in (("gate_up", gate_up), ("down", down)):
            stacked = source.stacked(names)
            routed[target + suffix] = stacked.reshape(
                len(experts), stacked.shape[0] // len(experts), stacked.shape[1]
            )
    return Moe(
        gate=source.matrix(f"{name}.gate"),
        bias=source.device(f"{name}.gate.e_score_correction_bias"),
        routed=routed,
        shared=source.mlp(f"{name}.shared_experts") if config.get("n_shared_experts", 1) else None,
        inner=config["moe_intermediate_size"],
        top_k=config["num_experts_per_tok"],
        scale=config["routed_scaling_factor"],
    )
