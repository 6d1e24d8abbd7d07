"""Other people's kernels for the same work, timed in the same run where they can be imported.

Each takes the case's inputs and gives the seconds of one call, in a CUDA graph over rotating
weights as harness/bench.py times ours. Timing needs shapes alone, so weights are random.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import numpy as np

COLD_BYTES = 256 << 20


def times(stem: str, inputs: Mapping[str, np.ndarray]) -> dict[str, float | str]:
    """Microseconds of each peer of a spec, or why it is absent."""
    found: dict[str, float | str] = {}
    for name, peer in PEERS.get(stem, {}).items():
        try:
            found[name] = round(peer(inputs) * 1e6, 3)
        except ImportError as error:
            found[name] = f"absent: {error}"
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            found[name] = f"absent: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return found


def matrix_rate() -> float | None:
    """bf16 operations a second of an 8192 cubed product by cuBLAS on random data; None without."""
    try:
        import torch
    except ImportError:
        return None
    n = 8192
    a, b, c = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return 2 * n**3 / _graph([lambda: torch.mm(a, b, out=c)], 4)


def _graph(calls: list[Callable[[], Any]], at_least: int = 20) -> float:
    """Seconds of one call, median of 9 replays of a graph that walks through `calls`."""
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
    measured = []
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end) * 1e-3 / (repeat * len(calls)))
    return median(measured[2:])


def _cublas(rows: int, n: int, k: int, batch: int = 1) -> float:
    import torch

    copies = max(1, min(32, -(-COLD_BYTES // (batch * n * k * 2))))
    shape = (batch, n, k) if batch > 1 else (n, k)
    weights = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x_shape = (batch, rows, k) if batch > 1 else (rows, k)
    x = torch.randn(*x_shape, device="cuda", dtype=torch.bfloat16)
    y_shape = (batch, rows, n) if batch > 1 else (rows, n)
    y = torch.empty(*y_shape, device="cuda", dtype=torch.bfloat16)
    return _graph([partial(torch.matmul, x, w.mT, out=y) for w in weights])


def _w4a16_cublas(inputs: Mapping[str, np.ndarray]) -> float:
    rows, k = inputs["x"].shape
    return _cublas(rows, inputs["qw"].shape[0], k)


def _w4a16_int4pack(inputs: Mapping[str, np.ndarray]) -> float:
    import torch

    (rows, k), n = inputs["x"].shape, inputs["qw"].shape[0]
    copies = max(1, min(64, -(-COLD_BYTES // (n * k // 2))))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    packed = torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
    scales = torch.ones(k // 32, n, 2, device="cuda", dtype=torch.bfloat16)
    weights = [torch.ops.aten._convert_weight_to_int4pack(packed, 8) for _ in range(copies)]
    mm = torch.ops.aten._weight_int4pack_mm
    return _graph([partial(mm, x, w, 32, scales) for w in weights])


def _gemm_cublas(inputs: Mapping[str, np.ndarray]) -> float:
    (rows, k), n = inputs["x"].shape, inputs["w"].shape[0]
    return _cublas(rows, n, k)


def _heads_cublas(inputs: Mapping[str, np.ndarray]) -> float:
    heads, n, k = inputs["w"].shape
    return _cublas(inputs["x"].shape[0], n, k, batch=heads)


PEERS: dict[str, dict[str, Callable[[Mapping[str, np.ndarray]], float]]] = {
    "w4a16_gemm": {"cuBLAS bf16": _w4a16_cublas, "torch int4pack": _w4a16_int4pack},
    "gemm_bf16": {"cuBLAS bf16": _gemm_cublas},
    "gemm_bf16_f32": {"cuBLAS bf16": _gemm_cublas},
    "gemm_bf16_parts": {"cuBLAS bf16": _gemm_cublas},
    "gemm_bf16_heads": {"cuBLAS bf16": _heads_cublas},
}
