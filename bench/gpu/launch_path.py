#!/usr/bin/env python3
"""Measures the time that nvshare adds to PyTorch's launches and copies, within one process.

  launch_path.py [--programs target/release] [--load launches] [--pairs 150] [--json FILE]
                 [--commit ID]

  launches  additions to 64 numbers, which are launch-bound, in samples of 0.1 s
  decode    a Llama of 12.6 GiB that answers one request at a time, in samples of one answer of 16
            tokens

libcudart and other libraries keep function pointers to the driver's functions. The script switches
these pointers repeatedly between the driver's functions and nvshare's.

Two processes differ in speed by several percent even without nvshare, because their memory has
different addresses. Samples of one process do not have this difference. The samples of a pair
follow each other directly: one uses nvshare's functions, the other does not. The order alternates.
In control pairs, neither sample uses nvshare's functions.

Prints the median of the pairs' ratios and its 95 % interval (by ranks), in percent, for both kinds
of pairs. The figures `launch-bound-slowdown` and `solo-slowdown-decode` are the upper ends of the
interval. They exclude effects of nvshare's placement of memory; `solo.py` compares processes and
includes these effects. Needs a GPU, `nm`, PyTorch and, for `decode`, transformers.
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import solo
import stage

# The functions that are called during work. Functions that create or free objects are excluded,
# because an object must be created and freed by the same library.
FUNCTIONS = re.compile(r"cu(LaunchKernel|Memcpy.*Async|Memset.*Async|StreamSynchronize|StreamWaitEvent|StreamQuery|EventRecord|EventSynchronize)")
# For each load: the figure, and the seconds of a sample.
LOADS = {"launches": ("launch-bound-slowdown", 0.1), "decode": ("solo-slowdown-decode", 0)}


class DlInfo(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def symbols(path):
    """Returns the exported symbols of a library, and their offsets."""
    said = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in said.splitlines())
    return {words[2].split("@")[0]: int(words[0], 16) for words in lines if len(words) == 3}


def libraries():
    """Returns the mapped libraries, and the base address of each."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and ".so" in words[5]:
            found.setdefault(words[5], int(words[0].split("-")[0], 16))
    return found


def writable(path):
    """Returns the ranges of a library that stay writable after relocation, relative to its base
    address. Reads them from the 64-bit ELF program headers."""
    load, relocated_only, may_write = 1, 0x6474E552, 2
    with open(path, "rb") as file:
        head = file.read(64)
        at, size, number = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
        file.seek(at)
        headers = [struct.unpack_from("<IIQQQQQQ", file.read(size)) for _ in range(number)]
    sealed = [(address, address + length) for kind, _, _, address, _, _, length, _ in headers if kind == relocated_only]
    parts = []
    for kind, flags, _, address, _, _, length, _ in headers:
        if kind == load and flags & may_write:
            begin = max([address] + [-(-end // 4096) * 4096 for first, end in sealed if address <= first < address + length])
            parts.append((-(-begin // 8) * 8, address + length))
    return parts


class Switch:
    """The function pointers to switch, each with both addresses. They are in libcudart, and in
    libraries with a static libcudart, such as cuBLAS."""

    def __init__(self):
        mapped = libraries()
        ours, driver = (next(name for name in mapped if part in name) for part in ("libnvshare.so", "libcuda.so"))
        hooks, real = symbols(ours), symbols(driver)
        names = [name for name in hooks if FUNCTIONS.match(name) and name in real]
        pairs = {mapped[ours] + hooks[name]: mapped[driver] + real[name] for name in names}
        self.places, self.libraries = [], set()
        for library in mapped.keys() - {ours, driver}:
            for begin, end in writable(library):
                words = (ctypes.c_uint64 * ((end - begin) // 8)).from_address(mapped[library] + begin)
                found = [(words, i, word, pairs[word]) for i, word in enumerate(words) if word in pairs]
                self.places += found
                self.libraries |= {Path(library).name} if found else set()
        if not self.places:
            raise SystemExit("no library keeps a pointer to any of nvshare's functions")

    def set(self, to_nvshare):
        for words, i, hook, real in self.places:
            words[i] = hook if to_nvshare else real


def work(load, pairs):
    """Child process: prints the ratios of both kinds of pairs, and the duration of a step."""
    stage.end_with_parent()
    import torch

    step = solo.step_of(load)
    step()
    torch.cuda.synchronize()
    switch = Switch()

    def sample(to_nvshare, steps):
        switch.set(to_nvshare)
        for _ in range(3 if load == "launches" else 0):
            step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    sample(True, 1)
    once = sample(True, 3) / 3
    steps = max(1, round(LOADS[load][1] / once))
    ratios = {"nvshare": [], "control": []}
    for pair in range(pairs):
        for which, with_nvshare in (("nvshare", True), ("control", False)):
            if pair % 2:
                without, other = sample(False, steps), sample(with_nvshare, steps)
            else:
                other, without = sample(with_nvshare, steps), sample(False, steps)
            ratios[which].append(100 * (other / without - 1))
    print(json.dumps(ratios | {"step": once, "places": len(switch.places), "libraries": sorted(switch.libraries)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--load", choices=LOADS, default="launches")
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    with tempfile.TemporaryDirectory() as directory:
        daemon = stage.scheduler(programs, Path(directory), "")
        try:
            words = [sys.executable, __file__, "--work", arguments.load, str(arguments.pairs)]
            environment = os.environ | stage.under_nvshare(programs, Path(directory))
            said = json.loads(subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        finally:
            stage.end(daemon)

    def middle(values):
        low, high = solo.interval(values)
        return f"median {statistics.median(values):.2f}, its 95 % interval {low:.2f} to {high:.2f}"

    name, seconds = LOADS[arguments.load]
    seconds = max(seconds, said["step"])
    note = f"within one process, {len(said['nvshare'])} pairs of samples of about {seconds:.1g} s with and without nvshare's functions: "
    note += f"{middle(said['nvshare'])}, which ends at the figure; both without: {middle(said['control'])}; "
    note += f"a step takes {1e3 * said['step']:.3f} ms; {said['places']} addresses exchanged, in {', '.join(said['libraries'])}"
    print(note)
    if arguments.json:
        figure = (name, solo.interval(said["nvshare"])[1], "percent", note)
        figures.add(arguments.json, [figure], arguments.commit)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        main()
