#!/usr/bin/env python3
"""Shows what a process sees after the driver has restored it from a checkpoint on another GPU. Uses
only calls of the driver, without nvshare.

  moves.py [--library libcuda.so.1] [--mebibytes 256] [--registered 16]

In each case, a new process creates contexts, memory, a stream and an event. Then it is locked,
checkpointed, restored with a list of pairs (old GPU, new GPU), and unlocked. If the restore
succeeds, the process is moved back in the same way.

The cases are:
- a process that sees both GPUs, and has a context on the first GPU; the list names both GPUs, or
  only the first GPU
- a process with a context on each GPU, which exchange their GPUs
- a process that sees only the first GPU (CUDA_VISIBLE_DEVICES); the list names both GPUs, or only
  the first GPU
- processes with one context and --registered GiB of registered host memory: with the library's
  flags, in a process that sees both GPUs or only the first GPU; and registered for one context
  only, without access by kernels

Prints a line of JSON for each case: the result and the seconds of each call, and the output of the
process and of nvidia-smi before the move, after it, and after the move back.

Needs two GPUs of the same kind, and permission to trace other processes. With some drivers, killing
a restored process has hung the host (NVIDIA/cuda-checkpoint#53). The script therefore lets the
processes end by themselves, unless they hang for a minute.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time

CASES = {
    "one context": {"contexts": [0], "pairs": [(0, 1), (1, 0)]},
    "a context on each": {"contexts": [0, 1], "pairs": [(0, 1), (1, 0)]},
    "sees one, both named": {"contexts": [0], "pairs": [(0, 1), (1, 0)], "visible": "0"},
    "sees one, which is named": {"contexts": [0], "pairs": [(0, 1)], "visible": "0"},
    "sees both, one is named": {"contexts": [0], "pairs": [(0, 1)]},
    "host memory, portable and mapped": {"contexts": [0], "pairs": [(0, 1), (1, 0)], "flags": 3},
    "host memory, neither": {"contexts": [0], "pairs": [(0, 1), (1, 0)], "flags": 0},
    "host memory, sees one": {"contexts": [0], "pairs": [(0, 1), (1, 0)], "flags": 3, "visible": "0"},
}
CHUNK = 64 << 20  # bytes that one call registers
# The timeout of a lock in milliseconds, and the seconds after which a hung process is killed.
LOCK_MS, PATIENCE = 5000, 60


class Driver:
    def __init__(self, library):
        self.library = ctypes.CDLL(library)

    def code(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def do(self, name, *arguments):
        code = self.code(name, *arguments)
        if code:
            raise SystemExit(f"{name}: {code}")

    def get(self, kind, name, *arguments):
        """Returns the value that the call writes to its first argument."""
        value = kind()
        self.do(name, ctypes.byref(value), *arguments)
        return value.value

    def uuid(self, device):
        value = (ctypes.c_ubyte * 16)()
        self.do("cuDeviceGetUuid", value, device)
        return bytes(value)

    def gpus(self):
        self.do("cuInit", 0)
        return self.get(ctypes.c_int, "cuDeviceGetCount")


class Part:
    """The process's objects on one of its visible GPUs."""

    def __init__(self, driver, device, size):
        self.driver, self.size = driver, size
        self.context = driver.get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)
        driver.do("cuCtxSetCurrent", ctypes.c_void_p(self.context))
        self.memory = ctypes.c_uint64(driver.get(ctypes.c_uint64, "cuMemAlloc_v2", ctypes.c_size_t(size)))
        self.stream = ctypes.c_void_p(driver.get(ctypes.c_void_p, "cuStreamCreate", 0))
        self.event = ctypes.c_void_p(driver.get(ctypes.c_void_p, "cuEventCreate", 0))
        driver.do("cuMemsetD32_v2", self.memory, 7, ctypes.c_size_t(size // 4))

    def says(self):
        """Returns the context's device and free MiB, the last word of the memory, and the results
        of calls with the existing stream and event."""
        driver, free, total = self.driver, ctypes.c_size_t(), ctypes.c_size_t()
        driver.do("cuCtxSetCurrent", ctypes.c_void_p(self.context))
        driver.do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        last = ctypes.c_uint64(self.memory.value + self.size - 4)
        word = driver.get(ctypes.c_uint32, "cuMemcpyDtoH_v2", last, ctypes.c_size_t(4))
        calls = [
            driver.code("cuMemsetD32Async", self.memory, 7, ctypes.c_size_t(self.size // 4), self.stream),
            driver.code("cuEventRecord", self.event, self.stream),
            driver.code("cuEventSynchronize", self.event),
            driver.code("cuStreamSynchronize", self.stream),
        ]
        device = driver.get(ctypes.c_int, "cuCtxGetDevice")
        return {"device": device, "free": free.value >> 20, "word": word, "calls": calls}


def register(driver, gibibytes, flags):
    """Allocates host memory, in huge pages if possible, and registers it in the current context."""
    held = []
    for _ in range((gibibytes << 30) // CHUNK):
        memory = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        place = (ctypes.c_char * CHUNK).from_buffer(memory)
        ctypes.memset(place, 1, CHUNK)
        driver.do("cuMemHostRegister_v2", place, ctypes.c_size_t(CHUNK), flags)
        held.append((memory, place))
    return held


def process(driver, devices, size, registered, flags):
    """Child process, which is moved: prints what it sees for each line of standard input."""
    count = driver.gpus()
    parts = [Part(driver, device, size) for device in devices]
    held = register(driver, registered, flags)  # referenced until the process ends
    signal.alarm(PATIENCE)
    for _ in sys.stdin:
        signal.alarm(PATIENCE)
        seen = []
        for device in range(count):
            bus = ctypes.create_string_buffer(32)
            driver.do("cuDeviceGetPCIBusId", bus, 32, device)
            found = ctypes.c_int(-1)
            code = driver.code("cuDeviceGetByPCIBusId", ctypes.byref(found), bus)
            seen.append({"uuid": driver.uuid(device).hex(), "bus": bus.value.decode(), "of-bus": [code, found.value]})
        print(json.dumps({"devices": seen, "contexts": [part.says() for part in parts], "chunks": len(held)}), flush=True)


def listed():
    """Returns the used MiB of each GPU, and the processes on it, according to nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None

    def query(what):
        words = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"]
        return subprocess.check_output(words, text=True).splitlines()

    return {"used": query("gpu=uuid,memory.used"), "processes": query("compute-apps=gpu_uuid,pid,used_memory")}


def move(driver, pid, pairs):
    """Checkpoints a process, and restores it from the first to the second GPU of each pair. Returns
    the results and seconds of the calls."""
    uuids = ctypes.create_string_buffer(b"".join(driver.uuid(gpu) for pair in pairs for gpu in pair))
    locks = (ctypes.c_uint32 * 16)(LOCK_MS)
    restores = (ctypes.c_uint64 * 8)(ctypes.addressof(uuids), len(pairs))
    done = {}
    for name, arguments in [("Lock", locks), ("Checkpoint", None), ("Restore", restores), ("Unlock", None)]:
        begun = time.monotonic()
        code = driver.code(f"cuCheckpointProcess{name}", pid, arguments)
        done[name] = [code, round(time.monotonic() - begun, 3)]
        if code and name == "Restore":  # so that the process can continue on its old GPU
            same = [(gpu, gpu) for gpu in range(driver.gpus())]
            uuids = ctypes.create_string_buffer(b"".join(driver.uuid(gpu) for pair in same for gpu in pair))
            restores = (ctypes.c_uint64 * 8)(ctypes.addressof(uuids), len(same))
            done["Restore where it was"] = driver.code("cuCheckpointProcessRestore", pid, restores)
    return done


def show(driver, options, case, result):
    """Runs a case. Adds each step to `result` immediately, because a later step can fail."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": case["visible"]} if "visible" in case else {})
    words = [sys.executable, __file__, "--library", options.library, "--mebibytes", str(options.mebibytes)]
    words += ["--contexts", ",".join(map(str, case["contexts"]))]
    if "flags" in case:
        words += ["--registered", str(options.registered), "--flags", str(case["flags"])]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True) as child:

        def says():
            print("", file=child.stdin, flush=True)
            return {"process": json.loads(child.stdout.readline()), "nvidia-smi": listed()}

        result["before"] = says()
        result["move"] = move(driver, child.pid, case["pairs"])
        result["after"] = says()
        if not result["move"]["Restore"][0]:
            back = [(new, old) for old, new in case["pairs"]]
            result["move back"] = move(driver, child.pid, back)
            result["back"] = says()
        child.stdin.close()
    result["exit"] = child.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="libcuda.so.1")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--registered", type=int, default=16)
    parser.add_argument("--contexts", help=argparse.SUPPRESS)
    parser.add_argument("--flags", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    driver = Driver(options.library)
    if options.contexts:
        contexts = map(int, options.contexts.split(","))
        registered = 0 if options.flags is None else options.registered
        return process(driver, contexts, options.mebibytes << 20, registered, options.flags)
    if driver.gpus() != 2:
        raise SystemExit("needs two GPUs")
    for name, case in CASES.items():
        result = {"case": name}
        try:
            show(driver, options, case, result)
        except (OSError, ValueError) as error:
            result["lost"] = str(error)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
