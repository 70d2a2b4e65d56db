#!/usr/bin/env python3
"""Checks and measures memory pools, whose memory nvshare makes movable.

  pools.py [--programs target/release] [--cases probe,rules,pairs,train,cupy] [--free 24]
           [--json FILE] [--commit ID]

  probe   queries pools and their memory, natively and under nvshare; prints all answers and the
          differences
  rules   runs `pool_rules` and `pools` of cuda-program: natively, under nvshare, and beside a
          program under nvshare that causes evictions
  pairs   calls cuMemAllocAsync and cuMemFreeAsync for 1 MiB in one stream, 1,000,000 times per
          process, alternating between native and nvshare; the ratio of the medians is the figure
          `pool-alloc-free-over-native`
  train   trains with PyTorch and backend:cudaMallocAsync: natively, under nvshare, and while a
          program under nvshare causes evictions every second; prints the checksums, which must be
          equal, the moved bytes, and the peak of pinned memory
  cupy    does the same as train, with CuPy's asynchronous pool

A ballast holds all of the GPU except --free GiB. The exit status is 1 if a case failed. Needs a
GPU; in --programs, `nvshare-scheduler`, `nvsharectl`, `libnvshare.so` and, for rules and pairs,
`cuda-program`; PyTorch for train, and CuPy for cupy.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

MIB = 2**20
PAIRS = 1_000_000
SUITES = Path(__file__).with_name("suites.py")
PINNED_MOST = 64 * MIB

CAPTURE_GLOBAL, CAPTURE_RELAXED = 0, 2


# The roles of child processes.


class Pools:
    """Calls of the driver. Each method returns the call's error or result."""

    def __init__(self):
        self.driver = stage.Driver()
        self.library = self.driver.library

    def call(self, name, *arguments):
        function = getattr(self.library, name, None)
        return function(*arguments) if function else -1

    def value(self, name, *arguments, kind=ctypes.c_uint64):
        """Returns the value that the call writes to its first argument, or a text for an error."""
        place = kind()
        code = self.call(name, ctypes.byref(place), *arguments)
        return place.value if code == 0 else f"error {code}"

    def attribute(self, pool, which):
        place = ctypes.c_uint64()
        code = self.call("cuMemPoolGetAttribute", ctypes.c_void_p(pool), ctypes.c_int(which), ctypes.byref(place))
        return place.value if code == 0 else f"error {code}"

    def set(self, pool, which, value):
        place = ctypes.c_uint64(value)
        return self.call("cuMemPoolSetAttribute", ctypes.c_void_p(pool), ctypes.c_int(which), ctypes.byref(place))

    def about(self, at, which):
        place = ctypes.c_uint64(0)
        code = self.call("cuPointerGetAttribute", ctypes.byref(place), ctypes.c_int(which), ctypes.c_uint64(at))
        return place.value if code == 0 else f"error {code}"

    def allocate(self, size, stream=None):
        return self.value("cuMemAllocAsync", ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def free(self, at, stream=None):
        return self.call("cuMemFreeAsync", ctypes.c_uint64(at), ctypes.c_void_p(stream))

    def stream(self, flags=1):
        return self.value("cuStreamCreate", ctypes.c_uint(flags), kind=ctypes.c_void_p)

    def create(self, handle_types=0, max_size=0):
        # CUmemPoolProps: pinned memory of device 0.
        properties = ctypes.create_string_buffer(struct.pack("iiiiQQH54x", 1, handle_types, 1, 0, 0, max_size, 0), 88)
        return self.value("cuMemPoolCreate", properties, kind=ctypes.c_void_p)

    def wait(self, stream=None):
        return self.call("cuStreamSynchronize", ctypes.c_void_p(stream))


def probe():
    stage.end_with_parent()
    pools = Pools()
    said = {}
    default = pools.value("cuDeviceGetDefaultMemPool", ctypes.c_int(0), kind=ctypes.c_void_p)
    said["the default pool is the current one"] = default == pools.value("cuDeviceGetMemPool", ctypes.c_int(0), kind=ctypes.c_void_p)
    said["attributes of a new pool"] = [pools.attribute(default, which) for which in range(1, 15)]
    stream = pools.stream()
    number = lambda handle: pools_id(pools, handle)  # noqa: E731
    said["streams 0 and 1 have the same number"] = number(0) == number(1)
    said["distinct numbers of 20 streams"] = len({numbered_stream(pools) for _ in range(20)})
    sizes = (4, 1000, MIB, 3 * MIB, 40 * MIB)
    for size in sizes:
        at = pools.allocate(size, stream)
        pools.wait(stream)
        answers = {which: pools.about(at, which) for which in range(1, 22)}
        for which in (3, 11, 19):  # addresses; compared as distances from the allocation
            if isinstance(answers[which], int):
                answers[which] = at - answers[which]
        for which in (7, 20):  # numbers of allocations; compared only with 0
            answers[which] = isinstance(answers[which], int) and answers[which] > 0
        answers[17] = answers[17] == default
        said[f"pointer attributes, {size} bytes"] = answers
        said[f"alignment, {size} bytes"] = at % 512
        said[f"reserved and used, {size} bytes"] = [pools.attribute(default, which) for which in (5, 7)]
        said[f"freeing the middle, {size} bytes"] = pools.free(at + 512, stream)
        said[f"freeing, {size} bytes"] = pools.free(at, stream)
        pools.wait(stream)
        said[f"freeing again, {size} bytes"] = pools.free(at, stream)
        said[f"reserved after a wait, {size} bytes"] = pools.attribute(default, 5)
    at = pools.allocate(MIB, stream)
    pools.free(at, stream)
    said["a freed block is reused immediately"] = pools.allocate(MIB, stream) == at
    pools.free(at, stream)
    said["allocating nothing"] = pools.allocate(0, stream) == 0
    said["freeing nothing"] = pools.free(0, stream)
    plain = pools.value("cuMemAlloc_v2", ctypes.c_size_t(4 * MIB))
    said["cuMemFreeAsync of memory from cuMemAlloc"] = pools.free(plain, stream)
    at = pools.allocate(4 * MIB, stream)
    said["cuMemFree of pool memory"] = pools.call("cuMemFree_v2", ctypes.c_uint64(at))
    said["freeing it again"] = pools.free(at, stream)
    said["destroying the default pool"] = pools.call("cuMemPoolDestroy", ctypes.c_void_p(default))
    pool = pools.create()
    pools.set(pool, 4, 2**64 - 1)
    at = pools.value("cuMemAllocFromPoolAsync", ctypes.c_size_t(64 * MIB), ctypes.c_void_p(pool), ctypes.c_void_p(stream))
    pools.free(at, stream)
    pools.wait(stream)
    said["reserved below the release threshold"] = pools.attribute(pool, 5)
    said["cuMemAlloc gets memory that the pool keeps unused"] = another_has_it(pools, pool)
    pools.call("cuMemPoolTrimTo", ctypes.c_void_p(pool), ctypes.c_size_t(0))
    said["attributes after trimming the pool"] = [pools.attribute(pool, which) for which in (5, 6, 7, 8)]
    at = pools.value("cuMemAllocFromPoolAsync", ctypes.c_size_t(MIB), ctypes.c_void_p(pool), ctypes.c_void_p(stream))
    handle = ctypes.create_string_buffer(64)
    said["cuIpcGetMemHandle of pool memory"] = pools.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(at))
    said["cuMemPoolExportPointer"] = pools.call("cuMemPoolExportPointer", ctypes.create_string_buffer(64), ctypes.c_uint64(at))
    said["destroying a pool with a block in use"] = pools.call("cuMemPoolDestroy", ctypes.c_void_p(pool))
    said["freeing the block of the destroyed pool"] = pools.free(at, stream)
    outside = pools.allocate(MIB, stream)
    pools.wait(stream)
    pools.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(CAPTURE_RELAXED))
    said["freeing memory in a capture that was allocated before it"] = pools.free(outside, stream)
    graph = ctypes.c_void_p()
    said["ending that capture"] = pools.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    said["freeing that memory after the capture"] = pools.free(outside, stream)
    other = pools.stream()
    pools.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(CAPTURE_GLOBAL))
    at = pools.allocate(MIB, other)
    said["allocating and freeing in another stream during a capture"] = [isinstance(at, int), pools.free(at, other) if isinstance(at, int) else None]
    said["ending that capture of one stream"] = pools.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    at = pools.allocate(40 * MIB, stream)
    pools.wait(stream)
    said["resetting the primary context with memory in use"] = pools.call("cuDevicePrimaryCtxReset_v2", ctypes.c_int(0))
    context = ctypes.c_void_p()
    pools.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
    pools.call("cuCtxSetCurrent", context)
    said["the default pool is the same after the reset"] = default == pools.value(
        "cuDeviceGetDefaultMemPool", ctypes.c_int(0), kind=ctypes.c_void_p
    )
    said["reserved and used after the reset"] = [pools.attribute(default, which) for which in (5, 7)]
    said["pointer attributes after the reset"] = [pools.about(at, which) for which in (2, 9)]
    said["freeing that memory after the reset"] = pools.free(at)
    print(json.dumps(said), flush=True)


def pools_id(pools, handle):
    place = ctypes.c_uint64()
    code = pools.call("cuStreamGetId", ctypes.c_void_p(handle), ctypes.byref(place))
    return place.value if code == 0 else f"error {code}"


def numbered_stream(pools):
    stream = pools.stream()
    number = pools_id(pools, stream)
    pools.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
    return number


def another_has_it(pools, pool):
    """Allocates all free memory and some of the memory that the pool keeps unused. Returns whether
    cuMemAlloc succeeds, and the bytes that the pool has reserved afterwards."""
    free = pools.driver.free()
    at = pools.value("cuMemAlloc_v2", ctypes.c_size_t(free + 32 * MIB))
    if isinstance(at, int):
        pools.call("cuMemFree_v2", ctypes.c_uint64(at))
    return [isinstance(at, int), pools.attribute(pool, 5)]


def train(seconds):
    """Trains a small network with buffers of many sizes. Runs a fixed number of steps, and takes at
    least `seconds`."""
    stage.end_with_parent()
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    nn = torch.nn
    widths = [3, 64, 128, 256]
    layers = [part for a, b in zip(widths, widths[1:]) for part in (nn.Conv2d(a, b, 3, stride=2), nn.ReLU())]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    # 4 GiB that are only held.
    weights = [torch.full((64 * MIB,), float(i), device="cuda") for i in range(16)]
    begin, sums = time.monotonic(), []
    for step in range(400):
        size = 64 + 32 * (step % 5)
        images = torch.rand(size, 3, 96 + 16 * (step % 3), 128, device="cuda")
        labels = torch.randint(0, 1000, (size,), device="cuda")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        sums.append(loss.item())
        time.sleep(max(0, seconds * (step + 1) / 400 - (time.monotonic() - begin)))
    kept = [int(weight[-1].item()) for weight in weights] == list(range(16))
    checksum = sum(parameter.double().sum().item() for parameter in net.parameters())
    said = {"checksum": [checksum, sum(sums)], "kept": kept, "backend": torch.cuda.get_allocator_backend()}
    print(json.dumps(said), flush=True)


def cupy(seconds):
    stage.end_with_parent()
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    kept = [cupy.full(64 * MIB, i, dtype=cupy.float32) for i in range(16)]
    begin, total = time.monotonic(), 0.0
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for step in range(400):
        with streams[step % 3]:
            numbers = cupy.arange((1 + step % 7) * MIB, dtype=cupy.int64)
            total += int((numbers * (step + 1) % 1000003).sum())
        time.sleep(max(0, seconds * (step + 1) / 400 - (time.monotonic() - begin)))
    print(json.dumps({"checksum": [total], "kept": [int(part[-1]) for part in kept] == list(range(16))}), flush=True)


# The cases.


class Run:
    def __init__(self, arguments, directory):
        self.arguments, self.directory = arguments, directory
        self.programs = arguments.programs.resolve()
        self.failed = False

    def say(self, case, ok, **what):
        self.failed |= not ok
        print(json.dumps({"case": case, "ok": ok} | what, ensure_ascii=False), flush=True)

    @contextlib.contextmanager
    def nvshare(self, compete=False):
        """Runs a scheduler and, with `compete`, a program that takes all memory every second."""
        metrics = self.directory / "metrics.sock"
        metrics.unlink(missing_ok=True)
        settings = 'time-quantum = "1s"\n' if compete else ""
        settings += f"[metrics]\nlisten = {json.dumps(str(metrics))}\n"
        with contextlib.ExitStack() as stack:
            daemon = stage.scheduler(self.programs, self.directory, settings)
            stack.callback(stage.end, daemon)
            environment = stage.under_nvshare(self.programs, self.directory)
            if compete:
                words = [sys.executable, SUITES, "--compete", "3"]
                competitor = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | environment)
                stack.callback(stage.end, competitor)
                competitor.stdout.readline()
            yield environment, metrics

    def status(self):
        words = [self.programs / "nvsharectl", "--control", self.directory / "control.sock", "status", "--json"]
        said = subprocess.run(words, capture_output=True, text=True)
        return json.loads(said.stdout) if said.returncode == 0 else {"clients": []}

    def child(self, words, environment):
        """Runs a program. Returns its output and its peak of pinned memory."""
        child = subprocess.Popen(list(map(str, words)), env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        pinned = 0
        while child.poll() is None:
            if "NVSHARE_SOCKET" in environment:
                for client in self.status()["clients"]:
                    if client.get("pid") == child.pid:
                        pinned = max([pinned, *(gpu.get("pinned", 0) for gpu in client.get("gpus", []))])
            time.sleep(0.2)
        lines = child.stdout.read().splitlines()
        try:
            return json.loads(lines[-1]) | {"status": child.returncode}, pinned
        except (IndexError, ValueError):
            return {"status": child.returncode, "said": lines[-3:]}, pinned

    def probe(self):
        words = [sys.executable, __file__, "--role", "probe"]
        native, _ = self.child(words, {})
        with self.nvshare() as (environment, _):
            ours, _ = self.child(words, environment)
        differing = {name: [native.get(name), ours.get(name)] for name in native.keys() | ours.keys() if native.get(name) != ours.get(name)}
        self.say("probe", native["status"] == 0 and ours["status"] == 0, native=native, differing=differing)

    def rules(self):
        program = self.programs / "cuda-program"
        cases = [["pool_rules"], *(["pools", "--mem", self.arguments.mem, "--threads", "4", "--seconds", "8", "--seed", seed] for seed in (1, 2))]
        for words in cases:
            for mode in ("native", "nvshare", "swapped"):
                with contextlib.ExitStack() as stack:
                    environment, metrics = {}, None
                    if mode != "native":
                        environment, metrics = stack.enter_context(self.nvshare(mode == "swapped"))
                    said, pinned = self.child([program, *words], environment)
                    moved = stage.swapped(metrics) if metrics else None
                self.say("rules", said["status"] == 0, mode=mode, said=said, pinned=pinned, moved=moved)

    def pairs(self):
        words = [self.programs / "cuda-program", "pool_latency", "--pairs", PAIRS]
        times = {"native": [], "nvshare": []}
        with self.nvshare() as (environment, _):
            for number in range(2 * self.arguments.runs):
                mode = "nvshare" if number % 4 in (1, 2) else "native"
                said, _ = self.child(words, environment if mode == "nvshare" else {})
                if said["status"]:
                    return self.say("pairs", False, mode=mode, said=said)
                times[mode].append(said["ns_a_pair"])
        medians = {mode: statistics.median(values) for mode, values in times.items()}
        ratio = medians["nvshare"] / medians["native"]
        self.say("pairs", True, ratio=round(ratio, 4), ns=times)
        if self.arguments.json:
            note = f"{PAIRS} pairs of 1 MiB in one stream, medians of {self.arguments.runs} processes each, in turn: "
            note += f"{medians['nvshare']:.0f} ns a pair, natively {medians['native']:.0f}"
            figures.add(self.arguments.json, [("pool-alloc-free-over-native", ratio, "ratio", note)], self.arguments.commit)

    def work(self, case, module):
        if importlib.util.find_spec(module) is None:
            return self.say(case, True, skipped=f"{module} is not installed")
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        checksum = None
        for mode, seconds in (("native", 0), ("nvshare", 0), ("swapped", self.arguments.seconds)):
            with contextlib.ExitStack() as stack:
                environment, metrics = {}, None
                if mode != "native":
                    environment, metrics = stack.enter_context(self.nvshare(mode == "swapped"))
                said, pinned = self.child([sys.executable, __file__, "--role", case, seconds], environment | settings)
                moved = stage.swapped(metrics) if metrics else None
            checksum = checksum or said.get("checksum")
            ok = said["status"] == 0 and said["kept"] and said["checksum"] == checksum and pinned < PINNED_MOST
            ok &= mode != "swapped" or min(moved) > 0
            self.say(case, ok, mode=mode, said=said, pinned=pinned, moved=moved)

    def run(self):
        words = [sys.executable, SUITES, "--ballast", str(self.arguments.free)]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            print(holder.stdout.readline().strip(), flush=True)
            for case in self.arguments.cases:
                if case in ("train", "cupy"):
                    self.work(case, {"train": "torch", "cupy": "cupy"}[case])
                else:
                    {"probe": self.probe, "rules": self.rules, "pairs": self.pairs}[case]()
        finally:
            stage.end(holder)
        return self.failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["probe", "rules", "pairs", "train", "cupy"])
    parser.add_argument("--free", type=float, default=24, help="GiB that the ballast leaves")
    parser.add_argument("--mem", default="4G", help="memory that `pools` uses in rules")
    parser.add_argument("--runs", type=int, default=5, help="processes of each mode in pairs")
    parser.add_argument("--seconds", type=float, default=25, help="minimum seconds of train and cupy while memory is evicted")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(Run(arguments, Path(directory)).run())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        role, more = sys.argv[2], sys.argv[3:]
        {"probe": probe, "train": train, "cupy": cupy}[role](*map(float, more))
    else:
        main()
