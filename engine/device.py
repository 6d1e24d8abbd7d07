"""What a kernel file needs from the device: types, kernels, launches and argument checks.

The same kernel source runs on a GPU and in the simulator. On a GPU a pointer parameter is a raw
pointer (`CPointer`) and a launch goes through `cuda.core.launch`, which costs a few microseconds
where array arguments through Numba's dispatcher cost tens. In the simulator a pointer is a flat
numpy array. Kernels are compiled by the code path that the offline compile gate uses, and their
cubins are cached on disk by content.
"""

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from filelock import FileLock
from numba import cuda as cuda_api
from numba.cuda import types
from numba.cuda.core import config

from engine.files import replacing
from engine.unroll import static_range, unroll

__all__ = [
    "SIMULATED",
    "Family",
    "Kernel",
    "cdiv",
    "check",
    "copy_to_device",
    "cuda",
    "device_pointer",
    "empty",
    "f32",
    "family",
    "fill_nan",
    "function",
    "i32",
    "i64",
    "kernel",
    "ptr",
    "shared_limit",
    "static_range",
    "stream_handle",
    "to_device",
    "to_host",
    "u8",
    "u16",
    "u32",
    "u64",
]  # fmt: skip

SIMULATED = bool(config.ENABLE_CUDASIM)

if SIMULATED:
    from engine import simulator
    from engine.simulator import cuda

    def _integer(bits: int, signed: bool) -> Any:
        """A cast that wraps as the device does; simulated kernels compute in Python integers."""
        mask, half = (1 << bits) - 1, 1 << bits - 1

        def unsigned(value: Any) -> Any:
            if value.__class__ is int:  # nearly always, and half of what the simulator does
                return value & mask
            return value if isinstance(value, simulator.Address) else int(value) & mask

        def wrapped(value: Any) -> Any:
            return (int(value) + half & mask) - half

        cast: Any = wrapped if signed else unsigned
        cast.dtype = np.dtype(f"{'' if signed else 'u'}int{bits}")  # what numpy takes it for
        return cast

    u8, u16, u32, u64 = (_integer(bits, False) for bits in (8, 16, 32, 64))
    i32, i64 = _integer(32, True), _integer(64, True)
    f32 = np.float32
else:
    from numba import cuda  # type: ignore[no-redef]

    u8, u16, u32, u64 = types.uint8, types.uint16, types.uint32, types.uint64
    i32, i64, f32 = types.int32, types.int64, types.float32

_NUMPY = {
    id(t): np.dtype(name)
    for t, name in (
        (u8, "uint8"), (u16, "uint16"), (u32, "uint32"), (u64, "uint64"),
        (i32, "int32"), (i64, "int64"), (f32, "float32"),
    )
}  # fmt: skip
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class _Pointer:
    element: Any


class ptr:
    """`ptr[u16]`: a kernel parameter that points to 16-bit elements (bfloat16 travels as u16)."""

    def __class_getitem__(cls, element: Any) -> _Pointer:
        return _Pointer(element)


@cache
def shared_limit() -> int:
    """Bytes of shared memory that a block may have: 227 KB on sm_90 and sm_100, 99 KB on sm_120."""
    if SIMULATED:
        return 227 * 1024
    from cuda.core import Device

    return Device().properties.max_shared_memory_per_block_optin


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for host arithmetic."""
    return -(-a // b)


def function(fn: Callable) -> Callable:
    """A device function: unrolled, inlined on the GPU, plain Python in the simulator."""
    unrolled, _ = unroll(fn)
    if SIMULATED:
        unrolled.__globals__["cuda"] = cuda
        return unrolled
    return cuda.jit(device=True, forceinline=True)(unrolled)


class Kernel:
    """One compiled specialisation: launches on the GPU or in the simulator, compiles offline."""

    def __init__(
        self,
        fn: Callable,
        *,
        threads: int,
        blocks_per_sm: int | None = None,
        registers: int = 255,
        dynamic_shared: int = 0,
        dependent_launch: bool = False,
        sass: Sequence[str] = (),
        archs: Sequence[str] | None = None,
    ):
        self.module, self.name = fn.__module__, fn.__name__.strip("_")
        self.file = Path(inspect.getfile(fn))
        self.threads, self.blocks_per_sm = threads, blocks_per_sm
        self.registers, self.dynamic_shared = registers, dynamic_shared
        self.dependent_launch = dependent_launch
        self.sass, self.archs = tuple(sass), archs
        self.parameters = [
            (p.name, p.annotation) for p in inspect.signature(fn).parameters.values()
        ]
        untyped = [n for n, t in self.parameters if t is inspect.Parameter.empty]
        if untyped:
            raise TypeError(f"kernel {self.name}: parameters {untyped} have no type")
        self._constants = {
            k: v
            for k, v in inspect.getclosurevars(fn).nonlocals.items()
            if isinstance(v, (int, float, str, bool, tuple, type(None)))
        }
        self.python, self.source = unroll(fn)
        if SIMULATED:
            self.python.__globals__["cuda"] = cuda
        self._launch_configs: dict[tuple[int, ...], Any] = {}  # by grid

    def __repr__(self) -> str:
        return f"<Kernel {self.module}:{self.name}>"

    def launch(self, grid: int | tuple[int, ...], *args: Any, stream: Any = None) -> None:
        """Queue the kernel on `stream` (None: the default one). Arrays fill pointer parameters."""
        if len(args) != len(self.parameters):
            raise TypeError(f"{self}: {len(args)} arguments for {len(self.parameters)} parameters")
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        if 0 in grid:
            return
        if SIMULATED:
            values = [
                _flat(a, t.element) if isinstance(t, _Pointer) else t(a)
                for a, (_, t) in zip(args, self.parameters, strict=True)
            ]
            simulator.launch(self.python, grid, (self.threads,), tuple(values), self.dynamic_shared)
            return
        core = _cuda_core()
        values = [
            device_pointer(a) if isinstance(t, _Pointer) else _NUMPY[id(t)].type(a)
            for a, (_, t) in zip(args, self.parameters, strict=True)
        ]
        launch_config = self._launch_configs.get(grid)
        if launch_config is None:
            launch_config = self._launch_configs[grid] = core.LaunchConfig(
                grid=grid,
                block=self.threads,
                shmem_size=self.dynamic_shared,
                programmatic_stream_serialization=self.dependent_launch,
            )
        core.launch(_stream(stream), launch_config, self._loaded, *values)

    @cached_property
    def _loaded(self) -> Any:
        """The kernel in the current device's context, compiled or taken from the cubin cache."""
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        device = Device()
        device.set_current()
        major, minor = device.compute_capability
        arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")  # as the compile gate names it
        cubin, entry = self.cubin(arch)
        loaded = ObjectCode.from_cubin(cubin).get_kernel(entry)
        if self.dynamic_shared > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(
                attribute, self.dynamic_shared, loaded.handle, device.device_id
            )
            if int(status):
                raise RuntimeError(f"{self}: {self.dynamic_shared} B of shared memory: {status}")
        return loaded

    def cubin(self, arch: str) -> tuple[bytes, str]:
        """Machine code for `arch` ("sm_90a") and its entry name; needs no GPU and no driver."""
        path = _cache_dir() / f"{self.digest(arch)}.cubin"
        if found := _read_cubin(path):
            return found
        made = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(
                path.with_suffix(".lock")
            ):  # parallel workers want the same kernels first
                if found := _read_cubin(path):
                    return found
                if path.exists():
                    print(
                        f"{path.name} in the cache was damaged, and is made again", file=sys.stderr
                    )
                made = code, name = self._compile(arch)
                with replacing(path) as file:
                    file.write(name.encode() + b"\0" + hashlib.sha256(code).digest() + code)
        except OSError:  # a full or read-only disk costs time, not the launch
            made = made or self._compile(arch)
        return made

    def digest(self, arch: str) -> str:
        """Content hash of everything that decides the machine code."""
        from importlib.metadata import version

        engine = Path(__file__).parent
        parts = [arch, self.source, repr(sorted(self._constants.items())), repr(self._options())]
        parts += [f"numba-cuda={version('numba-cuda')}"]
        # Compiler and linker are the toolkit's, and come and go without numba-cuda.
        parts += [_tool("nvidia-nvvm", "nvvm"), _tool("nvidia-nvjitlink", "nvJitLink")]
        parts += [f"{p}={version(p).rpartition('.')[0]}" for p in ("numba", "numpy")]
        parts += [self._signature_text(), *_with_imports(self.file)]
        parts += [p.read_text() for p in sorted(engine.glob("*.py")) if p.name in _CODE_FILES]
        parts += [p.read_text() for p in sorted((engine / "ptx").glob("*.py"))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _signature_text(self) -> str:
        return ", ".join(f"{n}: {t}" for n, t in self.parameters)

    def _options(self) -> dict[str, Any]:
        bounds = (self.threads, self.blocks_per_sm) if self.blocks_per_sm else self.threads
        return {"launch_bounds": bounds, "lto": True}

    def _compile(self, arch: str) -> tuple[bytes, str]:
        from numba.cuda.dispatcher import _Kernel

        cc = _compute_capability(arch)
        signature = tuple(
            types.CPointer(t.element) if isinstance(t, _Pointer) else t for _, t in self.parameters
        )
        with _offline(cc):
            dispatcher = cuda.jit(self.python, **self._options())
            library = _Kernel(
                dispatcher.py_func, signature, **dispatcher.targetoptions
            )._codelibrary
            return bytes(library.get_cubin(cc=cc).code), library._entry_name


# The files besides a kernel's own and engine/ptx that end up in machine code.
_CODE_FILES = {"activation.py", "device.py", "int4.py", "splits.py", "unroll.py", "warp.py"}


def kernel(**options: Any) -> Callable[[Callable], Kernel]:
    """Make a `Kernel` of a function whose parameters are annotated with `ptr[u16]`, `u32`, `f32`...

    threads: block size. blocks_per_sm: occupancy that ptxas must allow. registers: ceiling that the
    compile gate enforces. dynamic_shared: bytes, raised above 48 KB where needed. dependent_launch:
    programmatic dependent launch. sass: instructions that the machine code must contain.
    archs: targets that it exists for (None: all).
    """
    return lambda fn: Kernel(fn, **options)


class Family:
    """Specialisations of one kernel by compile-time constants, made on first use."""

    def __init__(self, make: Callable[..., Kernel], listed: Sequence[dict[str, Any]]):
        self.make, self.listed = make, list(listed)
        self._made: dict[tuple, Kernel] = {}

    def __call__(self, **constants: Any) -> Kernel:
        key = tuple(sorted(constants.items()))
        if key not in self._made:
            made = self.make(**constants)
            made.name += "".join(f"_{k}{v}" for k, v in constants.items())
            self._made[key] = made
        return self._made[key]


def family(*listed: dict[str, Any]) -> Callable[[Callable[..., Kernel]], Family]:
    """Decorate a function of keyword constants that returns a kernel.

    `listed` are the specialisations that the compile gate builds; they should be all that a
    launcher can choose at the shapes its spec names.
    """
    return lambda make: Family(make, listed)


def check(op: str, **arrays: tuple[Any, str, str | tuple[str, ...]]) -> dict[str, int]:
    """Check arrays against named dimensions before anything is launched.

    `check("rms_norm", x=(x, "tokens hidden", "bfloat16"))` returns {"tokens": .., "hidden": ..}.
    A dimension name means the same size wherever it appears; a number stands for itself.
    Raises ValueError naming the argument, what it should be and what it is. Dtypes are numpy's, as
    launchers compare them: a torch tensor is refused.
    """
    dims: dict[str, int] = {}
    here = None if SIMULATED else _cuda_core().Device().device_id
    for name, (array, shape, dtype) in arrays.items():
        where = f"{op}: {name}"
        allowed = (dtype,) if isinstance(dtype, str) else dtype
        found = getattr(array, "dtype", None)  # comes first: torch has no address of a bfloat16
        if found is not None and _dtype_name(found) not in allowed:
            raise ValueError(f"{where} has dtype {found}, expected {' or '.join(allowed)}")
        known = here is not None and getattr(array, "_known_on", None) == here
        if not known:
            _require_device_array(where, array, here)
        names = _labels(shape)
        if len(array.shape) != len(names):
            raise ValueError(
                f"{where} has shape {tuple(array.shape)}, expected [{', '.join(names)}]"
            )
        for axis, (size, label) in enumerate(zip(array.shape, names, strict=True)):
            number = label.lstrip("-").isdigit()  # a negative one fits nothing
            want = int(label) if number else dims.setdefault(label, size)
            if size != want:
                known = "" if number else f" ({label} = {want})"
                raise ValueError(
                    f"{where} has shape {tuple(array.shape)}: "
                    f"axis {axis} is {size}, expected {want}{known}"
                )
        if known:
            continue
        if not _is_contiguous(array):
            raise ValueError(
                f"{where} is not C-contiguous: "
                f"shape {tuple(array.shape)}, strides {tuple(array.strides)}"
            )
        if here is not None and hasattr(array, "device_ctypes_pointer"):
            array._known_on = here  # Numba's arrays do not change: once is enough
    return dims


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised device array; bfloat16 too, which Numba's own constructors refuse."""
    dtype = _DTYPES.get(dtype) or np.dtype(dtype)
    flat = cuda_api.device_array(max(int(np.prod(shape)) * dtype.itemsize, 1), np.uint8)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return flat[:nbytes].view(dtype).reshape(shape)


def to_device(array: np.ndarray) -> Any:
    """A device copy of a host array of any dtype, bfloat16 included."""
    array = np.asarray(array, order="C")
    out = empty(array.shape, array.dtype)
    copy_to_device(array, out)
    return out


def copy_to_device(array: np.ndarray, out: Any) -> None:
    """Overwrite a device array with a host array of the same shape and dtype."""
    if tuple(out.shape) != array.shape or out.dtype != array.dtype:
        raise ValueError(
            f"copy_to_device: {array.dtype}{list(array.shape)} into {out.dtype}{list(out.shape)}"
        )
    if array.size:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out.reshape(array.size).view(np.uint8).copy_to_device(raw)


def fill_nan(array: Any) -> None:
    """Overwrite a device array of bfloat16 or float32 with NaN, without a host array of its size.
    RuntimeError if the driver cannot."""
    if SIMULATED:
        array._ary[...] = np.nan
        return
    from cuda.bindings import driver

    halves = array.size * array.dtype.itemsize // 2
    if halves:  # 0x7fff is a NaN, and so are two of them
        (status,) = driver.cuMemsetD16(device_pointer(array), 0x7FFF, halves)
        if int(status):
            raise RuntimeError(f"{array.dtype}{list(array.shape)} cannot be filled: {status}")


def to_host(array: Any) -> np.ndarray:
    """A host copy of a device array, of the same shape and dtype."""
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    if not int(np.prod(shape)):
        return np.empty(shape, dtype)
    flat = array.reshape(int(np.prod(shape))).view(np.uint8)
    return flat.copy_to_host().view(dtype).reshape(shape)


def device_pointer(array: Any) -> int:
    """The address of a device array's first element; 0 for None and for an array without any."""
    if array is None:
        return 0
    pointer = getattr(array, "device_ctypes_pointer", None)  # Numba's arrays: no dict to build
    if pointer is not None:
        return pointer.value or 0
    return array.__cuda_array_interface__["data"][0] or 0


def stream_handle(stream: Any) -> int:
    """The CUstream of a cuda.core stream, of a graph builder that captures, or the default one."""
    return int(_stream(stream).__cuda_stream__()[1])


@cache
def _labels(shape: str) -> tuple[str, ...]:
    return tuple(shape.split())


@cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype)


@cache
def _cuda_core() -> Any:
    """The module: an import statement in a launch costs as much as an array."""
    import cuda.core

    return cuda.core


def _require_device_array(where: str, array: Any, here: int | None) -> None:
    if SIMULATED:
        if not hasattr(array, "_ary"):
            raise ValueError(f"{where} is a {type(array).__name__}, expected a device array")
        return
    if not hasattr(array, "__cuda_array_interface__"):
        raise ValueError(f"{where} is a {type(array).__name__}, expected a device array")
    if 0 in array.shape:
        return
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, ordinal = driver.cuPointerGetAttribute(attribute, device_pointer(array))
    if int(status) or int(ordinal) != here:
        place = f"device {int(ordinal)}" if not int(status) else "no device"
        raise ValueError(f"{where} is on {place}, expected device {here}")


def _is_contiguous(array: Any) -> bool:
    if 0 in array.shape:  # an empty batch, whose strides mean nothing
        return True
    expected = np.dtype(array.dtype).itemsize
    strides = array.strides or ()
    for size, stride in zip(reversed(array.shape), reversed(strides), strict=False):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(array: Any, element: Any) -> np.ndarray:
    """The simulator's pointer: a flat view of the array in the kernel's element type."""
    if array is None:
        return np.empty(0, _NUMPY[id(element)])
    raw = array._ary if hasattr(array, "_ary") else array
    flat = raw.reshape(-1)
    if flat.size and not np.shares_memory(flat, raw):
        raise ValueError("a pointer parameter needs a contiguous array")
    return flat.view(_NUMPY[id(element)])


def _stream(stream: Any) -> Any:
    return _cuda_core().LEGACY_DEFAULT_STREAM if stream is None else stream


def _cache_dir() -> Path:
    return Path(os.environ.get("KDTR_CACHE") or Path.home() / ".cache" / "kdtr") / "cubin"


def _read_cubin(path: Path) -> tuple[bytes, str] | None:
    """Code and entry name of a cache entry; None if it is not there, unreadable or damaged."""
    try:
        entry, _, code = path.read_bytes().partition(b"\0")
    except OSError:
        return None
    if not code or hashlib.sha256(code[32:]).digest() != code[:32]:
        return None
    return code[32:], entry.decode()


def _tool(distribution: str, library: str) -> str:
    """Version of a wheel of the toolkit; without it, which file the library is and of when."""
    from importlib.metadata import PackageNotFoundError, version

    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        return f"{distribution}={version(distribution)}"
    except PackageNotFoundError:
        pass
    try:
        path = Path(load_nvidia_dynamic_lib(library).abs_path).resolve()
    except DynamicLibNotFoundError:
        return f"no {library}"  # nothing can be compiled
    return f"{path} {path.stat().st_mtime_ns}"


def _with_imports(file: Path) -> list[str]:
    """The text of a kernel file and of the kernel files whose functions it may inline."""
    texts: dict[Path, str] = {}
    queue = [file]
    while queue:
        path = queue.pop()
        if path not in texts:
            texts[path] = path.read_text()
            names = re.findall(r"^from engine\.kernels\.(\w+) import", texts[path], re.M)
            queue += [Path(__file__).parent / "kernels" / f"{name}.py" for name in names]
    return [texts[path] for path in sorted(texts)]


def _compute_capability(arch: str) -> tuple:
    digits = arch.removeprefix("sm_")
    suffix = digits[-1] if digits[-1].isalpha() else ""
    number = int(digits.removesuffix(suffix)) if suffix else int(digits)
    return (number // 10, number % 10, suffix)


class _offline:
    """Let Numba compile for a given target where there is no GPU: two places ask for the device."""

    def __init__(self, cc: tuple):
        self.cc = cc

    def __enter__(self) -> None:
        from types import SimpleNamespace

        import numba.cuda.dispatcher as dispatcher
        from numba.cuda.codegen import CUDACodeLibrary

        self._saved = (dispatcher.get_current_device, CUDACodeLibrary._ensure_cc)
        device = SimpleNamespace(compute_capability=self.cc[:2])
        dispatcher.get_current_device = lambda: device
        CUDACodeLibrary._ensure_cc = lambda _, cc: self.cc if cc is None else cc

    def __exit__(self, *_: Any) -> None:
        import numba.cuda.dispatcher as dispatcher
        from numba.cuda.codegen import CUDACodeLibrary

        dispatcher.get_current_device, CUDACodeLibrary._ensure_cc = self._saved
