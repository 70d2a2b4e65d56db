"""A GPU for stand-ins of trainings and servers, by the plain driver API. It offers memory with contents, and work for a given time."""

import ctypes
import os

cuda = ctypes.CDLL("libcuda.so.1")
PTX = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin_ns(.param .u64 ns) { ret; }
"""
# Work is submitted in kernels of this length, so that a turn can end between two kernels.
KERNEL_MS = 5
PIECE = 32 << 20


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(result, ctypes.byref(text))
        raise SystemExit(f"{name}: {(text.value or b'?').decode()}")


def size(text):
    return int(float(text[:-1]) * (1 << {"M": 20, "G": 30}[text[-1]]))


class Gpu:
    def __init__(self):
        device, self.context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.enter()
        call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.spin = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(self.spin), module, b"spin_ns")

    def enter(self):
        """Makes the GPU's context current in the calling thread."""
        call("cuCtxSetCurrent", self.context)

    def load(self, bytes):
        """Allocates memory and fills it by copies, like a loaded model. Memory that was never written would not have to move."""
        at, piece = ctypes.c_uint64(), os.urandom(min(bytes, PIECE))
        call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(bytes))
        for start in range(0, bytes, PIECE):
            length = min(PIECE, bytes - start)
            call("cuMemcpyHtoD_v2", ctypes.c_uint64(at.value + start), piece, ctypes.c_size_t(length))

    def work(self, milliseconds):
        for _ in range(max(1, milliseconds // KERNEL_MS)):
            time = ctypes.c_uint64(KERNEL_MS * 1_000_000)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(time))
            call("cuLaunchKernel", self.spin, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
            call("cuCtxSynchronize")
