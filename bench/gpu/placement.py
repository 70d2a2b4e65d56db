#!/usr/bin/env python3
"""Runs eight programs that do not choose a GPU, on a host with several GPUs. Prints for each value
of `placement` the GPU of each program, and the time until all programs are done. With `none`, all
programs use the first GPU.

  placement.py [--programs target/release] [--placements none,spread,pack] [--count 8]
               [--memory 12] [--iterations 2500]

Programs are placed once when they call cuInit, and once by `nvsharectl run`. `--memory` is the GiB
that each program allocates, and that it requests with `nvsharectl run --memory`. Needs several GPUs
and PyTorch.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stage

GIB = 2**30


def work(gib, iterations):
    """Child process: allocates memory and computes. Returns its GPU and the numbers of GPUs that it
    sees."""
    counted = None
    try:
        import pynvml

        pynvml.nvmlInit()
        counted = pynvml.nvmlDeviceGetCount()
    except Exception as e:  # NVML is optional
        counted = str(e)
    import torch

    seen_before = torch.cuda.device_count()
    held = torch.full((int(gib * GIB) // 4,), 7, dtype=torch.int32, device="cuda")
    x = torch.eye(8192, device="cuda").to(torch.bfloat16)
    began = time.time()
    for _ in range(iterations):
        x = (x @ x).clamp_(0, 1)
        torch.cuda.synchronize()
    seconds = time.time() - began
    return {
        "uuid": str(torch.cuda.get_device_properties(0).uuid)[:8],
        "seen": [counted, seen_before, torch.cuda.device_count()],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "seconds": seconds,
        "right": bool((held == 7).all()) and float(x.diagonal().float().sum()) == 8192,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--placements", default="none,spread,pack")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--memory", type=float, default=12)
    parser.add_argument("--iterations", type=int, default=2500)
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    wrong = False
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        child = [sys.executable, __file__, "--child", str(arguments.memory), str(arguments.iterations)]
        for placement in arguments.placements.split(","):
            for by in ("cuInit", "nvsharectl run"):
                daemon = stage.scheduler(programs, directory, f'placement = "{placement}"\n')
                run = [str(programs / "nvsharectl"), "run", "--memory", f"{arguments.memory:g}G", "--"]
                environment = os.environ | stage.under_nvshare(programs, directory)
                if by != "cuInit":
                    del environment["LD_PRELOAD"]
                    environment["NVSHARE_LIBRARY"] = str(programs / "libnvshare.so")
                environment.pop("CUDA_VISIBLE_DEVICES", None)
                began = time.time()
                words = child if by == "cuInit" else run + child
                children = []
                for _ in range(arguments.count):
                    children.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment))
                    time.sleep(0.3)
                said = []
                for c in children:
                    output = c.communicate()[0].strip().splitlines()
                    said.append(json.loads(output[-1]) if c.returncode == 0 and output else {"uuid": "failed", "right": False})
                wrong |= not all(s["right"] for s in said)
                where = collections.Counter(s["uuid"] for s in said)
                places = ", ".join(f"{count} on {uuid}" for uuid, count in sorted(where.items()))
                print(f"{placement}, at {by}: {places}; {time.time() - began:.1f} s in all; {said[0]}", flush=True)
                daemon.terminate()
                daemon.wait()
    sys.exit("a result is wrong" if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(work(float(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
