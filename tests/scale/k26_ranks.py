"""One K2.6 MoE layer on ranks: its time as a CUDA graph, and its bits.

    python -m tests.scale.k26_ranks [--turns 1 2 4] [--nccl 1 2] [--nodes 1 16] [--keys 4096]

--turns: ranks that take turns on one GPU (bits alone). --nccl: a GPU each. The weights are random
and the same for every number of ranks. A rank needs 11 GB of GPU memory divided by their number,
and 2 GB more.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from engine.device import copy_to_device, to_device, to_host
from engine.kernels.join_columns import join_columns
from engine.layers import Launch
from engine.model import Tree
from engine.parallel import Ranks, in_turns
from engine.passes import ready
from engine.prepared import prepare
from goldens.k26_layer import config_of

REPLAYS = 22
BASES = 3  # different experts
POOL = 1 << 22  # different values of a matrix


class RandomLayer(Mapping):
    """The layer's tensors by their public names, made when they are asked for."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        random = np.random.Generator(np.random.PCG64(26))
        self.values = random.standard_normal(POOL).astype(np.float32)
        inner, hidden = config["moe_intermediate_size"], config["hidden_size"]
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.experts = {
            (which, base): (
                random.integers(-(2**31), 2**31, (n, k // 8)).astype(np.int32),
                (0.004 + 0.004 * random.random((n, k // 32))).astype(ml_dtypes.bfloat16),
            )
            for which, (n, k) in sizes.items()
            for base in range(BASES)
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        heads, nope, turned = (
            c[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        hidden, rank, q_rank, v = (
            c[n] for n in ("hidden_size", "kv_lora_rank", "q_lora_rank", "v_head_dim")
        )
        inner = c["moe_intermediate_size"]
        shapes = {
            "embed_tokens": (c["vocab_size"], hidden), "lm_head": (c["vocab_size"], hidden),
            "norm": (hidden,), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "q_a_proj": (q_rank, hidden), "q_a_layernorm": (q_rank,),
            "q_b_proj": (heads * (nope + turned), q_rank),
            "kv_a_proj_with_mqa": (rank + turned, hidden), "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + v), rank), "o_proj": (hidden, heads * v),
            "gate": (c["n_routed_experts"], hidden), "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        }  # fmt: skip
        return shapes[name.removesuffix(".weight").rpartition(".")[2]]

    def __getitem__(self, name: str) -> np.ndarray:
        if ".experts." in name:
            _, _, rest = name.partition(".experts.")
            expert, which, kind = rest.split(".")
            made = self.experts[which.removesuffix("_proj"), int(expert) % BASES]
            return made[kind == "sc"]
        if name.endswith("e_score_correction_bias"):
            return np.zeros(self.config["n_routed_experts"], np.float32)
        shape = self._shape(name)
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "little") % POOL
        values = np.resize(np.roll(self.values, start), shape)
        if len(shape) == 1:
            values = 1 + 0.1 * values
        else:
            values = values * np.float32(shape[1] ** -0.5)
        return values.astype(ml_dtypes.bfloat16)

    def __contains__(self, name: object) -> bool:
        return not (".experts." in str(name) and str(name).endswith(".weight")) and not (
            ".experts." not in str(name) and str(name).endswith((".qw", ".sc"))
        )

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def layer_of_rank(group: Any, rows: list[int], keys: int) -> list[tuple[str, float]]:
    """For each number of rows the digest of the layer's output and, where a graph can hold it, the
    median of its times in us (else 0)."""
    config = {**config_of(7168), "first_k_dense_replace": 0}
    weights = prepare(RandomLayer(config), config, only=[0], group=group)
    random = np.random.Generator(np.random.PCG64(1))
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    prefix = random.standard_normal((1, keys, width)).astype(ml_dtypes.bfloat16)
    return [_layer(group, weights, config, count, prefix) for count in rows]


def _layer(group: Any, weights: Any, config: dict, rows: int, prefix: Any) -> tuple[str, float]:
    tree = Tree([0] * rows, [-1, *(i // 2 for i in range(rows - 1))])
    model = ready(weights, config, [tree], [prefix], 64, group)
    plan = model.fill([tree])
    x = np.random.Generator(np.random.PCG64(rows)).standard_normal(plan.x.shape)
    copy_to_device(x.astype(np.float32), plan.x)
    names = [launch.name for launch in plan.launches]
    launches = plan.launches[names.index("slot_mapping") : names.index("head")]
    for launch in launches:
        launch.call(stream=None)
    plan.check()
    bits = hashlib.sha256(to_host(plan.x).tobytes()).hexdigest()[:16]
    if group is not None and not group.captured:
        return bits, 0.0
    # Each replay starts from the same stream: one that grows sends all rows to the same experts.
    start = to_device(x.astype(np.float32)[None])
    return bits, _graph_us([Launch("x", partial(join_columns, start, whole=plan.x)), *launches])


def _graph_us(launches: list) -> float:
    from cuda.core import LEGACY_DEFAULT_STREAM, Device
    from numba import cuda

    builder = Device().create_graph_builder()
    builder.begin_building()
    for launch in launches:
        launch.call(stream=builder)
    graph = builder.end_building().complete()
    times = []
    for _ in range(REPLAYS):
        start, end = cuda.event(), cuda.event()
        start.record()
        graph.launch(LEGACY_DEFAULT_STREAM)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return float(np.median(times[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, nargs="*", default=[])
    parser.add_argument("--nccl", type=int, nargs="*", default=[])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    asked = parser.parse_args()
    one = layer_of_rank(None, asked.nodes, asked.keys)
    found = {"one GPU": [one]}
    for ranks in asked.turns:
        found[f"{ranks} in turns"] = in_turns(
            ranks, lambda group: layer_of_rank(group, asked.nodes, asked.keys)
        )
    for ranks in asked.nccl:
        with Ranks([str(device) for device in range(ranks)]) as started:
            found[f"{ranks} over NCCL"] = started.call(
                "tests.scale.k26_ranks:layer_of_rank", asked.nodes, asked.keys
            )
    rows = []
    for name, said in found.items():
        for number, nodes in enumerate(asked.nodes):
            alike = all(each[number][0] == one[number][0] for each in said)
            us = max(each[number][1] for each in said)
            rows.append({"on": name, "nodes": nodes, "us": us, "bits_of_one_gpu": alike})
            bits = "the bits of one GPU" if alike else "OTHER BITS"
            print(f"{name:14s} T = {nodes:3d}  {us:8.1f} us  {bits}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
