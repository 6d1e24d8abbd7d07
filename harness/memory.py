"""A case's tensors in device memory: poison before a launch, guard bands around it.

Works on whatever `numba.cuda` stands for: a GPU, or Numba's simulator (NUMBA_ENABLE_CUDASIM=1).
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness import golden as goldens
from harness.spec import DTYPES

GUARD = 1 << 16  # bytes before and after every tensor
_BAND = ((np.arange(GUARD) * 167 + 13) & 0xFF).astype(np.uint8)  # no kernel writes that by chance

# Bit patterns an element size: what outputs and scratch hold before the first run, and before the
# second in the first half of a tensor and in the second. First NaNs that no arithmetic makes, which
# sums and products keep, then huge numbers of both signs, because max, min and a test for NaN drop
# those; or senseless integers. An element was never written if both runs left what was there.
_POISON_FLOAT = {
    "bfloat16": (0x7FE5, 0x7E5A, 0xFE5A),
    "float16": (0x7EE5, 0x7A5A, 0xFA5A),
    "float32": (0x7FE5A5E5, 0x7E5A5ADA, 0xFE5A5ADA),
    "float64": (0x7FFCA5A5A5A5A5A5, 0x7FAC5A5A5A5A5A5A, 0xFFAC5A5A5A5A5A5A),
}
_POISON_INTEGER = {
    1: (0xA5, 0x5A, 0x03),
    2: (0xA5A5, 0x5A5A, 0x0003),
    4: (0xA5A5A5A5, 0x5A5A5A5A, 0x00000003),
    8: (0xA5A5A5A5A5A5A5A5, 0x5A5A5A5A5A5A5A5A, 0x0000000000000003),
}


def simulated() -> bool:
    from numba.cuda.core import config

    return bool(config.ENABLE_CUDASIM)


class Buffer:
    """One tensor in device memory, between two guard bands in one allocation."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, guard: int):
        from numba import cuda

        self.name, self.shape, self.dtype, self.guard = name, shape, dtype, guard
        self.size = math.prod(shape) * dtype.itemsize
        self.pool: _Pool | None = None
        self.bytes = cuda.device_array(guard + self.size + guard, np.uint8)
        if self.size:
            self.inner = self.bytes[guard : guard + self.size]
            self.array = self.inner.view(dtype).reshape(shape)
        else:
            self.array = cuda.device_array(shape, dtype)

    def fill(self, content: np.ndarray) -> None:
        """Set the guard bands and, from a host array of the tensor's dtype and shape, the rest."""
        self.fill_guards()
        if not self.size:
            return
        if isinstance(content, goldens.numerics().Gathered) and not simulated():
            self.pool = _Pool(content)
            self.pool.gather(self.inner)
        else:
            self.inner.copy_to_device(np.ascontiguousarray(content).reshape(-1).view(np.uint8))

    def fill_with_poison(self, dtype: str, second: bool) -> None:
        """Set the guard bands, and every element to poison; scratch can be gigabytes."""
        item = self.dtype.itemsize
        count = self.size // item
        if simulated() or item == 8 or not count:
            self.fill(poison(dtype, count, second))
            return
        from cuda.bindings import driver

        self.fill_guards()
        fill = {1: driver.cuMemsetD8, 2: driver.cuMemsetD16, 4: driver.cuMemsetD32}[item]
        start, half = self.inner.device_ctypes_pointer.value, count // 2
        for bits, first, end in zip(_halves(dtype, second), (0, half), (half, count), strict=True):
            (status,) = fill(start + first * item, bits, end - first) if end > first else (0,)
            if int(status):
                raise RuntimeError(f"{self.name} cannot be filled: {status}")

    def fill_guards(self) -> None:
        if self.guard:
            self.bytes[: self.guard].copy_to_device(_BAND)
            self.bytes[self.guard + self.size :].copy_to_device(_BAND)

    def host(self) -> np.ndarray:
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return self.inner.copy_to_host().view(self.dtype).reshape(self.shape)

    def differs(self, content: np.ndarray) -> bool:
        """Whether it no longer holds `content`, with which it was filled."""
        if self.pool is not None:
            return self.pool.differs(self.inner)
        return not np.array_equal(flat_bits(self.host()), flat_bits(content))

    def trespass(self) -> str | None:
        """Where a guard band was written to, in words."""
        if not self.guard:
            return None
        item = self.dtype.itemsize
        after = np.flatnonzero(self.bytes[GUARD + self.size :].copy_to_host() != _BAND) // item
        if after.size:
            n = len(set(after))
            return f"behind the end of {self.name}: {n} elements, first at end + {after[0]}"
        before = (GUARD - 1 - np.flatnonzero(self.bytes[:GUARD].copy_to_host() != _BAND)) // item
        if before.size:
            n = len(set(before))
            return (
                f"before the start of {self.name}: {n} elements, last at start - {1 + before[-1]}"
            )
        return None


class _Pool:
    """The rows of a gathered array on the device, where all of it is made of them and compared."""

    def __init__(self, content: Any):
        from numba import cuda

        rows = content.pool.reshape(len(content.pool), -1)
        words = rows.view(np.uint32 if rows.strides[0] % 4 == 0 else np.uint8)
        self.unit = words.dtype
        self.rows, self.index = cuda.to_device(words), cuda.to_device(content.index)

    def gather(self, inner: Any) -> None:
        """Fill `inner`, the bytes of the whole array."""
        _gathering().gather[self._grid()](self.rows, self.index, self._whole(inner))

    def differs(self, inner: Any) -> bool:
        from numba import cuda

        found = cuda.to_device(np.zeros(1, np.int32))
        _gathering().compare[self._grid()](self.rows, self.index, self._whole(inner), found)
        return bool(found.copy_to_host()[0])

    def _whole(self, inner: Any) -> Any:
        return inner.view(self.unit).reshape(len(self.index), self.rows.shape[1])

    def _grid(self) -> tuple[tuple[int, int], int]:
        """Rows in x; several blocks in y share a long row."""
        return (len(self.index), min(64, 1 + self.rows.shape[1] // 65536)), 256


@functools.cache
def _gathering() -> SimpleNamespace:
    """The judge's own two kernels, compiled when the first gathered array comes."""
    from numba import cuda

    @cuda.jit
    def gather(rows: Any, index: Any, whole: Any) -> None:
        row = cuda.blockIdx.x
        source = index[row]
        i = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        while i < rows.shape[1]:
            whole[row, i] = rows[source, i]
            i += cuda.blockDim.x * cuda.gridDim.y

    @cuda.jit
    def compare(rows: Any, index: Any, whole: Any, found: Any) -> None:
        row = cuda.blockIdx.x
        source = index[row]
        i = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        while i < rows.shape[1]:
            if whole[row, i] != rows[source, i]:
                found[0] = 1
            i += cuda.blockDim.x * cuda.gridDim.y

    return SimpleNamespace(gather=gather, compare=compare)


def poison(dtype: str, size: int, second: bool) -> np.ndarray:
    """The bits, as unsigned integers, that `size` elements of `dtype` hold before a run."""
    first, last = _halves(dtype, second)
    bits = np.full(size, last, f"u{DTYPES[dtype].itemsize}")
    bits[: size // 2] = first
    return bits


def _halves(dtype: str, second: bool) -> tuple[int, int]:
    """The bit patterns of the two halves of a poisoned tensor."""
    if dtype == "bool":
        return int(not second), int(not second)
    patterns = _POISON_FLOAT.get(dtype) or _POISON_INTEGER[DTYPES[dtype].itemsize]
    return patterns[1:] if second else (patterns[0], patterns[0])


def flat_bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
