#!/usr/bin/env python3
"""Checks PyTorch's allocator under `memory-max`.

  limits.py [--programs target/release] [--limit 20]

Prints the memory that the program sees, and the memory that it gets until an allocation fails, in
tensors of 256 MiB and then of 10 MiB. Then halves the limit, and raises it to twice --limit (GiB).
After each change, prints the memory that the program sees, and whether it gets 256 MiB more. Checks
the contents of all tensors each time. Needs a GPU and PyTorch, and root to start programs with
another group.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stage

GIB, MIB = 2**30, 2**20
GROUP = 61001


def told():
    import torch

    free, total = torch.cuda.mem_get_info()
    said = {"free": free, "total": total, "properties": torch.cuda.get_device_properties(0).total_memory}
    try:
        import pynvml

        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
        said |= {"nvml-total": memory.total, "nvml-free": memory.free, "nvml-used": memory.used}
    except Exception as e:  # programs without NVML run, too
        said["nvml"] = str(e)
    return {name: round(value / GIB, 3) if isinstance(value, int) else value for name, value in said.items()}


def fill(step):
    """Allocates tensors of this size until an allocation fails."""
    import torch

    held = []
    while True:
        try:
            held.append(torch.full((step // 4,), len(held), dtype=torch.int32, device="cuda"))
        except torch.OutOfMemoryError as e:
            return held, str(e).splitlines()[0]


def is_whole(held):
    # The check runs on the host, because the GPU may lack memory for it.
    return all(bool((tensor.cpu() == i).all()) for i, tensor in enumerate(held))


def child(directory):
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print(json.dumps({"told": told()}), flush=True)
    for step in (256 * MIB, 10 * MIB):
        begun = time.time()
        held, why = fill(step)
        said = {"step": step // MIB, "got": len(held) * step / GIB, "seconds": round(time.time() - begun, 2), "told": told()}
        said |= {"whole": is_whole(held), "why": why[:200]}
        print(json.dumps(said), flush=True)
        if step == 256 * MIB:
            del held
            torch.cuda.empty_cache()
    for name in ("lowered", "raised"):
        (directory / f"wants-{name}").touch()
        while not (directory / name).exists():
            time.sleep(0.05)
        time.sleep(1)
        try:
            more = torch.zeros(64 * MIB, dtype=torch.int32, device="cuda")
            outcome = "given"
            del more
            torch.cuda.empty_cache()
        except torch.OutOfMemoryError:
            outcome = "refused"
        print(json.dumps({"then": name, "256 MiB more": outcome, "whole": is_whole(held), "told": told()}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--limit", type=float, default=20)
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        directory.chmod(0o777)

        def rule(gib):
            return f'[[rule]]\ngroup = {GROUP}\nmemory-max = "{int(gib * 1024)}M"\n'

        daemon = stage.scheduler(programs, directory, rule(arguments.limit))
        words = [sys.executable, __file__, "--child", str(directory)]
        environment = os.environ | stage.under_nvshare(programs, directory)
        begun = subprocess.Popen(words, env=environment, group=GROUP)
        for name, gib in (("lowered", arguments.limit / 2), ("raised", arguments.limit * 2)):
            while not (directory / f"wants-{name}").exists() and begun.poll() is None:
                time.sleep(0.05)
            (directory / "nvshare.toml").write_text(rule(gib))
            daemon.send_signal(1)
            time.sleep(1)
            print(subprocess.run([programs / "nvsharectl", "--control", directory / "control.sock", "status"], capture_output=True, text=True).stdout)
            (directory / name).touch()
        status = begun.wait()
        daemon.terminate()
        daemon.wait()
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]))
    else:
        main()
