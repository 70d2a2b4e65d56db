#!/usr/bin/env python3
"""Runs programs that together allocate more memory than the available GPU memory and RAM. The rest
of the memory is in swap files.

  tier.py --directory DIR [--programs target/release] [--free 20] [--number 6] [--mem 12G]
          [--used 0.9] [--steps 3] [--ram 8G] [--limit 500]

A ballast process holds all of the GPU except --free GiB. Each of --number programs sees a GPU with
--mem. Like JAX, it reserves three quarters of this memory in one allocation. It writes the fraction
--used of the allocation in --steps steps, and checks the contents at the end. --ram limits the host
memory of all programs together. --directory is the directory of the swap files; its disk needs room
for the memory of all programs.

Prints the numbers of programs that were refused memory, that failed, and that were not done after
--limit seconds. Also prints the peaks of memory in files and in host memory, the minimum of the
host's available memory, the seconds until all programs were done, and the disk's read and write
rates, from `dd` with O_DIRECT and blocks of 8 MiB. Needs a GPU, and `cuda-program` in --programs.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stage

GIB = 2**30
SUITES = Path(__file__).with_name("suites.py")  # contains the ballast
REFUSED = 3  # exit status of a program that was refused memory
DISK = 2 * GIB  # bytes that measure the disk's rates


def available():
    """Returns the host's available memory in bytes."""
    return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])


def disk(directory):
    """Measures the disk's write and read rates. Returns them in GiB/s."""
    file, rates = directory / "dd", []
    for words in (["if=/dev/zero", f"of={file}", "oflag=direct"], [f"if={file}", "of=/dev/null", "iflag=direct"]):
        begun = time.perf_counter()
        subprocess.run(["dd", *words, "bs=8M", f"count={DISK // 2**23}"], stderr=subprocess.DEVNULL, check=True)
        rates.append(round(DISK / GIB / (time.perf_counter() - begun), 2))
    file.unlink()
    return dict(zip(("write", "read"), rates))


def in_files(programs, directory):
    """Returns the bytes of all programs in files, and in host memory."""
    words = [programs / "nvsharectl", "--control", directory / "control.sock", "status", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    with contextlib.suppress(json.JSONDecodeError):
        gpus = [gpu for client in json.loads(done.stdout)["clients"] for gpu in client["gpus"]]
        files = sum(gpu["in-file"] or 0 for gpu in gpus)
        return files, sum(gpu["swapped"] for gpu in gpus) - files
    return 0, 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=lambda path: Path(path).resolve(), default=Path("target/release").resolve())
    parser.add_argument("--directory", type=lambda path: Path(path).resolve(), required=True)
    parser.add_argument("--free", type=float, default=20)
    parser.add_argument("--number", type=int, default=6)
    parser.add_argument("--mem", default="12G")
    parser.add_argument("--used", default="0.9")
    parser.add_argument("--steps", default="3")
    parser.add_argument("--ram", default="8G")
    parser.add_argument("--limit", type=float, default=500)
    arguments = parser.parse_args()
    programs = arguments.programs
    arguments.directory.mkdir(exist_ok=True)
    rates = disk(arguments.directory)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ballast = subprocess.Popen([sys.executable, SUITES, "--ballast", str(arguments.free)], preexec_fn=stage.end_with_parent, **pipes)
    print(ballast.stdout.readline().strip(), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        settings = f'time-quantum = 5\n[swap]\nmax = "{arguments.ram}"\nfile = "{arguments.directory}"\n'
        daemon = stage.scheduler(programs, directory, settings)
        environment = os.environ | stage.under_nvshare(programs, directory) | {"NVSHARE_MEMORY_MAX": arguments.mem}
        words = [programs / "cuda-program", "jax", "--used", arguments.used, "--steps", arguments.steps]
        begun, least, most, in_ram = time.monotonic(), available(), 0, 0
        children = [
            subprocess.Popen([*words, "--seed", str(seed)], env=environment, stdout=subprocess.DEVNULL, preexec_fn=stage.end_with_parent)
            for seed in range(arguments.number)
        ]
        while any(child.poll() is None for child in children) and time.monotonic() < begun + arguments.limit:
            files, ram = in_files(programs, directory)
            least, most, in_ram = min(least, available()), max(most, files), max(in_ram, ram)
            time.sleep(0.2)
        seconds = time.monotonic() - begun
        codes = [child.poll() for child in children]
        stage.end(*children, daemon, ballast)
    said = {
        "refused": codes.count(REFUSED),
        "failed": sum(code not in (0, None, REFUSED) for code in codes),
        "not done": codes.count(None),
        "seconds": round(seconds, 1),
        "most in files, GiB": round(most / GIB, 1),
        "most in host memory, GiB": round(in_ram / GIB, 1),
        "least available, GiB": round(least / GIB, 1),
        "disk, GiB/s": rates,
    }
    print(json.dumps(said), flush=True)
    sys.exit(0 if codes.count(0) == arguments.number else "not all programs succeeded")


if __name__ == "__main__":
    main()
