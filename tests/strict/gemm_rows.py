"""Launcher of specs/gemm_bf16_rows.toml and gemm_f32_rows.toml: one GEMM in many companies."""

import numpy as np

from engine.device import copy_to_device, empty, to_host
from engine.kernels.gemm_bf16 import gemm_bf16_parts
from engine.kernels.gemm_f32 import gemm_f32_parts

EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255)


def gemm_rows(x, w, twin_x, twin_of, *, parts: int, y, differs, stream=None) -> None:
    """x, twin_x [.., k], w [n, k] both bf16 or both fp32; y [parts, m, n] fp32; differs [m] int32:
    elements of a row whose bits another company changes."""
    gemm = gemm_f32_parts if x.dtype == "float32" else gemm_bf16_parts
    m, n = y.shape[1:]

    def bits(rows) -> np.ndarray:
        out = empty((parts, rows.shape[0], n), "float32")
        gemm(rows, w, parts=parts, y=out, stream=stream)
        return to_host(out).view(np.uint32)  # [parts, rows, n]

    gemm(x, w, parts=parts, y=y, stream=stream)
    whole = to_host(y).view(np.uint32)
    unlike = whole != bits(twin_x)[:, to_host(twin_of)]
    for count in (c for c in EDGES if c < m):
        unlike[:, :count] |= whole[:, :count] != bits(x[:count])
        last = m - count
        unlike[:, last:] |= whole[:, last:] != bits(x[last:])
    copy_to_device(unlike.sum(axis=(0, 2)).astype(np.int32), differs)
