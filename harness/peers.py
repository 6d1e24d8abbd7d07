"""Other people's kernels for the same work, timed in turns with ours where they can be imported.

A peer takes the case's inputs and scalars and gives a function that times one call in seconds: a
CUDA graph over rotating weights as harness/bench_case.py times ours, or a wall clock where the host
takes part. Timing needs shapes alone, so weights are random. What cannot run is reported absent,
with the reason.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from harness.bench_clock import SHORT_S

COLD_BYTES = 256 << 20
Timer = Callable[[], float]


class Rival:
    """A peer at one case: its times so far, or why it has none."""

    def __init__(self, peer: Callable[[Mapping[str, Any]], Timer], given: Mapping[str, Any]):
        self.seconds: list[float] = []
        self.spent_s, self.absent = 0.0, ""
        self.timer: Timer | None = None
        try:
            self.timer = peer(given)
        except Exception as error:  # whatever a library that is not ours raises
            first = (str(error).splitlines() or [""])[0][:80]
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            self.absent = f"absent: {kind}{first}"

    def once(self, limit_s: float) -> None:
        """One more time, unless those so far took longer than that."""
        if self.timer is None or self.spent_s > limit_s:
            return
        start = time.perf_counter()
        self.seconds.append(self.timer())
        self.spent_s += time.perf_counter() - start

    def told(self) -> float | str:
        """Median time in us, without the first two, or why it is absent."""
        if self.timer is None:
            return self.absent
        kept = self.seconds[2:] or self.seconds
        return round(median(kept) * 1e6, 3)


def rivals(stem: str, given: Mapping[str, Any]) -> dict[str, Rival]:
    """The peers of a spec, ready to be timed."""
    return {name: Rival(peer, given) for name, peer in PEERS.get(stem, {}).items()}


def release() -> None:
    """Give torch's unused device memory back."""
    import sys

    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


def matrix_rate() -> float | None:
    """bf16 operations a second of an 8192 cubed product by cuBLAS on random data; None without."""
    try:
        import torch
    except ImportError:
        return None
    n = 8192
    a, b, c = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    timer = _graph([lambda: torch.mm(a, b, out=c)], 4)
    return 2 * n**3 / median(timer() for _ in range(11))


def _graph(calls: list[Callable[[], Any]], at_least: int = 20) -> Timer:
    """Times one call of a graph that walks through `calls`, which are run once before."""
    import torch

    repeat = -(-at_least // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            for call in calls:
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer() -> float:
        if short:  # as bench_clock.Replay does
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / (repeat * len(calls))

    short = True
    short = timer() * repeat * len(calls) < SHORT_S
    return timer


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


# -- cuBLAS ----------------------------------------------------------------------------------------


def _cublas(rows: int, n: int, k: int, batch: int = 1) -> Timer:
    import torch

    copies = max(1, min(32, -(-COLD_BYTES // (batch * n * k * 2))))
    many = (batch,) if batch > 1 else ()
    weights = [_random(*many, n, k) for _ in range(copies)]
    x, y = _random(*many, rows, k), _random(*many, rows, n)
    return _graph([partial(torch.matmul, x, w.mT, out=y) for w in weights])


def _w4a16_cublas(given: Mapping[str, Any]) -> Timer:
    rows, k = given["x"].shape
    return _cublas(rows, given["qw"].shape[0], k)


def _gemm_cublas(given: Mapping[str, Any]) -> Timer:
    rows, (n, k) = given["x"].shape[0], given["w"].shape
    return _cublas(rows, n, k)


def _heads_cublas(given: Mapping[str, Any]) -> Timer:
    heads, n, k = given["w"].shape
    return _cublas(given["x"].shape[0], n, k, batch=heads)


# -- INT4 ------------------------------------------------------------------------------------------


def _w4a16_int4pack(given: Mapping[str, Any]) -> Timer:
    import torch

    (rows, k), n = given["x"].shape, given["qw"].shape[0]
    copies = max(1, min(64, -(-COLD_BYTES // (n * k // 2))))
    x = _random(rows, k)
    packed = torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
    scales = torch.ones(k // 32, n, 2, device="cuda", dtype=torch.bfloat16)
    weights = [torch.ops.aten._convert_weight_to_int4pack(packed, 8) for _ in range(copies)]
    mm = torch.ops.aten._weight_int4pack_mm
    return _graph([partial(mm, x, w, 32, scales) for w in weights])


class _Humming:
    """One of humming-kernels' INT4 matrices of group 32, or one of every expert."""

    def __init__(self, n: int, k: int, experts: int = 0):
        import torch
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        schema = HummingWeightSchema(
            b_dtype="uint4", bs_dtype="bfloat16", weight_scale_group_size=32
        )
        self.config = prepare_layer_config(
            n, k, schema, num_experts=experts or None, torch_dtype=torch.bfloat16
        )
        many = (experts,) if experts else ()
        words = torch.randint(
            -(2**31), 2**31 - 1, (*many, n, k // 8), device="cuda", dtype=torch.int32
        )
        scales = torch.full((*many, n, k // 32), 0.01, device="cuda", dtype=torch.bfloat16)
        self.tensors = transform_humming_tensors(
            self.config, {"weight": words, "weight_scale": scales}
        )
        self.n, self.top = n, 1
        self.locks = torch.zeros(1 << 16, device="cuda", dtype=torch.int32)

    def prepared(self, rows: int, kind: str) -> tuple[Any, int]:
        """The kernel that humming's heuristics choose, and the rows of its blocks."""
        import json

        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config

        tuning = get_heuristics_config(self.config, shape_m=rows, gemm_type=kind)
        made = HummingKernel.prepare_kernels(
            self.config.to_str(), json.dumps({"gemm_type": kind}), dict(tuning)
        )
        return made, int(tuning["block_shape"][0])

    def call(self, kernel: Any, x: Any, y: Any, **routing: Any) -> Callable[[], Any]:
        from humming.ops import launch_kernel

        return partial(
            launch_kernel, configs=kernel, inputs=x, outputs=y, weight=self.tensors["weight"],
            weight_scale=self.tensors["weight_scale"], locks=self.locks, **routing,
        )  # fmt: skip


def _w4a16_humming(given: Mapping[str, Any]) -> Timer:
    (rows, k), n = given["x"].shape, given["qw"].shape[0]
    copies = max(1, min(32, -(-COLD_BYTES // (n * k // 2))))
    matrices = [_Humming(n, k) for _ in range(copies)]
    kernel, _ = matrices[0].prepared(rows, "dense")
    x, y = _random(rows, k), _random(rows, n)
    return _graph([m.call(kernel, x, y) for m in matrices])


_EXPERTS: dict[tuple, tuple[_Humming, _Humming]] = {}  # 9.5 GB that the cases of a shape share


def _moe_humming(given: Mapping[str, Any]) -> Timer:
    """The two GEMMs alone: no routing, SwiGLU or sum."""
    import torch

    (rows, hidden), experts = given["x"].shape, given["experts"]
    count, both = given["gate_up_qw"].shape[:2]
    inner = both // 2
    key = (count, hidden, inner)
    if key not in _EXPERTS:
        _EXPERTS.clear()
        _EXPERTS[key] = (_Humming(both, hidden, count), _Humming(hidden, inner, count))
    up, down = _EXPERTS[key]
    top_k = experts.shape[1]
    slots = rows * top_k
    x, a, y = _random(rows, hidden), _random(slots, inner), _random(slots, hidden)
    gate_up = _random(slots, both)
    up_kernel, up_rows = up.prepared(slots, "indexed")
    down_kernel, down_rows = down.prepared(slots, "indexed")
    calls = []
    for turn in range(4 if rows == 1 else 1):  # other experts, where few are touched
        chosen = torch.tensor((experts.astype(np.int64) + 48 * turn) % count, device="cuda")
        calls.append(up.call(up_kernel, x, gate_up, top_k=top_k, **_sorted(chosen, up_rows)))
        calls.append(down.call(down_kernel, a, y, top_k=1, **_sorted(chosen, down_rows)))
    timer = _graph(calls, 2 if slots > 64 else 40)
    return lambda: 2 * timer()


def _sorted(chosen: Any, block: int) -> dict[str, Any]:
    """Slots by expert, each expert's padded to whole blocks, as humming's indexed GEMM wants."""
    import torch

    flat = chosen.reshape(-1)
    ids, experts = [], []
    for expert in torch.unique(flat).tolist():
        mine = torch.where(flat == expert)[0]
        blocks = -(-mine.numel() // block)
        pad = torch.full((blocks * block - mine.numel(),), flat.numel(), device=flat.device)
        ids += [mine, pad]
        experts += [expert] * blocks
    sorted_ids = torch.cat(ids).to(torch.int32)
    return {
        "sorted_ids": sorted_ids,
        "expert_ids": torch.tensor(experts, dtype=torch.int32, device="cuda"),
        "num_tokens_padded": torch.tensor([sorted_ids.numel()], dtype=torch.int32, device="cuda"),
    }


# -- attention and trees ---------------------------------------------------------------------------


def _tree_torch(given: Mapping[str, Any]) -> Timer:
    """One request: scores, masked tail, softmax and mix in bf16 by torch, cache read in place."""
    import torch

    nodes, heads, width = given["q"].shape
    if len(given["row_start"]) != 2:
        raise NotImplementedError("one request only")
    rank = 1 << (width - 1).bit_length() - 1
    keys = int(given["prefix_len"][0]) + nodes
    copies = max(1, min(32, -(-COLD_BYTES // (keys * width * 2))))
    caches = [_random(keys, width) for _ in range(copies)]
    q = _random(nodes * heads, width)
    bits = np.unpackbits(given["ancestors"].view(np.uint8), axis=1, bitorder="little")
    seen = torch.tensor(bits[:, :nodes].astype(bool), device="cuda").repeat_interleave(heads, 0)
    mask = torch.zeros(nodes * heads, nodes, device="cuda", dtype=torch.bfloat16)
    mask.masked_fill_(~seen, float("-inf"))

    def call(cache: Any) -> Any:
        scores = q @ cache.T
        scores[:, -nodes:] += mask
        return torch.softmax(scores, -1) @ cache[:, :rank]

    return _graph([partial(call, cache) for cache in caches], 4)


def _host_heap(given: Mapping[str, Any]) -> Timer:
    """What engines with a host-built tree do: top-k and log-sum-exp on the GPU, a copy to the host,
    the heap in Python, the visibility matrix back. For one request; includes what tree_build does.
    """
    import torch

    logits, budget = given["logits"], int(given["top_k"])
    if len(logits) != 1:
        raise NotImplementedError("one request only")
    on_device = torch.tensor(np.asarray(logits[0], np.float32), device="cuda")
    if logits.dtype != np.float32:
        on_device = on_device.bfloat16()

    def timer() -> float:
        start = time.perf_counter()
        wide = on_device.float()
        best = torch.topk(wide, budget, dim=-1).values - torch.logsumexp(wide, -1, keepdim=True)
        parents, visible = _heap(best.cpu().tolist(), budget)
        torch.from_numpy(visible).cuda()
        torch.tensor(parents).cuda()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    timer()
    return timer


def _heap(log_probs: list[list[float]], budget: int) -> tuple[list[int], np.ndarray]:
    """Best-first tree of `budget` nodes behind a root: parents and visibility."""
    import heapq

    heap: list[tuple[float, tuple[int, ...], int]] = [(-log_probs[0][0], (0,), 0)]
    parents = [-1]
    while heap and len(parents) <= budget:
        cost, ranks, parent = heapq.heappop(heap)
        parents.append(parent)
        depth, rank = len(ranks), ranks[-1]
        row = log_probs[depth - 1]
        if rank + 1 < len(row):
            aside = cost + row[rank] - row[rank + 1]
            heapq.heappush(heap, (aside, (*ranks[:-1], rank + 1), parent))
        if depth < len(log_probs):
            below = cost - log_probs[depth][0]
            heapq.heappush(heap, (below, (*ranks, 0), len(parents) - 1))
    visible = np.zeros((len(parents), len(parents)), bool)
    visible[0, 0] = True
    for node in range(1, len(parents)):
        visible[node] = visible[parents[node]]
        visible[node, node] = True
    return parents, visible


PEERS: dict[str, dict[str, Callable[[Mapping[str, Any]], Timer]]] = {
    "moe_w4a16": {"humming, 2 GEMMs": _moe_humming},
    "w4a16_gemm": {
        "cuBLAS bf16": _w4a16_cublas, "torch int4pack": _w4a16_int4pack, "humming": _w4a16_humming,
    },
    "gemm_bf16": {"cuBLAS bf16": _gemm_cublas},
    "gemm_bf16_f32": {"cuBLAS bf16": _gemm_cublas},
    "gemm_bf16_parts": {"cuBLAS bf16": _gemm_cublas},
    "gemm_bf16_heads": {"cuBLAS bf16": _heads_cublas},
    "tree_verify_mla": {"torch, masked": _tree_torch},
    "draft_top_k": {"top-k, host heap, copies": _host_heap},
    "draft_top_k_bf16": {"top-k, host heap, copies": _host_heap},
}  # fmt: skip
