#!/usr/bin/env python3
"""What nvshare adds to a launch of PyTorch, measured within one process: the driver's functions that libcudart keeps for launches are
exchanged, again and again, for the driver's own and for nvshare's.

  launch_path.py [--programs target/release] [--pairs 300] [--json FILE] [--commit ID]

Two processes differ by several percent from each other, nvshare or not, since their memory lies elsewhere; samples of one process do
not. Additions to 64 numbers are launched, which are bound by launching, in pairs of samples of 0.1 s that follow each other: one with
nvshare's functions, one without, in both orders. Prints the median of the pairs' ratios and its 95 % interval (by ranks), in percent,
and the same where both samples are without nvshare; the figure `launch-bound-slowdown` is the upper end. What the placement of memory by
nvshare changes is not in it: `solo.py` compares processes. Needs a GPU and PyTorch with a dynamic libcudart.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import solo
import stage

FUNCTIONS = ["cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"]
SAMPLE = 0.1


class DlInfo(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def symbols(path):
    """The exported functions of a library and where they are in it."""
    said = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in said.splitlines())
    return {words[2].split("@")[0]: int(words[0], 16) for words in lines if len(words) == 3}


def libraries():
    """The files that are mapped, where each begins, and its writable parts."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in words[0].split("-"))
        if len(words) == 6:
            name = words[5]
        elif not found or begin != last:
            name = ""
        # What follows a library's data without a name is its zeroed data.
        first, parts = found.setdefault(name, (begin, []))
        if words[1].startswith("rw"):
            parts.append((begin, end))
        last = end
    return found


class Switch:
    """The places where libcudart keeps the address of one of the functions, with both addresses."""

    def __init__(self):
        mapped = libraries()
        ours, runtime = (next(name for name in mapped if part in name) for part in ("libnvshare.so", "libcudart"))
        driver = next(name for name in mapped if "libcuda.so" in name)
        hooks, real = symbols(ours), symbols(driver)
        pairs = {
            mapped[ours][0] + hooks[name]: mapped[driver][0] + real[name] for name in FUNCTIONS if name in hooks and name in real
        }
        self.places = []
        for begin, end in mapped[runtime][1]:
            words = (ctypes.c_uint64 * ((end - begin) // 8)).from_address(begin)
            self.places += [(words, i, word, pairs[word]) for i, word in enumerate(words) if word in pairs]
        if not self.places:
            raise SystemExit("libcudart has none of nvshare's functions: its data was not found, or it is a static one")

    def set(self, to_nvshare):
        for words, i, hook, real in self.places:
            words[i] = hook if to_nvshare else real


def work(pairs):
    """The child: prints the ratios with nvshare, without, and how long a step takes."""
    stage.end_with_parent()
    import torch

    step = solo.step_of("launches")
    step()
    torch.cuda.synchronize()
    switch = Switch()

    def sample(to_nvshare, steps):
        switch.set(to_nvshare)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    once = sample(True, 100) / 100
    steps = max(1, round(SAMPLE / once))
    ratios = {"nvshare": [], "control": []}
    for pair in range(pairs):
        for which, with_nvshare in (("nvshare", True), ("control", False)):
            if pair % 2:
                without, other = sample(False, steps), sample(with_nvshare, steps)
            else:
                other, without = sample(with_nvshare, steps), sample(False, steps)
            ratios[which].append(100 * (other / without - 1))
    print(json.dumps(ratios | {"step": once, "places": len(switch.places)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    with tempfile.TemporaryDirectory() as directory:
        daemon = stage.scheduler(programs, Path(directory), "")
        try:
            words = [sys.executable, __file__, "--work", str(arguments.pairs)]
            environment = os.environ | stage.under_nvshare(programs, Path(directory))
            said = json.loads(subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        finally:
            stage.end(daemon)

    def middle(values):
        low, high = solo.interval(values)
        return f"median {statistics.median(values):.2f}, its 95 % interval {low:.2f} to {high:.2f}"

    note = f"within one process, {len(said['nvshare'])} pairs of samples of about {SAMPLE:g} s with and without nvshare's functions: "
    note += f"{middle(said['nvshare'])}, which ends at the figure; both without: {middle(said['control'])}; "
    note += f"a step of 100 launches takes {1e3 * said['step']:.3f} ms"
    print(note)
    if arguments.json:
        figure = ("launch-bound-slowdown", solo.interval(said["nvshare"])[1], "percent", note)
        figures.add(arguments.json, [figure], arguments.commit)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]))
    else:
        main()
