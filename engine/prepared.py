"""A bundle's weights as the launches want them: stacked, transposed, on the device.

q_a_proj and kv_a_proj become one projection, gate_proj and up_proj another, kv_b_proj is cut into
the absorbed keys and the values of every head, and the routed experts of a layer are one array.
Tensors that need none of it are used where they are, if they are on the device already.

A rank of several reads its share alone: its heads of q_b_proj and kv_b_proj, its rows of o_proj, of
a dense layer's matrices and of lm_head, its routed experts. The rest is small, and whole on every
rank: norms, q_a_proj and kv_a_proj, the router, the shared expert, the embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device import copy_to_device, empty, to_device, to_host
from engine.layers import Attention, Config, Drafter, DraftLayer, Layer, Matrix, Mlp, Moe


@dataclass(frozen=True)
class Prepared:
    embedding: Any  # [vocab, hidden]
    layers: list[Layer]
    final_norm: Any  # [hidden]
    head: Any  # [vocab, hidden], or a rank's share of its rows

    @property
    def act(self) -> str:
        """dtype of the activations: float32 in an FP32 model, bfloat16 in every other."""
        return str(self.embedding.dtype)


def prepare(
    weights: Mapping[str, Any],
    config: Config,
    only: Sequence[int] | None = None,
    group: Any = None,
) -> Prepared:
    """weights: a bundle's tensors by name, in host or device memory. only: these layers alone.
    group: this rank of several (engine/parallel.py). ValueError for heads or experts that its ranks
    cannot share equally."""
    source = _Source(weights, group)
    if group is not None:
        for what in ("num_attention_heads", "n_routed_experts"):
            if config[what] % group.world:
                raise ValueError(f"{what} {config[what]} is no multiple of {group.world} ranks")
    chosen = range(config["num_hidden_layers"]) if only is None else only
    return Prepared(
        embedding=source.device("model.embed_tokens.weight"),
        layers=[_layer(source, index, config) for index in chosen],
        final_norm=source.device("model.norm.weight"),
        head=source.share("lm_head.weight", 2),
    )


def prepare_drafter(weights: Mapping[str, Any], config: Config, act: str) -> Drafter:
    """The drafter among a bundle's tensors (`drafter.*`); act: the target's activations."""
    source, drafter = _Source(weights, None), config["drafter"]
    queries = drafter["num_attention_heads"] * drafter["head_dim"]

    def layer(name: str) -> DraftLayer:
        attention = f"{name}.self_attn"
        qkv = source.matrix(*(f"{attention}.{which}_proj" for which in "qkv"))
        kv = qkv.w[queries:]
        return DraftLayer(
            input_norm=source.device(f"{name}.input_layernorm.weight"),
            qkv=qkv,
            kv=Matrix(kv.shape[0], kv.shape[1], w=kv),
            q_norm=source.device(f"{attention}.q_norm.weight"),
            k_norm=source.device(f"{attention}.k_norm.weight"),
            o=source.matrix(f"{attention}.o_proj"),
            post_norm=source.device(f"{name}.post_attention_layernorm.weight"),
            mlp=source.mlp(f"{name}.mlp"),
        )

    return Drafter(
        fc=source.device("drafter.fc.weight"),
        hidden_norm=source.device("drafter.hidden_norm.weight"),
        layers=[layer(f"drafter.layers.{i}") for i in range(drafter["num_hidden_layers"])],
        norm=to_device(source.host("drafter.norm.weight").astype(act)),
    )


class _Source:
    """A bundle's tensors, in host or device memory, as the launches want them on the device."""

    def __init__(self, tensors: Mapping[str, Any], group: Any):
        self.tensors, self.group = tensors, group

    def splits(self, names: Sequence[str], unit: int) -> bool:
        """Whether there are ranks, and `unit` divides the rows of each one's share."""
        rows = [self.tensors[name].shape[0] for name in names]
        return self.group is not None and not any(n % (unit * self.group.world) for n in rows)

    def rows(self, count: int) -> slice:
        """This rank's of `count` rows, heads or experts."""
        if self.group is None:
            return slice(0, count)
        each = count // self.group.world
        return slice(self.group.rank * each, (self.group.rank + 1) * each)

    def share(self, name: str, unit: int = 1) -> Any:
        """This rank's rows, or all of them where they cannot be shared."""
        if not self.splits([name], unit):
            return self.device(name)
        tensor = self.tensors[name]
        part = tensor[self.rows(tensor.shape[0])]
        return to_device(part) if isinstance(part, np.ndarray) else part

    def device(self, name: str) -> Any:
        tensor = self.tensors[name]
        return to_device(tensor) if isinstance(tensor, np.ndarray) else tensor

    def host(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return tensor if isinstance(tensor, np.ndarray) else to_host(tensor)

    def stacked(self, names: Sequence[str], *, share: bool = False) -> Any:
        """The tensors, or this rank's rows of each, below each other along their first axis."""
        shapes = [tuple(self.tensors[name].shape) for name in names]
        parts = [self.rows(shape[0]) if share else slice(0, shape[0]) for shape in shapes]
        rows = [part.stop - part.start for part in parts]
        out = empty((sum(rows), *shapes[0][1:]), self.tensors[names[0]].dtype)
        ends = np.cumsum(rows).tolist()
        for name, end, count, part in zip(names, ends, rows, parts, strict=True):
            copy_to_device(self.host(name)[part], out[end - count : end])
        return out

    def matrix(self, *names: str, share: bool = False) -> Matrix:
        """The projections `names` as one, below each other; INT4 if the first one is. share: this
        rank's rows of each."""
        ranks = self.group.world if share else None
        if names[0] + ".qw" in self.tensors:
            qw = self.stacked([name + ".qw" for name in names], share=share)
            sc = self.stacked([name + ".sc" for name in names], share=share)
            return Matrix(qw.shape[0], 8 * qw.shape[1], qw=qw, sc=sc, ranks=ranks)
        if len(names) == 1:
            w = (self.share if share else self.device)(names[0] + ".weight")
        else:
            w = self.stacked([name + ".weight" for name in names], share=share)
        return Matrix(w.shape[0], w.shape[1], w=w, ranks=ranks)

    def mlp(self, name: str, *, share: bool = False) -> Mlp:
        """share: split over the ranks, if their rows fit the GEMMs (32 rows a tile in INT4)."""
        gate, up, down = (f"{name}.{which}_proj" for which in ("gate", "up", "down"))
        int4 = gate + ".qw" in self.tensors
        kind, unit = (".qw", 32) if int4 else (".weight", 2)
        share = share and self.splits([each + kind for each in (gate, up, down)], unit)
        return Mlp(self.matrix(gate, up, share=share), self.matrix(down, share=share))


def _layer(source: _Source, index: int, config: Config) -> Layer:
    name = f"model.layers.{index}"
    dense = index < config["first_k_dense_replace"]
    return Layer(
        input_norm=source.device(f"{name}.input_layernorm.weight"),
        attention=_attention(source, f"{name}.self_attn", config),
        post_norm=source.device(f"{name}.post_attention_layernorm.weight"),
        mlp=source.mlp(f"{name}.mlp", share=True) if dense else None,
        moe=None if dense else _moe(source, f"{name}.mlp", config),
    )


def _attention(source: _Source, name: str, config: Config) -> Attention:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    both = source.host(f"{name}.kv_b_proj.weight").reshape(heads, nope + v, rank)
    both = both[source.rows(heads)]
    share = source.splits([f"{name}.o_proj.weight"], 2)
    return Attention(
        qkv=source.matrix(f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa"),
        q_norm=source.device(f"{name}.q_a_layernorm.weight"),
        kv_norm=source.device(f"{name}.kv_a_layernorm.weight"),
        q=source.share(f"{name}.q_b_proj.weight"),
        absorb=to_device(both[:, :nope].swapaxes(1, 2)),
        values=to_device(both[:, nope:]),
        o=source.matrix(f"{name}.o_proj", share=share),
    )


def _moe(source: _Source, name: str, config: Config) -> Moe:
    here = source.rows(config["n_routed_experts"])
    experts = [f"{name}.experts.{e}" for e in range(here.start, here.stop)]
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
        ranks=None if source.group is None else source.group.world,
    )
