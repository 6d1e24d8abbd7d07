"""Launcher of specs/gemm_bf16_heads_rows.toml: one GEMM a head in many companies."""

import numpy as np

from engine.device import copy_to_device, empty, to_host
from engine.kernels.gemm_bf16 import gemm_bf16

EDGES = (1, 32, 33, 64, 65, 255)  # of tiles, and of what each kernel takes


def gemm_heads_rows(x, w, twin_x, twin_of, *, y, differs, stream=None) -> None:
    """x, twin_x [.., batch, x_width], w [batch, n, k], y [m, batch, n] bf16; differs [m] int32:
    elements of a token whose bits another company changes."""
    m, batch, n = y.shape

    def bits(rows) -> np.ndarray:
        out = empty((rows.shape[0], batch, n), "bfloat16")
        gemm_bf16(rows, w, y=out, stream=stream)
        return to_host(out).view(np.uint16)

    gemm_bf16(x, w, y=y, stream=stream)
    whole = to_host(y).view(np.uint16)
    unlike = whole != bits(twin_x)[to_host(twin_of)]
    for count in (c for c in EDGES if c < m):
        unlike[:count] |= whole[:count] != bits(x[:count])
        unlike[m - count :] |= whole[m - count :] != bits(x[m - count :])
    copy_to_device(unlike.sum(axis=(1, 2)).astype(np.int32), differs)
