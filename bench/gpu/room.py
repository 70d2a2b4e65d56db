#!/usr/bin/env python3
"""Measures how nvshare makes room for programs that do not use nvshare: the time until requested
memory is free, and whether memory is free before a growing program needs it.

  room.py [--programs target/release] [--only rooms|growth] [--rounds 30] [--clients 2]
          [--grow 16] [--growths 3] [--json bench/results.json]

Clients under nvshare fill the GPU with data that must be copied when it is evicted. The clients
always have work, so one of them holds the lock at any moment.

rooms   Runs `nvsharectl make-room 8G` with a command, --rounds times. Measures the seconds from the
        start of nvsharectl until the command starts; the memory is free by then. Between two
        rounds, the memory of the clients returns. Figure: make-room-8GiB, the median.
growth  Starts a program without nvshare, --growths times. It allocates 64 MiB sixteen times a
        second, for --grow GiB in total. An allocation that fails is counted, and not repeated.
        Figure: stranger-growth-failures, the sum of failed allocations.

Prints JSON lines. Needs a GPU with room for --grow GiB, but neither PyTorch nor root.
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
import stage

MIB, GIB = 2**20, 2**30
CHUNK = 64 * MIB
RATE = GIB  # bytes per second
SPARED = 256 * MIB  # bytes of its share that a client does not allocate


def fill(size, ready, go):
    """Child process under nvshare: allocates this many bytes, and uses them until it is killed."""
    stage.end_with_parent()
    driver = stage.Driver()
    noise, at = os.urandom(CHUNK), []
    for n in range(size // CHUNK):
        pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(CHUNK))
        # All chunks differ and none is constant, because nvshare does not copy memory that it can
        # reproduce.
        driver.call("cuMemcpyHtoD_v2", pointer, noise, ctypes.c_size_t(CHUNK))
        driver.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(n % 251), ctypes.c_size_t(4096))
        at.append(pointer)
    stage.wait_to_begin(ready, go)
    turn = 0
    while True:
        turn += 1
        for pointer in at:
            driver.call("cuMemsetD8Async", pointer, ctypes.c_ubyte(turn % 251), ctypes.c_size_t(4096), None)
        driver.call("cuCtxSynchronize")


def grow(size):
    """Child process without nvshare: allocates memory at the rate RATE. Prints the number of failed
    allocations, and the largest delay of an allocation."""
    stage.end_with_parent()
    driver = stage.Driver()
    begun, failures, late, taken = time.perf_counter(), 0, 0.0, []
    for n in range(size // CHUNK):
        due = begun + n * CHUNK / RATE
        time.sleep(max(0.0, due - time.perf_counter()))
        late = max(late, time.perf_counter() - due)
        pointer = ctypes.c_uint64()
        if driver.library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(CHUNK)):
            failures += 1
        else:
            taken.append(pointer)
    print(json.dumps({"allocations": size // CHUNK, "failures": failures, "latest": round(late, 4)}))


def say(what):
    print(json.dumps(what), flush=True)


class Control:
    def __init__(self, programs, directory):
        self.words = [str(programs / "nvsharectl"), "--control", str(directory / "control.sock")]

    def status(self):
        """Returns the status of the first GPU. Waits until the scheduler knows the GPU."""
        while True:
            done = subprocess.run([*self.words, "--json", "status"], stdout=subprocess.PIPE, check=True)
            if gpus := json.loads(done.stdout)["gpus"]:
                return gpus[0]
            time.sleep(0.05)

    def until(self, what, patience=120):
        """Waits until the GPU satisfies the condition."""
        end = time.monotonic() + patience
        while not what(gpu := self.status()):
            if time.monotonic() > end:
                raise SystemExit(f"timed out while waiting for the GPU's memory: {gpu}")
            time.sleep(0.05)

    def make_room(self, size):
        """Returns the seconds until this much memory is free. Gives the room back immediately."""
        begun = time.perf_counter()
        with subprocess.Popen([*self.words, "make-room", size, "--", "echo", "free"], stdout=subprocess.PIPE) as child:
            said = child.stdout.readline()
            seconds = time.perf_counter() - begun
        if child.returncode or said != b"free\n":
            raise SystemExit(f"nvsharectl make-room ended with status {child.returncode}")
        return seconds


def measure_rooms(arguments, control, full):
    seconds = []
    for n in range(arguments.rounds):
        control.until(lambda gpu: gpu["kept"] == 0 and gpu["resident"] >= full)
        time.sleep(1)  # for some turns of the clients
        seconds.append(control.make_room("8G"))
        say({"kind": "room", "round": n, "seconds": round(seconds[-1], 4)})
    middle, slowest = statistics.median(seconds), figures.percentile(seconds, 0.99)
    say({"kind": "rooms", "median": round(middle, 4), "p99": round(slowest, 4), "n": len(seconds)})
    note = f"{arguments.clients} clients fill the GPU and one holds it; {len(seconds)} rooms, 99 % {slowest:.3f} s"
    note += f", from {min(seconds):.3f} to {max(seconds):.3f} s, nvsharectl's own start included"
    return [("make-room-8GiB", middle, "s", note)]


def measure_growth(arguments, control, full):
    failures = 0
    for n in range(arguments.growths):
        control.until(lambda gpu: gpu["kept"] == 0 and gpu["resident"] >= full)
        time.sleep(1)
        done = subprocess.run([sys.executable, __file__, "--child", "grow", str(arguments.grow * GIB)], stdout=subprocess.PIPE, check=True)
        said = json.loads(done.stdout)
        failures += said["failures"]
        say({"kind": "growth", "run": n} | said)
    note = f"{arguments.growths} times {arguments.grow} GiB in steps of 64 MiB, beside {arguments.clients} clients that fill the GPU"
    return [("stranger-growth-failures", failures, "count", note)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of the programs and libnvshare.so")
    parser.add_argument("--only", choices=["rooms", "growth"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--grow", type=int, default=16, help="GiB")
    parser.add_argument("--growths", type=int, default=3)
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit of the measured programs (default: the checked-out commit)")
    arguments = parser.parse_args()
    programs, said, children = arguments.programs.resolve(), [], []
    say({"kind": "measured", "files": figures.measured_files(programs), "hardware": figures.hardware()})
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        daemon = stage.scheduler(programs, directory, arguments.settings)
        try:
            control = Control(programs, directory)
            # Each program's share must also hold its context.
            size = (control.status()["capacity"] // arguments.clients - GIB - SPARED) // CHUNK * CHUNK
            words = [[sys.executable, __file__, "--child", "fill", size]] * arguments.clients
            children = stage.begin(words, stage.under_nvshare(programs, directory), directory)
            full = arguments.clients * size * 99 // 100
            for name, measure in (("rooms", measure_rooms), ("growth", measure_growth)):
                if arguments.only in (None, name):
                    said += measure(arguments, control, full)
        finally:
            stage.end(*children, daemon)
            say({"kind": "figures", "figures": [dict(zip(("name", "value", "unit", "note"), figure)) for figure in said]})
            if arguments.json and said:
                figures.add(arguments.json, said, arguments.commit)


if __name__ == "__main__":
    if sys.argv[1:3] == ["--child", "fill"]:
        fill(int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    elif sys.argv[1:3] == ["--child", "grow"]:
        grow(int(sys.argv[3]))
    else:
        main()
