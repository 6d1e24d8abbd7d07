"""Ask the CUDA driver what GPUs there are, and whether one of them works.

Run as a program in a process of its own (`devices.py` does), so that the caller neither loads the
driver nor gets a context, and a driver that hangs or dies takes nothing with it. Standard library
only: it must say what is wrong on a machine where nothing else is installed.

    probe.py list   all GPUs that CUDA_VISIBLE_DEVICES leaves visible, as JSON
    probe.py test   one short kernel on the first of them; exit 0 if its output is right
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
THREADS, BLOCKS = 128, 32

# p[i] = i * i + 7. sm_75 is the oldest target that CUDA 13 knows; the driver compiles it forward.
KERNEL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry square(.param .u64 p)
{
    .reg .u32 %r<6>;
    .reg .u64 %d<3>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    mad.lo.u32 %r5, %r4, %r4, 7;
    ld.param.u64 %d1, [p];
    mad.wide.u32 %d2, %r4, 4, %d1;
    st.global.u32 [%d2], %r5;
    ret;
}
\x00"""


class DriverError(Exception):
    """The driver is missing or answered with an error; the text says which call and code."""


def load() -> ctypes.CDLL:
    """The initialised driver library."""
    for name in LIBRARIES:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        call(driver, "cuInit", 0)
        return driver
    raise DriverError("no NVIDIA driver library (libcuda.so.1) on this machine")


def call(driver: ctypes.CDLL, function: str, *args: object) -> None:
    """Call `function` and turn a code other than 0 into a DriverError with its name."""
    code = getattr(driver, function)(*args)
    if code:
        text = c_char_p()
        driver.cuGetErrorName(code, byref(text))
        raise DriverError(f"{function}: {(text.value or b'unknown error').decode()} ({code})")


def list_gpus() -> dict[str, object]:
    """{"cuda": highest CUDA version of the driver, "gpus": [{uuid, name, compute, bytes}]}."""
    driver = load()
    version, count = c_int(), c_int()
    call(driver, "cuDriverGetVersion", byref(version))
    call(driver, "cuDeviceGetCount", byref(count))
    gpus = []
    for ordinal in range(count.value):
        device, size = c_int(), c_size_t()
        raw, name = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(256)
        major, minor = c_int(), c_int()
        call(driver, "cuDeviceGet", byref(device), ordinal)
        call(driver, "cuDeviceGetName", name, 256, device)
        call(driver, "cuDeviceGetUuid_v2", byref(raw), device)
        call(driver, "cuDeviceTotalMem_v2", byref(size), device)
        call(driver, "cuDeviceGetAttribute", byref(major), CAPABILITY_MAJOR, device)
        call(driver, "cuDeviceGetAttribute", byref(minor), CAPABILITY_MINOR, device)
        gpus.append(
            {
                "uuid": f"GPU-{uuid.UUID(bytes=bytes(raw))}",
                "name": name.value.decode(),
                "compute": f"{major.value}.{minor.value}",
                "bytes": size.value,
            }
        )
    return {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "gpus": gpus}


def test_gpu() -> None:
    """Allocate, launch, copy back and compare on the first visible GPU; DriverError if not."""
    driver = load()
    device, context, module, kernel = c_int(), c_void_p(), c_void_p(), c_void_p()
    memory = c_uint64()
    n = THREADS * BLOCKS
    call(driver, "cuDeviceGet", byref(device), 0)
    call(driver, "cuDevicePrimaryCtxRetain", byref(context), device)
    call(driver, "cuCtxSetCurrent", context)
    call(driver, "cuMemAlloc_v2", byref(memory), c_size_t(4 * n))
    call(driver, "cuMemsetD32_v2", memory, c_uint32(0xFFFFFFFF), c_size_t(n))
    call(driver, "cuModuleLoadData", byref(module), KERNEL)
    call(driver, "cuModuleGetFunction", byref(kernel), module, b"square")
    parameters = (c_void_p * 1)(ctypes.cast(ctypes.pointer(memory), c_void_p))
    call(
        driver, "cuLaunchKernel", kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, parameters, None
    )  # fmt: skip
    call(driver, "cuCtxSynchronize")
    host = (c_uint32 * n)()
    call(driver, "cuMemcpyDtoH_v2", host, memory, c_size_t(4 * n))
    wrong = [i for i in range(n) if host[i] != i * i + 7]
    if wrong:
        raise DriverError(f"a kernel of {n} threads wrote {len(wrong)} wrong values")
    call(driver, "cuMemFree_v2", memory)
    call(driver, "cuDevicePrimaryCtxRelease_v2", device)


def main() -> int:
    """0, or 1 with the reason as the only line on stderr."""
    try:
        if sys.argv[1:] == ["list"]:
            print(json.dumps(list_gpus()))
        elif sys.argv[1:] == ["test"]:
            test_gpu()
        else:
            print("usage: probe.py list|test", file=sys.stderr)
            return 2
    except DriverError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
