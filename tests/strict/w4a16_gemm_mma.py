"""Launcher of specs/w4a16_gemm_mma.toml: `w4a16_gemm_many` as on a GPU without wgmma."""

from unittest.mock import patch

from engine.kernels import w4a16_gemm


def w4a16_gemm_mma(x, qw, sc, *, x_permuted, parts, y, stream=None) -> None:
    with patch.object(w4a16_gemm, "has_wgmma", lambda: False):
        w4a16_gemm.w4a16_gemm_many(
            x, qw, sc, x_permuted=x_permuted, parts=parts, y=y, stream=stream
        )
