"""Attention of tree nodes over a prefix and their ancestors: right, and with a sibling leak.

A window of T nodes follows `prefix` keys. Bit j of node i's row says that i sees node j.
"""

import math

import numpy as np

from engine.device import check, cuda, f32, kernel, ptr, u32
from goldens.numerics import softmax

FAULTS = ("sibling_leak",)


def inputs(rng, *, nodes, keys, width):
    parents = np.array([-1, *(int(rng.integers(0, i)) for i in range(1, nodes))], np.int32)
    ancestors = np.zeros((nodes, 1), np.uint32)
    for i, parent in enumerate(parents):
        ancestors[i] = np.uint32(1 << i) | (ancestors[parent] if i else np.uint32(0))
    return {
        "q": rng.uniform((nodes, width)).astype(np.float32),
        "k": rng.uniform((keys, width)).astype(np.float32),
        "v": rng.uniform((keys, width)).astype(np.float32),
        "ancestors": ancestors,
    }


def reference(*, q, k, v, ancestors):
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    nodes, keys = len(q), len(k)
    visible = np.ones((nodes, keys), bool)  # [nodes, keys]
    visible[:, keys - nodes :] = ancestors >> np.arange(nodes, dtype=np.uint32) & 1
    p = softmax(q @ k.T / math.sqrt(q.shape[1]), visible)  # [nodes, keys]
    return {"y": p @ v, "y.magnitude": p @ np.abs(v)}


def launcher(fault=None):
    """A launcher whose kernel has this fault; None: it is right."""

    @kernel(threads=1)
    def attention(
        q: ptr[f32],  # [nodes, width]
        k: ptr[f32],  # [keys, width]
        v: ptr[f32],  # [keys, width]
        ancestors: ptr[u32],  # [nodes, 1]
        nodes: u32,
        keys: u32,
        width: u32,
        y: ptr[f32],  # [nodes, width]
    ):
        node = u32(cuda.blockIdx.x)
        seen = u32(ancestors[node])
        if fault == "sibling_leak":  # the nearest earlier node is seen, whoever its parent is
            if node > u32(0):
                seen = u32(seen | u32(u32(1) << u32(node - u32(1))))
        prefix = u32(keys - nodes)
        scale = f32(f32(1) / f32(math.sqrt(f32(width))))
        total = f32(0)
        for i in range(width):
            y[u32(node * width + u32(i))] = f32(0)
        for j in range(keys):
            sees = u32(j) < prefix
            if not sees:
                sees = (seen >> u32(u32(j) - prefix)) & u32(1) != u32(0)
            if sees:
                score = f32(0)
                for i in range(width):
                    a, b = q[u32(node * width + u32(i))], k[u32(u32(j) * width + u32(i))]
                    score = f32(score + a * b)
                weight = f32(math.exp(f32(score * scale)))
                total = f32(total + weight)
                for i in range(width):
                    at = u32(node * width + u32(i))
                    y[at] = f32(y[at] + weight * v[u32(u32(j) * width + u32(i))])
        for i in range(width):
            at = u32(node * width + u32(i))
            y[at] = f32(y[at] / total)

    def attention_launcher(q, k, v, ancestors, *, y, stream=None):
        dims = check(
            "attention",
            q=(q, "nodes width", "float32"),
            k=(k, "keys width", "float32"),
            v=(v, "keys width", "float32"),
            ancestors=(ancestors, "nodes 1", "uint32"),
            y=(y, "nodes width", "float32"),
        )
        sizes = dims["nodes"], dims["keys"], dims["width"]
        attention.launch(dims["nodes"], q, k, v, ancestors, *sizes, y, stream=stream)

    return attention_launcher


attention = launcher()
