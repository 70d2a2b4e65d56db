#!/usr/bin/env python3
"""Measures the cost of registering host memory. Copies GPU memory to host memory and back, chunk by
chunk, without nvshare.

  registering.py [--gib 16] [--rounds 3]

As in the library, one thread maps chunks of 64 MiB on the GPU, copies them from and to huge pages
of the host, and unmaps chunks that have been copied to the host. Eight copies are in flight.

The script measures:
- registering and unregistering all of the host memory, without copies
- copies while the host memory stays registered
- copies for which each chunk is registered directly before it is copied to the GPU, and
  unregistered after it has been copied to the host
- copies with host memory that is not registered

Prints a line of JSON with the seconds of each measurement in every round.
"""

import argparse
import ctypes
import json
import mmap
import time

CHUNK, IN_FLIGHT, HUGE = 64 << 20, 8, 2 << 20
# CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP, as in the library.
FLAGS = 1 | 2
LIBRARY = ctypes.CDLL("libcuda.so.1")
SIZE = ctypes.c_size_t(CHUNK)


def do(name, *arguments):
    code = getattr(LIBRARY, name)(*arguments)
    if code:
        raise SystemExit(f"{name}: {code}")


def made(kind, name, *arguments):
    value = kind()
    do(name, ctypes.byref(value), *arguments)
    return value


class Properties(ctypes.Structure):
    """`CUmemAllocationProp`: pinned memory of a device."""

    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int * 2), ("rest", ctypes.c_uint64 * 2)]


class Access(ctypes.Structure):
    """`CUmemAccessDesc`"""

    _fields_ = [("location", ctypes.c_int * 2), ("flags", ctypes.c_int)]


class Chunk:
    def __init__(self, address):
        self.address, self.handle = ctypes.c_uint64(address), None
        self.event = made(ctypes.c_void_p, "cuEventCreate", 2)
        self.memory = mmap.mmap(-1, CHUNK + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.host = ctypes.c_void_p((begin + HUGE - 1) // HUGE * HUGE)
        ctypes.memset(self.host, 1, CHUNK)

    def register(self):
        do("cuMemHostRegister_v2", self.host, SIZE, FLAGS)

    def unregister(self):
        do("cuMemHostUnregister", self.host)

    def map(self):
        properties, access = Properties(1, 0, (1, 0)), Access((1, 0), 3)
        self.handle = made(ctypes.c_uint64, "cuMemCreate", SIZE, ctypes.byref(properties), ctypes.c_uint64(0))
        do("cuMemMap", self.address, SIZE, ctypes.c_size_t(0), self.handle, ctypes.c_uint64(0))
        do("cuMemSetAccess", self.address, SIZE, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self):
        do("cuMemUnmap", self.address, SIZE)
        do("cuMemRelease", self.handle)

    def copy(self, name, to, source, stream):
        do(name, to, source, SIZE, stream)
        do("cuEventRecord", self.event, stream)

    def wait(self):
        do("cuEventSynchronize", self.event)


def timed(work):
    begun = time.perf_counter()
    work()
    return round(time.perf_counter() - begun, 3)


def back(chunks, stream, before=lambda chunk: None):
    for at, chunk in enumerate(chunks):
        if at >= IN_FLIGHT:
            chunks[at - IN_FLIGHT].wait()
        chunk.map()
        before(chunk)
        chunk.copy("cuMemcpyHtoDAsync_v2", chunk.address, chunk.host, stream)
    do("cuStreamSynchronize", stream)


def out(chunks, stream, after=lambda chunk: None):
    for at in range(len(chunks) + IN_FLIGHT):
        if at < len(chunks):
            chunks[at].copy("cuMemcpyDtoHAsync_v2", chunks[at].host, chunks[at].address, stream)
        if at >= IN_FLIGHT:
            chunk = chunks[at - IN_FLIGHT]
            chunk.wait()
            chunk.unmap()
            after(chunk)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    do("cuInit", 0)
    do("cuCtxSetCurrent", made(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", 0))
    stream, number = made(ctypes.c_void_p, "cuStreamCreate", 1), (options.gib << 30) // CHUNK
    nought = ctypes.c_size_t(0)
    base = made(ctypes.c_uint64, "cuMemAddressReserve", ctypes.c_size_t(number * CHUNK), nought, ctypes.c_uint64(0), ctypes.c_uint64(0))
    chunks = [Chunk(base.value + at * CHUNK) for at in range(number)]

    def each(work):
        return lambda: [work(chunk) for chunk in chunks]

    steps = [
        ("register", each(Chunk.register)),
        ("back, registered", lambda: back(chunks, stream)),
        ("out, registered", lambda: out(chunks, stream)),
        ("unregister", each(Chunk.unregister)),
        ("back, registered on the way", lambda: back(chunks, stream, Chunk.register)),
        ("out, unregistered on the way", lambda: out(chunks, stream, Chunk.unregister)),
        ("back, pageable", lambda: back(chunks, stream)),
        ("out, pageable", lambda: out(chunks, stream)),
    ]
    rounds = [{what: timed(work) for what, work in steps} for _ in range(options.rounds)]
    print(json.dumps({"gib": options.gib, "seconds": {what: [took[what] for took in rounds] for what, _ in steps}}), flush=True)


if __name__ == "__main__":
    main()
