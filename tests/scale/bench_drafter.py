"""Time of a whole draft at the shape of the public K2.5 drafter on this GPU, stage by stage.

    python -m tests.scale.bench_drafter [--contexts 512 4096 32768] [--requests 1]

Six layers, 64 query and 8 key heads of 128, MLP of 18432, block of 8, six taps, the target's head
of 163840 tokens: 9 GB of bf16 noise. `draft` is from root token to the 64 best guesses of 7
positions, `commit` what a round's accepted tokens cost, up to 8: both as the captured round runs
them. Floors: the weights and the context, read once at the copy bandwidth measured here. The L2
cache is not flushed: the weights are far larger. Needs 16 GB of device memory; --shape micro for
the simulator.
"""

import argparse
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.cache import LatentCache
from engine.device import SIMULATED, copy_to_device, empty, to_device
from engine.dflash import DFlash
from engine.graph import Staged
from engine.layers import Drafter, DraftLayer, Matrix, Mlp
from goldens import bundles
from goldens.numerics import BF16, Stream, round_to

RUNS = 20
BEST = 64  # guesses of a position
PAGE = 64


class Noise:
    """bf16 weights on the device, from one block of noise over and over."""

    def __init__(self) -> None:
        self.block = round_to(Stream("bench_drafter").bell(1 << 22), BF16)
        self.bytes = 0

    def __call__(self, *shape: int) -> Any:
        out = empty(shape, "bfloat16")
        flat, columns = out.reshape(out.size), shape[-1]
        scaled = round_to(self.block.astype(np.float32) * columns**-0.5, BF16)
        for at in range(0, out.size, scaled.size):
            part = scaled[: min(scaled.size, out.size - at)]
            copy_to_device(part, flat[at : at + part.size])
        self.bytes += 2 * out.size
        return out

    def ones(self, size: int) -> Any:
        return to_device(np.ones(size, BF16))

    def matrix(self, n: int, k: int) -> Matrix:
        return Matrix(n, k, w=self(n, k))


def weights(config: dict, noise: Noise) -> Drafter:
    drafter, hidden = config["drafter"], config["hidden_size"]
    size, inner = drafter["head_dim"], drafter["intermediate_size"]
    queries, keys = (drafter[f"num_{n}_heads"] * size for n in ("attention", "key_value"))
    layers = []
    for _ in range(drafter["num_hidden_layers"]):
        qkv = noise.matrix(queries + 2 * keys, hidden)
        kv = qkv.w[queries:]
        layers.append(
            DraftLayer(
                noise.ones(hidden), qkv, Matrix(2 * keys, hidden, w=kv), noise.ones(size),
                noise.ones(size), noise.matrix(hidden, queries), noise.ones(hidden),
                Mlp(noise.matrix(2 * inner, hidden), noise.matrix(hidden, inner)),
            )
        )  # fmt: skip
    fc = noise(hidden, len(drafter["target_layer_ids"]) * hidden)
    return Drafter(fc, noise.ones(hidden), layers, noise.ones(hidden))


def measure(config: dict, contexts: list[int], requests: int, rate: float | None) -> None:
    noise = Noise()
    drafter = config["drafter"]
    hidden, vocabulary, slots = config["hidden_size"], config["vocab_size"], drafter["block_size"]
    made = weights(config, noise)
    draft_bytes = noise.bytes - 2 * made.fc.size
    head = noise(vocabulary, hidden)
    draft_bytes += 2 * head.size
    pages = -(-(max(contexts) + slots) // PAGE)
    cache = LatentCache(
        layers=1, width=8, dtype="bfloat16", requests=requests, pages=requests * pages,
        page_size=PAGE, max_pages=pages,
    )  # fmt: skip
    for request in range(requests):
        cache.map_pages(request, np.arange(request, requests * pages, requests)[::-1].tolist())
    prefix_len = empty((requests,), "int32")
    embedding = noise(1 << 10, hidden)  # the tokens that this uses are among these rows
    config = {**config, "drafter": {**drafter, "mask_token_id": 7}}
    model = SimpleNamespace(
        group=None, act="bfloat16", cache=cache, rows=requests * slots, requests=requests,
        prefixes=lambda count: prefix_len,
        weights=SimpleNamespace(embedding=embedding, head=head),
    )  # fmt: skip
    k = min(BEST, vocabulary)
    decoder = SimpleNamespace(
        model=model, requests=requests, k=k, root_tokens=to_device(np.arange(requests, dtype="i4")),
        log_probs=empty((requests, slots - 1, k), "float32"),
        tokens=empty((requests, slots - 1, k), "int32"),
    )  # fmt: skip
    own = DFlash(made, config)
    own.attach(decoder)
    accepted = np.tile(np.arange(slots, dtype=np.int32), (requests, 1))
    got = {
        "accepted": to_device(accepted),
        "accepted_counts": to_device(np.full(requests, slots, np.int32)),
    }
    window = SimpleNamespace(prefix_len=prefix_len, page_table=cache.page_table)
    step = SimpleNamespace(
        nodes=slots, got=SimpleNamespace(device=got),
        sent=SimpleNamespace(device={"reaches": to_device(np.full(requests, slots, np.int32))}),
        plan=SimpleNamespace(window=window, taps=noise(requests * slots, made.fc.shape[1])),
    )  # fmt: skip
    zeros = np.zeros(own.cache.shape[1:], BF16)
    for layer in range(own.cache.shape[0]):
        copy_to_device(zeros, own.cache[layer])
    staged = Staged(own.launches(step))
    kv_bytes = 2 * made.layers[0].kv.w.size * len(made.layers)
    commit_bytes = 2 * made.fc.size + kv_bytes
    print(f"{noise.bytes / 1e9:.2f} GB of weights, {requests} requests, {k} guesses a position")
    for context in contexts:
        copy_to_device(np.full(requests, context, np.int32), prefix_len)
        staged.load()
        runs = []
        for _ in range(2 if SIMULATED else RUNS):
            staged.launch()
            runs.append(staged.wait())
        times = {stage: float(np.median([run[stage] for run in runs[1:]])) for stage in runs[0]}
        read = requests * context * own.entry * 2 * len(made.layers)
        floors = {"draft": draft_bytes + read, "commit": commit_bytes}
        said = [
            f"{stage} {1e6 * seconds:.0f} us"
            + (f" (floor {floors[stage] / rate * 1e6:.0f})" if rate else "")
            for stage, seconds in times.items()
        ]
        print(f"context {context}: {', '.join(said)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--shape", default="k26")
    given = parser.parse_args()
    rate = None
    if not SIMULATED:
        from tests.scale.bench_layer import copy_bytes_per_us

        rate = 1e6 * copy_bytes_per_us()
        print(f"copy {rate / 1e12:.2f} TB/s")
    config = bundles.config(
        given.shape + ("-fp32" if given.shape == "micro" else "") + bundles.DRAFTED
    )
    measure(config, given.contexts, given.requests, rate)


if __name__ == "__main__":
    main()
