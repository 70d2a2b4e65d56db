#!/usr/bin/env python3
"""Measures the time to put an idle PyTorch program of 16 GiB to sleep and to wake it, and the GPU
memory that is free while eight notebooks sleep.

  sleep.py [--programs target/release] [--gib 16] [--rounds 10] [--wakes 100] [--seed 1]
           [--json FILE] [--commit ID]

A notebook is a PyTorch program that holds random numbers. A *cell* is a small kernel, followed by a
checksum of the notebook's memory, piece by piece.

First, one notebook is paused, --rounds times. Once neither the scheduler nor NVML shows any of its
memory on the GPU, it is resumed, and immediately runs a cell. The script also times copies of the
same number of bytes in each direction, between registered host memory and the GPU, without nvshare.

Then eight notebooks of 4 GiB are paused. A ballast of plain device memory leaves only 24 GiB, so
the notebooks do not fit on the GPU together. --wakes times, a random notebook is resumed, runs a
cell, and is paused again.

Prints lines of JSON. The exit status is 1 if a checksum is wrong or a notebook does not return.
Needs PyTorch, and `nvshare-checkpoint` in --programs. As root, the script also needs `setpriv`, and
runs everything as the user nobody: the scheduler drops all capabilities, and then cannot checkpoint
programs of root.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

SETTINGS = 'time-quantum = 30\nsleep-after = "never"\n'
GIB = 1 << 30
PATIENCE = 60
CROWD, EACH, LEAVE = 8, 4, 24


class Nvml:
    """The memory of the first GPU according to NVML."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self):
        self.library, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)):
            raise SystemExit("cannot initialize NVML")

    def memory(self):
        memory = self.Memory()
        if self.library.nvmlDeviceGetMemoryInfo(self.device, ctypes.byref(memory)):
            raise SystemExit("cannot query the GPU's memory with NVML")
        return memory


def notebook(gib):
    """Child process: holds this many GiB, and runs a cell for each input line."""
    import torch

    cells = [torch.randint(-(1 << 62), 1 << 62, (GIB // 8,), device="cuda") for _ in range(gib)]
    small = torch.ones(1024, device="cuda")
    for _ in iter(sys.stdin.readline, ""):
        begun = time.monotonic()
        one = small.sum().item()
        first = time.monotonic() - begun
        print(json.dumps({"first": first, "sum": sum(int(cell.sum()) for cell in cells) + int(one)}), flush=True)


def ballast(leave):
    """Child process: holds all of the GPU except this many GiB, in plain device memory."""
    driver, taken = stage.Driver(), []
    while driver.free() > leave * GIB:
        piece = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(piece), ctypes.c_size_t(min(GIB, driver.free() - leave * GIB)))
        taken.append(piece)
    print(json.dumps(driver.free()), flush=True)
    sys.stdin.read()


def copies(gib):
    """Child process: prints the seconds for copying this many GiB to the GPU, and to the host, in
    chunks of 32 MiB."""
    import torch

    host, chunk = torch.empty(GIB, dtype=torch.uint8).pin_memory(), 32 << 20
    there = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")

    def timed(way):
        torch.cuda.synchronize()
        begun = time.monotonic()
        for at in range(0, gib * GIB, chunk):
            here = host[at % GIB : at % GIB + chunk]
            way(there[at : at + chunk], here)
        torch.cuda.synchronize()
        return time.monotonic() - begun

    ways = (lambda gpu, cpu: gpu.copy_(cpu, non_blocking=True), lambda gpu, cpu: cpu.copy_(gpu, non_blocking=True))
    print(json.dumps([min(timed(way) for _ in range(3)) for way in ways]))


class Notebook:
    def __init__(self, gib, environment):
        words = [sys.executable, __file__, "--child-notebook", str(gib)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.child = subprocess.Popen(words, env=environment, preexec_fn=stage.end_with_parent, **pipes)
        self.sum, self.wrong = self.cell()["sum"], 0

    def cell(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline() or "{}")

    def is_right(self, cell):
        return cell.get("sum") == self.sum


def as_nobody(into):
    """Runs the script as the user nobody. This user cannot write the figures to `into`, so this
    process writes them. Returns the exit status."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        file = Path(directory) / "results.json"
        words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, *sys.argv]
        status = subprocess.call(words + (["--json", str(file)] if into else []))
        if into and file.exists():
            figures.put(into, json.loads(file.read_text()))
        return status


class Stage:
    """A scheduler, and commands to it."""

    def __init__(self, programs, directory, nvml):
        self.programs, self.directory, self.nvml = programs, directory, nvml
        self.daemon = stage.scheduler(programs, directory, SETTINGS)
        self.environment = os.environ | stage.under_nvshare(programs, directory)

    def control(self, *words):
        words = [self.programs / "nvsharectl", "--control", self.directory / "control.sock", *words]
        return subprocess.check_output(words, text=True, timeout=PATIENCE)

    def sleep(self, pid):
        clients = json.loads(self.control("--json", "status"))["clients"]
        return next(client for client in clients if client["pid"] == pid)

    def pause(self, one, least_used):
        """Pauses the program until it sleeps. Returns the seconds until NVML shows at most
        `least_used` bytes in use, and the bytes that are in use beyond `least_used`."""
        begun = time.monotonic()
        self.control("pause", str(one.child.pid))
        freed = None
        while time.monotonic() - begun < PATIENCE:
            if self.nvml.memory().used <= least_used + (16 << 20):
                freed = freed or time.monotonic() - begun
                if self.sleep(one.child.pid)["sleep"] == "sleeping":
                    return freed, self.nvml.memory().used - least_used
            elif time.monotonic() - begun > 5 and self.sleep(one.child.pid)["sleep"] == "sleeping":
                return time.monotonic() - begun, self.nvml.memory().used - least_used
            time.sleep(0.002)
        raise SystemExit(f"the program does not fall asleep: {self.sleep(one.child.pid)}")

    def wake(self, one):
        """Resumes the notebook, and runs a cell. Returns the seconds from the resume to the end of
        the first kernel, and the output of the cell."""
        begun = time.monotonic()
        self.control("resume", str(one.child.pid))
        told = time.monotonic() - begun
        cell = one.cell()
        return told + cell.get("first", PATIENCE), cell


def one_of(gib, rounds, stage_):
    before = stage_.nvml.memory().used
    one, wrong = Notebook(gib, stage_.environment), 0
    slept, woke, left = [], [], []
    for _ in range(rounds):
        time.sleep(0.5)
        seconds, bytes_left = stage_.pause(one, before)
        slept.append(seconds)
        left.append(bytes_left)
        seconds, cell = stage_.wake(one)
        woke.append(seconds)
        wrong += not one.is_right(cell)
    stage.end(one.child)
    return {"gib": gib, "slept": slept, "woke": woke, "left": [n >> 20 for n in left], "wrong": wrong}


def crowd(wakes, dice, stage_):
    words = [sys.executable, __file__, "--child-ballast", str(LEAVE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    taken = subprocess.Popen(words, preexec_fn=stage.end_with_parent, **pipes)
    there, before = json.loads(taken.stdout.readline()), stage_.nvml.memory().used
    all_of = [Notebook(EACH, stage_.environment) for _ in range(CROWD)]
    awake = stage_.nvml.memory().free
    for one in all_of:
        stage_.control("pause", str(one.child.pid))
    until = time.monotonic() + PATIENCE
    while any(stage_.sleep(one.child.pid)["sleep"] != "sleeping" for one in all_of):
        if time.monotonic() > until:
            raise SystemExit(f"not all notebooks sleep: {[stage_.sleep(one.child.pid) for one in all_of]}")
        time.sleep(0.05)
    free, woke, wrong = stage_.nvml.memory().free, [], 0
    for _ in range(wakes):
        one = dice.choice(all_of)
        seconds, cell = stage_.wake(one)
        woke.append(seconds)
        wrong += not one.is_right(cell)
        stage_.pause(one, before)
    stage.end(taken, *(one.child for one in all_of))
    return {"there": there, "free_awake": awake, "free": free, "woke": figures.summary(woke), "wrong": wrong}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--wakes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if os.geteuid() == 0:
        sys.exit(as_nobody(options.json))
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    words = [sys.executable, __file__, "--child-copies", str(options.gib)]
    to, back = json.loads(subprocess.check_output(words))
    nvml, rows = Nvml(), []
    with tempfile.TemporaryDirectory() as directory:
        stage_ = Stage(options.programs.resolve(), Path(directory), nvml)
        if options.rounds:
            one = one_of(options.gib, options.rounds, stage_)
            print(json.dumps(one | {"copies": {"to": to, "back": back}}), flush=True)
            note = f"{options.rounds} times, median; slowest {{:.2f}} s; the bytes alone take {{:.2f}} s on this link"
            name = f"{options.gib}GiB"
            slept, woke = one["slept"], one["woke"]
            rows.append((f"sleep-{name}", statistics.median(slept), "s", note.format(max(slept), back)))
            rows.append((f"wake-{name}", statistics.median(woke), "s", note.format(max(woke), to)))
            rows.append(("left-on-gpu-asleep", max(one["left"]), "MiB", f"the most of {options.rounds} times"))
        wrong = one["wrong"] if options.rounds else 0
        if options.wakes:
            many = crowd(options.wakes, random.Random(options.seed), stage_)
            print(json.dumps(many), flush=True)
            note = "{:.1f} GiB free while they are awake, {:.1f} before the first; {} wakes in random order, {} wrong"
            counts = (many["free_awake"] / GIB, many["there"] / GIB, options.wakes, many["wrong"])
            rows.append(("eight-notebooks-free", many["free"] / GIB, "GiB", note.format(*counts)))
            wrong += many["wrong"]
        stage_.daemon.terminate()
        stage_.daemon.wait()
    if options.json and not wrong:
        figures.add(options.json, rows, options.commit)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--child-"):
        {"notebook": notebook, "ballast": ballast, "copies": copies}[sys.argv[1].removeprefix("--child-")](int(sys.argv[2]))
    else:
        main()
