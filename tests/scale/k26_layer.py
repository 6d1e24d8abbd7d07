"""Launchers of specs/k26_layer.toml and k26_dense_layer.toml: layers at the real shape."""

from typing import Any

from engine.device import empty, to_device, to_host
from engine.layers import Attention, Layer, Matrix, Mlp, Moe
from engine.passes import run_layer
from engine.prepared import Prepared
from goldens.k26_layer import config_of


def expand(base: Any, count: int) -> Any:
    """[count, ...] on the device: entry e is base[e mod its length]."""
    out = empty((count, *base.shape[1:]), base.dtype)
    flat = out.reshape(count, out.size // count).view("uint8")
    source = base.reshape(base.shape[0], base.size // base.shape[0]).view("uint8")
    for entry in range(count):
        flat[entry].copy_to_device(source[entry % base.shape[0]])
    return out


def layer_of(given: dict[str, Any], config: dict) -> Layer:
    """The layer of device arrays named as in the specs; dense if it has no router."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    both = to_host(given["kv_b"]).reshape(heads, nope + v, rank)
    dense = "gate" not in given
    return Layer(
        input_norm=given["input_norm"],
        attention=Attention(
            qkv=_stacked(given["q_a"], given["kv_a"]),
            q_norm=given["q_a_norm"],
            kv_norm=given["kv_a_norm"],
            q=given["q_b"],
            absorb=to_device(both[:, :nope].swapaxes(1, 2)),
            values=to_device(both[:, nope:]),
            o=_matrix(given["o"]),
        ),
        post_norm=given["post_norm"],
        mlp=Mlp(_matrix(given["gate_up"]), _matrix(given["down"])) if dense else None,
        moe=None if dense else _moe(given, config),
    )


def _moe(given: dict[str, Any], config: dict) -> Moe:
    routed = ("gate_up_qw", "gate_up_sc", "down_qw", "down_sc")
    return Moe(
        gate=_matrix(given["gate"]),
        bias=given["bias"],
        routed={name: expand(given[name], config["n_routed_experts"]) for name in routed},
        shared=Mlp(_matrix(given["shared_gate_up"]), _matrix(given["shared_down"])),
        inner=config["moe_intermediate_size"],
        top_k=config["num_experts_per_tok"],
        scale=config["routed_scaling_factor"],
    )


def _matrix(w: Any) -> Matrix:
    return Matrix(w.shape[0], w.shape[1], w=w)


def _stacked(upper: Any, lower: Any) -> Matrix:
    out = empty((upper.shape[0] + lower.shape[0], upper.shape[1]), upper.dtype)
    flat = out.reshape(out.size).view("uint8")
    cut = upper.size * upper.dtype.itemsize
    flat[:cut].copy_to_device(upper.reshape(upper.size).view("uint8"))
    flat[cut:].copy_to_device(lower.reshape(lower.size).view("uint8"))
    return _matrix(out)


def prepared(given: dict[str, Any], config: dict) -> Prepared:
    """A model of this layer alone, with a vocabulary in name only."""
    hidden, dtype = config["hidden_size"], given["o"].dtype
    table = empty((config["vocab_size"], hidden), dtype)
    return Prepared(table, [layer_of(given, config)], given["post_norm"], table)


def k26_layer(
    x, parents, prefix, input_norm, q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o, post_norm, gate,
    bias, gate_up_qw, gate_up_sc, down_qw, down_sc, shared_gate_up, shared_down, *,
    page_size: int, y, latent, attention, mlp, stream=None,
) -> None:  # fmt: skip
    """engine.passes.layer_output for these weights; the shapes are the spec's."""
    given = dict(locals())
    config = config_of(x.shape[1])
    outputs = {"y": y, "latent": latent, "attention": attention, "mlp": mlp}
    run_layer(prepared(given, config), config, x, parents, prefix, page_size, outputs)


def k26_dense_layer(
    x, parents, prefix, input_norm, q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o, post_norm,
    gate_up, down, *, page_size: int, y, latent, attention, mlp, stream=None,
) -> None:  # fmt: skip
    """engine.passes.layer_output for these weights; the shapes are the spec's."""
    given = dict(locals())
    config = config_of(x.shape[1])
    outputs = {"y": y, "latent": latent, "attention": attention, "mlp": mlp}
    run_layer(prepared(given, config), config, x, parents, prefix, page_size, outputs)
