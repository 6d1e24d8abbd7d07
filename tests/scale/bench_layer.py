"""Time of one K2.6 MoE layer on this GPU, launch by launch, beside the floors of the same run.

    python -m tests.scale.bench_layer [--nodes 1 16 64] [--prefix 4096]

The layer runs as it does in a model, as one CUDA graph. A launch's time is that of the graph up to
and including it, less that of the graph before it; every replay first reads a buffer larger than
the L2 cache and restores the layer's input. Floors: the bytes that a launch must read over the copy
bandwidth measured here, or its operations over MATRIX_TFLOPS where those take longer. Needs 24 GB
of device memory.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from engine.device import (
    cdiv,
    copy_to_device,
    empty,
    kernel,
    ptr,
    static_range,
    to_device,
    to_host,
    u32,
    u64,
)
from engine.device import cuda as device_cuda
from engine.model import Plan, Tree
from engine.passes import ready
from engine.prepared import Prepared
from engine.ptx import address, load_global_v4, store_global_v4
from goldens.k26_layer import config_of, layer_inputs
from goldens.numerics import Stream
from tests.scale.k26_layer import prepared

MATRIX_TFLOPS = 790.0  # bf16, dense, as measured on an H200 by 8192^3 GEMMs
FLUSH_BYTES = 128 << 20
REPLAYS = 22


@kernel(threads=256, registers=32)
def _read(
    words: ptr[u32],
    found: ptr[u32],
):
    """16 KB a block. Reads, because lines written would go to memory during what is timed next."""
    first = u32(u32(u32(device_cuda.blockIdx.x) * u32(1024)) + u32(device_cuda.threadIdx.x))
    total = u32(0)
    for turn in static_range(4):
        four = load_global_v4(address(words, u64(u64(u32(first + u32(256 * turn))) * u64(4))))
        total = u32(u32(total | four[0]) | u32(u32(four[1] | four[2]) | four[3]))
    if total == u32(7):  # no word of the buffer is 7: this keeps the loads
        found[u32(0)] = total


@kernel(threads=256, registers=32)
def _copy(
    source: ptr[u32],
    target: ptr[u32],
):
    """16 KB a block, 16 bytes a thread and turn."""
    first = u32(u32(u32(device_cuda.blockIdx.x) * u32(1024)) + u32(device_cuda.threadIdx.x))
    for turn in static_range(4):
        at = u64(u64(u32(first + u32(256 * turn))) * u64(4))
        four = load_global_v4(address(source, at))
        store_global_v4(address(target, at), four[0], four[1], four[2], four[3])


@kernel(threads=256, registers=32)
def _restore(
    source: ptr[u32],
    target: ptr[u32],
    count: u32,
):
    i = u32(u32(u32(device_cuda.blockIdx.x) * u32(256)) + u32(device_cuda.threadIdx.x))
    if i < count:
        target[i] = source[i]


def restored(array: Any) -> Any:
    """A launch that gives the array the content that it has now."""
    kept = to_device(to_host(array))
    words = array.size * array.dtype.itemsize // 4
    return partial(_restore.launch, cdiv(words, 256), kept, array, words)


def captured(calls: list) -> Any:
    from cuda.core import Device

    builder = Device().create_graph_builder()
    builder.begin_building()
    for call in calls:
        call(stream=builder)
    return builder.end_building().complete()


def graph_times_us(graphs: list) -> np.ndarray:
    """Median time of each graph; one replay of each in turn, so that clocks drift for all alike."""
    from cuda.core import LEGACY_DEFAULT_STREAM

    times = np.zeros((REPLAYS, len(graphs)))
    for replay in range(REPLAYS):
        for index, graph in enumerate(graphs):
            start, end = cuda.event(), cuda.event()
            start.record()
            graph.launch(LEGACY_DEFAULT_STREAM)
            end.record()
            end.synchronize()
            times[replay, index] = 1e3 * start.elapsed_time(end)
    return np.median(times[2:], axis=0)


def copy_bytes_per_us() -> float:
    """Bytes read and written by a copy within the device, per microsecond."""
    size = 1 << 30
    a, b = empty((size // 4,), "uint32"), empty((size // 4,), "uint32")
    copies = [partial(_copy.launch, size // 16384, a, b)] * 8
    return 8 * 2 * size / float(graph_times_us([captured(copies)])[0])


def floors_us(config: dict, nodes: int, keys: int, hit: int, rate: float) -> dict[str, float]:
    """By launch: what reading its weights (and cache) once takes, or its operations."""
    hidden, heads, rank, q_rank = (
        config[n] for n in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, turned, v, inner = (
        config[n]
        for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")
    )
    numbers = {
        "mla.qkv": (q_rank + rank + turned) * hidden,
        "mla.q": heads * (nope + turned) * q_rank,
        "mla.absorb": heads * nope * rank,
        "mla.values": heads * v * rank,
        "mla.o": hidden * heads * v,
        "moe.gate": config["n_routed_experts"] * hidden,
        "moe.shared.gate_up": 2 * inner * hidden,
        "moe.shared.down": inner * hidden,
    }
    floors = {
        name: max(2 * count / rate, 2 * nodes * count / MATRIX_TFLOPS / 1e6)
        for name, count in numbers.items()
    }
    operations = 2 * heads * nodes * (2 * rank + turned) * (keys + nodes)
    read = 2 * (keys + nodes) * (rank + turned)
    floors["mla.attention"] = max(read / rate, operations / MATRIX_TFLOPS / 1e6)
    floors["moe.experts"] = hit * 3 * inner * hidden * (0.5 + 2 / 32) / rate
    return floors


def measure(nodes: int, keys: int, rate: float, given: dict, weights: Prepared) -> None:
    """One table: the first `nodes` of the nodes given, behind `keys` tokens."""
    config = config_of(7168)
    tree = Tree([0] * nodes, given["parents"][:nodes].tolist())
    prefix = np.resize(given["prefix"], (1, keys, given["prefix"].shape[1]))
    model = ready(weights, config, [tree], [prefix], 64)
    plan: Plan = model.fill([tree])
    copy_to_device(given["x"][:nodes], plan.x)
    names = [launch.name for launch in plan.launches]
    first = names.index("layer0.mla.qkv")
    record: dict[str, list] = {}
    plan.run(launches=slice(1, first), record=record)
    # The layer changes its input, and other input means other experts.
    h = model._buffers.activations("h", nodes, config["hidden_size"])
    again = [restored(plan.x), restored(h)]
    plan.run(record=record, launches=slice(first, None))
    plan.check()
    hit = len(np.unique(record["router_index"][0]))
    floors = floors_us(config, nodes, keys, hit, rate)
    layer = plan.launches[first:-2]
    flush = empty((FLUSH_BYTES // 4,), "uint32")
    copy_to_device(np.zeros(flush.shape, np.uint32), flush)
    start = partial(_read.launch, FLUSH_BYTES // 16384, flush, empty((1,), "uint32"))
    begin, calls = [start, *again], [launch.call for launch in layer]
    graphs = [captured(begin + calls[:count]) for count in range(len(calls) + 1)]
    times = graph_times_us(graphs)
    print(f"\nT = {nodes}, P = {keys}, {hit} experts hit, copy {rate / 1e6:.2f} TB/s")
    for launch, time in zip(layer, np.diff(times), strict=True):
        floor = floors.get(launch.name.removeprefix("layer0."))
        beside = "" if floor is None else f"{floor:9.1f} floor"
        print(f"{launch.name:32s}{time:9.1f} us{beside}")
    total, floor = times[-1] - times[0], sum(floors.values())
    print(f"{'layer':32s}{total:9.1f} us{floor:9.1f} floor, {total / floor:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prefix", type=int, default=4096)
    asked = parser.parse_args()
    rate, config = copy_bytes_per_us(), config_of(7168)
    given = layer_inputs(Stream("bench_layer"), max(asked.nodes), 64, config, 5, 7, "random")
    weights = prepared({name: to_device(array) for name, array in given.items()}, config)
    for nodes in asked.nodes:
        measure(nodes, asked.prefix, rate, given, weights)


if __name__ == "__main__":
    main()
