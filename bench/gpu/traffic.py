#!/usr/bin/env python3
"""Records what moves between a GPU and the host, for `tests/traces`: what NVML and the driver's counters of page faults say each
second, while a program whose managed memory is used by the GPU and the processors in turn has its pages go there and back, and
while two programs with engine `swap` take turns. It asks for no more managed memory than is free.

  traffic.py CASE FILE [--programs target/release] [--memory 24] [--seconds 30]

CASE: `pages` (managed memory, needs CuPy) or `swap` (needs PyTorch; another program's memory leaves room for one of the two).
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import stage

GIB = 2**30


def pages(gib, seconds):
    """A child: the GPU writes to all of it, then the processors, and so on."""
    import cupy
    import numpy

    memory = cupy.cuda.malloc_managed(int(gib * GIB))
    count = int(gib * GIB) // 8
    on_gpu = cupy.ndarray((count,), dtype=cupy.int64, memptr=memory)
    in_host = numpy.ctypeslib.as_array((ctypes.c_int64 * count).from_address(memory.ptr))
    on_gpu[:] = 0
    cupy.cuda.Stream.null.synchronize()
    end, rounds, part = time.time() + seconds, 0, count // 16
    while time.time() < end:
        for i in range(16):
            on_gpu[i * part : (i + 1) * part] += 1
            cupy.cuda.Stream.null.synchronize()
            in_host[i * part : (i + 1) * part : 512] += 0  # one word of each page
        rounds += 1
    print("rounds", rounds, "right", bool((on_gpu == rounds).all()), flush=True)


def keeps(gib, seconds, ready, go):
    import torch

    x = torch.zeros(int(gib * GIB) // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    stage.wait_to_begin(ready, go)
    end, rounds = time.time() + seconds, 0
    while time.time() < end:
        x.add_(1)
        torch.cuda.synchronize()
        rounds += 1
    print("rounds", rounds, "right", bool((x == rounds).all()), flush=True)


def leave(gib):
    import torch

    torch.cuda.init()
    held = torch.zeros(int(torch.cuda.mem_get_info()[0] - gib * GIB), dtype=torch.uint8, device="cuda")
    print("ready", flush=True)
    sys.stdin.read()
    del held


class Meter(threading.Thread):
    """Writes a line each second."""

    def __init__(self, demand, capacity, ordered):
        import pynvml

        super().__init__(daemon=True)
        pynvml.nvmlInit()
        self.nvml, self.gpu, self.lines = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0), []
        self.rest = f"{int(demand)},{int(capacity)}" + (",1" if ordered else "")
        self.ended = threading.Event()
        self.faults = None

    def count_faults(self):
        for path in Path("/proc/driver/nvidia-uvm/gpus").glob("*/fault_stats"):
            for line in path.read_text().splitlines():
                if line.startswith("replayable_faults"):
                    return int(line.split()[1])
        return None

    def run(self):
        began = time.time()
        before = self.count_faults()
        while not self.ended.wait(1):
            at = time.time() - began
            to_gpu = self.nvml.nvmlDeviceGetPcieThroughput(self.gpu, self.nvml.NVML_PCIE_UTIL_RX_BYTES) * 1000
            from_gpu = self.nvml.nvmlDeviceGetPcieThroughput(self.gpu, self.nvml.NVML_PCIE_UTIL_TX_BYTES) * 1000
            counted = self.count_faults()
            faults = "" if counted is None or before is None else counted - before
            before = counted
            self.lines.append(f"{at:.1f},{to_gpu},{from_gpu},{faults},{self.rest}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["pages", "swap"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--memory", type=float, default=24)
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    programs, capacity = arguments.programs.resolve(), arguments.memory * 1.4 * GIB
    meter = Meter(2 * arguments.memory * GIB, capacity, arguments.case == "swap")
    words = [sys.executable, __file__, "--child"]
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        if arguments.case == "pages":
            child = subprocess.Popen([*words, "pages", str(arguments.memory), str(arguments.seconds)])
            meter.start()
            child.wait()
        else:
            ballast = subprocess.Popen([*words, "leave", str(arguments.memory * 1.4)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ballast.stdout.readline()
            daemon = stage.scheduler(programs, directory, 'anti-thrash = "on"\ntime-quantum = 4\n')
            command = [*words, "keeps", str(arguments.memory), str(arguments.seconds)]
            children = stage.begin([command, command], stage.under_nvshare(programs, directory), directory)
            meter.start()
            for child in children:
                print(child.communicate()[0].decode(), flush=True)
            for child in (daemon, ballast):
                child.terminate()
                child.wait()
        meter.ended.set()
        meter.join()
    columns = "seconds,to_gpu,from_gpu,faults,demand,capacity" + (",ordered" if arguments.case == "swap" else "")
    arguments.file.write_text("\n".join([columns, *meter.lines]) + "\n")
    name = meter.nvml.nvmlDeviceGetName(meter.gpu)
    print(f"{name}, driver {meter.nvml.nvmlSystemGetDriverVersion()}", os.uname().release)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        kind, rest = sys.argv[2], sys.argv[3:]
        if kind == "pages":
            pages(float(rest[0]), float(rest[1]))
        elif kind == "keeps":
            keeps(float(rest[0]), float(rest[1]), Path(rest[2]), Path(rest[3]))
        else:
            leave(float(rest[0]))
    else:
        main()
