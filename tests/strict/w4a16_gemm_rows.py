"""Launcher of specs/w4a16_gemm_rows.toml: one INT4 GEMM in many companies, by both launchers."""

import numpy as np

from engine.device import copy_to_device, empty, to_host
from engine.kernels.w4a16_gemm import scratch_shapes, w4a16_gemm, w4a16_gemm_many
from tests.strict.gemm_rows import EDGES


def w4a16_gemm_rows(x, qw, sc, twin_x, twin_of, *, y, differs, stream=None) -> None:
    """x, twin_x [.., k] bf16, qw [n, k/8], sc [n, k/32]; y [m, n] fp32; differs [m] int32: elements
    of a row whose bits another company or the other launcher changes."""
    m, n = y.shape

    def bits(rows, many: bool = True) -> np.ndarray:
        out = empty((rows.shape[0], n), "float32")
        if many:
            shapes = scratch_shapes(m=rows.shape[0], n=n, k=rows.shape[1])
            scratch = {name: empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
            w4a16_gemm_many(rows, qw, sc, **scratch, y=out, stream=stream)
        else:
            w4a16_gemm(rows, qw, sc, y=out, stream=stream)
        return to_host(out).view(np.uint32)

    whole = bits(x)
    unlike = whole != bits(x, many=False)
    unlike |= whole != bits(twin_x)[to_host(twin_of)]
    for count in (c for c in EDGES if c < m):
        unlike[:count] |= whole[:count] != bits(x[:count])
        unlike[m - count :] |= whole[m - count :] != bits(x[m - count :])
    copy_to_device(whole.view(np.float32), y)
    copy_to_device(unlike.sum(axis=1).astype(np.int32), differs)
