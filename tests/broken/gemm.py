"""INT4 GEMM with one thread an output: right, and broken in three ways. Oracle: y = x W^T."""

import numpy as np

from engine.device import check, cuda, f32, kernel, ptr, u16, u32
from engine.ptx import bf16_to_f32, f32_to_bf16
from goldens.numerics import dequantise, pack_int4, round_to

FAULTS = ("nibble_order", "neighbour_group", "dropped_last_tile")
GROUP = 32


def inputs(rng, *, tokens, out, k, exact=False):
    x = rng.integers(-4, 5, (tokens, k)) if exact else rng.uniform((tokens, k))
    scale = rng.choice([0.5, 1.0, 2.0], (out, k // GROUP))
    if not exact:
        scale = scale * (1.5 + rng.uniform((out, k // GROUP)))
    return {
        "x": round_to(x.astype(np.float64), "bfloat16"),
        "qw": pack_int4(rng.integers(-8, 8, (out, k))),
        "sc": round_to(scale, "bfloat16"),
    }


def reference(*, x, qw, sc):
    x, w = x.astype(np.float64), dequantise(qw, sc).astype(np.float64)
    return {"y": x @ w.T, "y.magnitude": np.abs(x) @ np.abs(w).T}


def launcher(fault=None):
    """A launcher whose kernel has this fault; None: it is right."""

    @kernel(threads=32)
    def gemm(
        x: ptr[u16],  # [tokens, k]
        qw: ptr[u32],  # [out, k/8]
        sc: ptr[u16],  # [out, k/32]
        k: u32,
        out: u32,
        y: ptr[f32],  # [tokens, out]
    ):
        token = u32(cuda.blockIdx.y)
        n = u32(u32(cuda.blockIdx.x) * u32(32) + u32(cuda.threadIdx.x))
        if n < out:
            groups = u32(k // u32(GROUP))
            total = f32(0)
            tiles = groups
            if fault == "dropped_last_tile":
                tiles = u32(groups - u32(1))
            for g in range(tiles):
                of = u32(g)
                if fault == "neighbour_group":
                    of = u32((u32(g) + u32(1)) % groups)
                scale = bf16_to_f32(u32(sc[u32(n * groups + of)]))
                for i in range(GROUP):
                    at = u32(u32(g) * u32(GROUP) + u32(i))
                    word = u32(qw[u32(n * (k // u32(8)) + at // u32(8))])
                    place = u32(at % u32(8))
                    if fault == "nibble_order":
                        place = u32(u32(7) - place)
                    q = u32((word >> u32(u32(4) * place)) & u32(15))
                    w = bf16_to_f32(u32(f32_to_bf16(f32(f32(f32(q) - f32(8)) * scale))))
                    total = f32(total + bf16_to_f32(u32(x[u32(token * k + at)])) * w)
            y[u32(token * out + n)] = total

    def gemm_launcher(x, qw, sc, *, y, stream=None):
        dims = check(
            "gemm",
            x=(x, "tokens k", "bfloat16"),
            qw=(qw, "out words", "int32"),
            sc=(sc, "out groups", "bfloat16"),
            y=(y, "tokens out", "float32"),
        )
        grid = (-(-dims["out"] // 32), dims["tokens"])
        gemm.launch(grid, x, qw, sc, dims["k"], dims["out"], y, stream=stream)

    return gemm_launcher


gemm = launcher()
