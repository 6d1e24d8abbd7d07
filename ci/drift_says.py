"""Prints what is in use here: "numpy 2.4.6 with AVX-512, OpenBLAS SkylakeX, 1 thread"."""

import ctypes
from pathlib import Path

import numpy as np


def openblas() -> str:
    """The CPU whose kernels OpenBLAS has chosen, and its threads, as the library itself says."""
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    for path in folder.glob("*openblas*"):
        library = ctypes.CDLL(str(path))
        name = library.scipy_openblas_get_corename64_
        name.restype = ctypes.c_char_p
        threads = library.scipy_openblas_get_num_threads64_()
        return f"{name().decode()}, {threads} thread{'' if threads == 1 else 's'}"
    return "no OpenBLAS"


def avx512() -> str:
    """Whether numpy uses loops with AVX-512, as the library itself says."""
    from numpy._core._multiarray_umath import __cpu_features__ as features

    return "with AVX-512" if features["AVX512_SKX"] else "without AVX-512"


if __name__ == "__main__":
    print(f"numpy {np.__version__} {avx512()}, OpenBLAS {openblas()}")
