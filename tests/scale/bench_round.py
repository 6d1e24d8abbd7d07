"""What a decoding round costs besides its kernels: launches, waits and allocations, on this GPU.

    python -m tests.scale.bench_round [BUNDLE] [--budget 16] [--rounds 200]

Counts, while rounds of a small model run behind a warm-up, how often the host waits or copies and
what is allocated, and measures what a node of a CUDA graph costs: a graph of as many kernels that
do nothing as the round has, with and without programmatic dependent launch. Exits 1 if a round
waits more than once, anything is allocated, or a node takes more than NODE_US.
"""

import argparse
import sys
import time
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from engine import decode, graph
from engine.device import Kernel, cuda, empty, kernel, ptr, u32
from engine.draft import Ngram
from goldens import bundles
from tests.scale.bench_layer import captured, graph_times_us

NODE_US = 1.2
WARM_UP = 5


@kernel(threads=32, registers=32)
def _nothing(unused: ptr[u32]):
    pass


@kernel(threads=32, registers=32, dependent_launch=True)
def _nothing_dependent(unused: ptr[u32]):
    pass


def counted(counts: Counter, name: str, function: Any) -> Any:
    """The function, counting its calls."""

    def call(*args: Any, **keywords: Any) -> Any:
        counts[name] += 1
        return function(*args, **keywords)

    return call


def node_us(nodes: int) -> dict[str, float]:
    """Microseconds a node of a graph of kernels that do nothing."""
    unused = empty((1,), "uint32")
    graphs = [
        captured([partial(each.launch, 1, unused)] * nodes)
        for each in (_nothing, _nothing_dependent)
    ]
    times = graph_times_us(graphs) / nodes
    return {"full": float(times[0]), "dependent": float(times[1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", nargs="?", default="tiny-int4")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    asked = parser.parse_args()
    weights, config = bundles.tensors(asked.bundle), bundles.config(asked.bundle)
    prompt = [int(token) for token in bundles.prompts(asked.bundle)[0]]
    decoder = decode.Decoder(
        weights, config, Ngram(7), requests=1, budget=asked.budget, context=len(prompt) + 64
    )
    root, _ = decoder.prefill(0, prompt)
    counts: Counter = Counter()
    with mock.patch.object(Kernel, "launch", counted(counts, "launch", Kernel.launch)):
        decoder.start([root], [len(prompt) + 64])
    nodes = counts["launch"] // 2  # once to load the kernels, once into the graph
    decoder.measure([root], WARM_UP)
    context = cuda.current_context()
    manager, step = context.memory_manager, decoder.steps[asked.budget + 1]
    # Same prefix and root each time; -1 is no tree, so that nothing moves.
    step.sent.array["budgets"][:] = asked.budget
    watched = (
        (graph.Staged, "wait", graph.Staged.wait),
        (graph, "to_host", graph.to_host),
        (graph, "copy_to_device", graph.copy_to_device),
        (decode, "copy_to_device", decode.copy_to_device),
        (decode, "to_host", decode.to_host),
        (manager, "memalloc", manager.memalloc),
        (manager, "memhostalloc", manager.memhostalloc),
    )
    patches = [mock.patch.object(o, n, counted(counts, n, f)) for o, n, f in watched]
    for patch in patches:
        patch.start()
    free = context.get_memory_info().free
    device, host = [], []
    for _ in range(asked.rounds):
        start = time.perf_counter()
        device.append(sum(step.run().values()))
        host.append(time.perf_counter() - start)
        decode.Decoder._rewind(decoder, [root])  # outside the round
    for patch in patches:
        patch.stop()
    waits = counts["wait"] / asked.rounds
    rewinds = 2 * asked.rounds
    copies = counts["to_host"] + counts["copy_to_device"] - rewinds
    allocations = counts["memalloc"] + counts["memhostalloc"]
    lost = free - context.get_memory_info().free
    each = node_us(nodes)
    print(
        f"{asked.bundle}, budget {asked.budget}: {nodes} kernels a round, "
        f"{1e6 * np.median(device):.1f} us on the device, {1e6 * np.median(host):.1f} us in all"
    )
    print(f"{waits:g} waits and {copies / asked.rounds:g} blocking copies a round")
    print(f"{allocations} allocations and {lost} bytes less free after {asked.rounds} rounds")
    print(f"a node of the graph: {each['full']:.2f} us, {each['dependent']:.2f} us if dependent")
    bad = waits > 1 or copies or allocations or lost > 0 or each["full"] > NODE_US
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
