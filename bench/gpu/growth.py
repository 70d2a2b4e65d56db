#!/usr/bin/env python3
"""Measures the cost of allocating memory under nvshare, for a program alone on the GPU.

  growth.py [--programs target/release] [--only build|alloc] [--runs 5] [--layers 32]
            [--alloc-runs 3] [--count 2000] [--size 32] [--json bench/results.json]

build  Builds a Llama with 12.6 GiB of random weights on the GPU, natively and under nvshare. Prints
       the seconds for creating the context, for the build itself (from the existing context to the
       end of the GPU's work), and for the whole process. Figure: model-build-slowdown, from the
       medians of the build itself. Needs PyTorch and transformers.
alloc  Calls cuMemAlloc for --size MiB --count times, and then cuMemFree for each allocation, in one
       context. The modes are native, nvshare, and native with the four calls of virtual memory
       management (reserve, create, map, set access). A movable allocation needs at least these four
       calls. Before the allocations are freed, one byte of each is set, because the driver can
       defer work until the first use. If the GPU has too little memory, the script makes fewer
       allocations. Figure: alloc-32MiB-over-vmm, in microseconds: the median of cuMemAlloc under
       nvshare minus the median of the four calls.

Prints JSON lines. Each run is a new process, and the order of the modes alternates.
"""

import argparse
import ctypes
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
import llama
import stage

MIB = 2**20
SPARED = 1024 * MIB  # left free on the GPU by alloc


def build(layers):
    stage.end_with_parent()
    begun = time.perf_counter()
    import torch
    import transformers  # noqa: F401

    imported = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    ready = time.perf_counter()
    model = llama.build(layers)
    torch.cuda.synchronize()
    built = time.perf_counter()
    gib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    said = {"import": imported - begun, "context": ready - imported, "build": built - ready, "gib": gib}
    print(json.dumps({name: round(value, 4) for name, value in said.items()}))


class Plain:
    def __init__(self, driver, size):
        self.allocate_, self.free_ = driver.library.cuMemAlloc_v2, driver.library.cuMemFree_v2
        self.size = ctypes.c_size_t(size)

    def allocate(self):
        at = ctypes.c_uint64()
        return self.allocate_(ctypes.byref(at), self.size), at

    def free(self, at):
        return self.free_(at)


class Mapped:
    """Allocates with the calls of virtual memory management instead of cuMemAlloc."""

    def __init__(self, driver, size):
        library = driver.library
        self.reserve, self.create, self.map = library.cuMemAddressReserve, library.cuMemCreate, library.cuMemMap
        self.access, self.unmap = library.cuMemSetAccess, library.cuMemUnmap
        self.release, self.unreserve = library.cuMemRelease, library.cuMemAddressFree
        self.size, self.zero = ctypes.c_size_t(size), ctypes.c_uint64(0)
        # CUmemAllocationProp: pinned memory of device 0. CUmemAccessDesc: read and write access for
        # device 0.
        self.properties = ctypes.create_string_buffer(struct.pack("iiiiQ8x", 1, 0, 1, 0, 0), 32)
        self.rights = ctypes.create_string_buffer(struct.pack("iii", 1, 0, 3), 12)

    def allocate(self):
        at, handle = ctypes.c_uint64(), ctypes.c_uint64()
        failed = self.reserve(ctypes.byref(at), self.size, self.zero, self.zero, self.zero)
        failed = failed or self.create(ctypes.byref(handle), self.size, self.properties, self.zero)
        failed = failed or self.map(at, self.size, self.zero, handle, self.zero)
        failed = failed or self.access(at, self.size, self.rights, ctypes.c_size_t(1))
        return failed, (at, handle)

    def free(self, taken):
        at, handle = taken
        return self.unmap(at, self.size) or self.release(handle) or self.unreserve(at, self.size)


def allocate(how, count, size):
    stage.end_with_parent()
    driver = stage.Driver()
    memory = {"plain": Plain, "vmm": Mapped}[how](driver, size)
    count = min(count, max(0, driver.free() - SPARED * (driver.free() > 2 * SPARED)) // size)
    clock, taken, times = time.perf_counter_ns, [], {"allocate": [], "free": []}
    for _ in range(count):
        begun = clock()
        failed, what = memory.allocate()
        times["allocate"].append(clock() - begun)
        if failed:
            raise SystemExit(f"allocation {len(taken) + 1} failed with error {failed}")
        taken.append(what)
    # Sets one byte of each allocation. This includes work that was deferred to the first use.
    begun = clock()
    for what in taken:
        at = what if how == "plain" else what[0]
        driver.call("cuMemsetD8_v2", at, ctypes.c_ubyte(1), ctypes.c_size_t(1))
    driver.call("cuCtxSynchronize")
    used = clock() - begun
    for what in taken:
        begun = clock()
        failed = memory.free(what)
        times["free"].append(clock() - begun)
        if failed:
            raise SystemExit(f"freeing an allocation failed with error {failed}")
    print(json.dumps({"times": times, "use": used}))


def say(what):
    print(json.dumps(what, ensure_ascii=False), flush=True)


def child(words, environment):
    """Runs this script as a child process. Returns its output, and the seconds that it took."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, words)], env=os.environ | environment, stdout=subprocess.PIPE
    )
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with status {done.returncode}")
    return json.loads(done.stdout), seconds


def alternating(modes, runs):
    """Yields each mode `runs` times. Reverses the order in every second run, so that no mode is
    always first."""
    for run in range(runs):
        for mode in list(modes) if run % 2 == 0 else reversed(modes):
            yield run, mode


def measure_build(arguments, environment):
    subprocess.run([sys.executable, "-c", "import torch; from transformers import LlamaForCausalLM"], check=True)
    modes, seen = {"native": {}, "nvshare": environment}, {"native": [], "nvshare": []}
    for run, mode in alternating(list(modes), arguments.runs):
        said, whole = child(["build", arguments.layers], modes[mode])
        said["whole"] = round(whole, 4)
        seen[mode].append(said)
        say({"kind": "build", "run": run, "mode": mode} | said)
    median = {mode: {part: statistics.median(s[part] for s in all_said) for part in ("context", "build", "whole")} for mode, all_said in seen.items()}
    slower = {part: 100 * (median["nvshare"][part] / median["native"][part] - 1) for part in ("build", "whole")}
    say({"kind": "build-medians", "percent-slower": {part: round(value, 2) for part, value in slower.items()}} | median)
    native, shared, gib = median["native"], median["nvshare"], seen["native"][0]["gib"]
    note = f"Llama of {gib:.1f} GiB, medians of {arguments.runs} alternating runs: {shared['build']:.3f} s against {native['build']:.3f} s; "
    note += f"whole process {shared['whole']:.2f} s against {native['whole']:.2f} s ({slower['whole']:+.1f} %)"
    return [("model-build-slowdown", slower["build"], "percent", note)]


def measure_alloc(arguments, environment):
    modes = {"native": ("plain", {}), "native-vmm": ("vmm", {}), "nvshare": ("plain", environment)}
    seen, used = {mode: {"allocate": [], "free": []} for mode in modes}, {mode: [] for mode in modes}
    for run, mode in alternating(list(modes), arguments.alloc_runs):
        how, variables = modes[mode]
        measured, _ = child(["alloc", how, arguments.count, arguments.size * MIB], variables)
        times = measured["times"]
        used[mode].append(measured["use"] / 1e6)
        tenth = max(1, len(times["allocate"]) // 10)
        said = {"kind": "alloc", "run": run, "mode": mode, "count": len(times["allocate"])}
        for what, each in times.items():
            us = [ns / 1000 for ns in each]
            seen[mode][what] += us
            ends = {"first-tenth": statistics.median(us[:tenth]), "last-tenth": statistics.median(us[-tenth:])}
            said[f"{what}-us"] = figures.summary(us) | {name: round(value, 2) for name, value in ends.items()}
            said[f"{what}-total-ms"] = round(sum(us) / 1000, 2)
        said["first-use-total-ms"] = round(used[mode][-1], 2)
        say(said)
    summary = {mode: {what: figures.summary(us) for what, us in times.items()} for mode, times in seen.items()}
    say({"kind": "alloc-us"} | summary)
    taken = {mode: summary[mode]["allocate"] for mode in modes}
    over = taken["nvshare"]["p50"] - taken["native-vmm"]["p50"]
    counted = taken["nvshare"]["n"] // arguments.alloc_runs
    note = f"{counted} times cuMemAlloc of {arguments.size} MiB, {arguments.alloc_runs} runs, median (99 %) in us: nvshare "
    note += "{p50:.1f} ({p99:.1f}), ".format(**taken["nvshare"])
    note += "native reserve+create+map+set access {p50:.1f} ({p99:.1f}), ".format(**taken["native-vmm"])
    note += "native cuMemAlloc {p50:.1f} ({p99:.1f}); free ".format(**taken["native"])
    note += " / ".join(f"{summary[mode]['free']['p50']:.1f}" for mode in ("nvshare", "native-vmm", "native"))
    note += "; first use of all of it, ms: "
    note += " / ".join(f"{statistics.median(used[mode]):.1f}" for mode in ("nvshare", "native-vmm", "native"))
    if arguments.size != 32:
        return []
    return [("alloc-32MiB-over-vmm", over, "us", note)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of nvshare-scheduler and libnvshare.so")
    parser.add_argument("--only", choices=["build", "alloc"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=llama.LAYERS)
    parser.add_argument("--alloc-runs", type=int, default=3)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=int, default=32, help="MiB, a multiple of 2")
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit of the measured programs (default: the checked-out commit)")
    arguments = parser.parse_args()
    programs, said = arguments.programs.resolve(), []
    say({"kind": "measured", "files": figures.measured_files(programs), "hardware": figures.hardware()})
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        daemon = stage.scheduler(programs, directory, arguments.settings)
        try:
            environment = stage.under_nvshare(programs, directory)
            for name, measure in (("alloc", measure_alloc), ("build", measure_build)):
                if arguments.only in (None, name):
                    said += measure(arguments, environment)
        finally:
            stage.end(daemon)
            say({"kind": "figures", "figures": [dict(zip(("name", "value", "unit", "note"), figure)) for figure in said]})
            if arguments.json and said:
                figures.add(arguments.json, said, arguments.commit)


if __name__ == "__main__":
    if sys.argv[1:3] == ["--child", "build"]:
        build(int(sys.argv[3]))
    elif sys.argv[1:3] == ["--child", "alloc"]:
        allocate(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
