#!/usr/bin/env python3
"""Measures two jobs of two ranks each, whose kernels wait for each other (NCCL all-reduce).

  gangs.py [--programs target/release] [--cases CASE,...] [--iterations 300] [--memory 4]
           [--patience 200] [--json FILE] [--commit ID]

The ranks of the jobs arrive in opposite order on two GPUs, beside an unrelated program on each GPU.
Without gangs, each job would get one GPU and wait forever for the other GPU. For each case, prints
the seconds until each program is done. `!` marks a result that differs from the result of a run
alone.

A case is `native` (without nvshare), or a mode with suffixes:

  on, auto    the value of `anti-thrash`
  -announced  the scheduler learns the gang, as from torchrun
  -unknown    the scheduler does not know the gang (`NVSHARE_GANG=0`)
  -unnamed    nothing names the gang but the id of NCCL's communicator
  -spawn      the same, and a launcher starts both ranks of a job with `torch.multiprocessing.spawn`,
              as vLLM does: both see both GPUs, and meet by TCP
  -scarce     another program occupies so much of both GPUs that not all memory fits

With `--json`, the figure is written to that file (see `../support/src/results.rs`) if the cases
include `native`, `on-announced` and `auto-announced`. `--commit` names the commit of programs that
were built elsewhere. Needs two GPUs and PyTorch.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

CASES = "native,on-announced,auto-announced,auto-announced-scarce,auto-unknown,on-unknown"
GIB = 2**30


def memory(gib):
    """Returns an allocation of this size, filled with a pattern."""
    import torch

    return torch.full((int(gib * GIB) // 4,), 3, dtype=torch.int32, device="cuda")


def verdict(held, result):
    """Returns the digest of a program's result, or "lost" if its held memory has changed."""
    intact = bool((held == 3).all())
    return {"digest": hashlib.sha256(result.float().cpu().numpy().tobytes()).hexdigest()[:16] if intact else "lost"}


def rank(number, port, iterations, gib):
    import torch
    import torch.distributed as dist

    torch.manual_seed(number)
    held = memory(gib)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    x = torch.rand(4096, 4096, device="cuda") / 4096
    total = torch.zeros(2**20, device="cuda")
    for i in range(iterations):
        for _ in range(4):
            x = (x @ x).clamp_(0, 1e-3) + 1e-4
        part = x.flatten()[: 2**20].clone()
        dist.all_reduce(part)
        total += part
        if i % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    said = verdict(held, total)
    dist.destroy_process_group()
    return said


def spawned(number, port, iterations, gib, directory):
    import torch

    torch.cuda.set_device(number)
    Path(directory, str(number)).write_text(rank(number, port, iterations, gib)["digest"])


def launcher(port, iterations, gib):
    """Starts both ranks of a job. Returns both digests in one word."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(spawned, (port, iterations, gib, directory), nprocs=2)
        return {"digest": " ".join(Path(directory, str(number)).read_text() for number in (0, 1))}


def single(iterations, gib):
    import torch

    held = memory(gib)
    x = torch.eye(4096, device="cuda")
    for i in range(iterations):
        for _ in range(4):
            x = (x @ x).clamp_(0, 1)
        if i % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return verdict(held, x)


def ballast(leave):
    import torch

    held = memory((torch.cuda.mem_get_info()[0] / GIB) - leave)
    print(json.dumps(len(held)), flush=True)
    sys.stdin.read()


def start(words, gpu, environment):
    words = list(map(str, [sys.executable, __file__, *words]))
    visible = {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | visible | environment)


def together(names, environment, says, arguments, port):
    """Starts the programs in this order. Returns for each program the seconds until it was done,
    and its result."""
    children = {}
    began = time.time()
    for name in names:
        job, gpu = name[0], name[1:]
        own = dict(environment)
        if job == "s":
            children[name] = start(["--child-single", arguments.iterations, arguments.memory], gpu, own)
        else:
            if "announced" in says:
                own |= {"TORCHELASTIC_RUN_ID": f"{job}-{port}", "WORLD_SIZE": "2"}
            elif "unknown" in says:
                own |= {"NVSHARE_GANG": "0"}
            role = ["--child-rank", gpu] if gpu else ["--child-launcher"]
            words = [*role, port + "ab".index(job), arguments.iterations, arguments.memory]
            children[name] = start(words, gpu or "0,1", own)
        time.sleep(1)
    said = {}
    while len(said) < len(children) and time.time() < began + arguments.patience:
        for name, child in children.items():
            if name not in said and child.poll() is not None:
                output = child.stdout.read().strip().splitlines()
                digest = json.loads(output[-1])["digest"] if child.returncode == 0 and output else f"exit {child.returncode}"
                said[name] = (time.time() - began, digest)
        time.sleep(0.05)
    for child in children.values():
        child.kill()
        child.wait()
    return {name: said.get(name, (None, "endless")) for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--memory", type=float, default=4, help="GiB that each program holds")
    parser.add_argument("--patience", type=float, default=200)
    parser.add_argument("--keep", type=Path, help="a directory for the schedulers' records")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    # Rank 0 of job a arrives first on GPU 0, and rank 1 of job b arrives first on GPU 1.
    order, spawning = ["a0", "b1", "s0", "s1", "b0", "a1"], ["a", "b", "s0", "s1"]
    right, wrong, port = {}, False, 29600
    jobs = {}  # for each case, the seconds until both jobs were done
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        alone = []
        for names in (["a0", "a1"], ["b0", "b1"], ["s0"], ["s1"]):
            port += 2
            for name, (seconds, digest) in together(names, {}, [], arguments, port).items():
                right[name] = digest
                alone.append(f"{name} {seconds or 0:.1f}")
        right |= {job: f"{right[f'{job}0']} {right[f'{job}1']}" for job in "ab"}
        print(f"alone (s): {', '.join(alone)}", flush=True)
        for case in arguments.cases.split(","):
            port += 2
            mode, *says = case.split("-")
            environment, daemon, taken = {}, None, []
            if "scarce" in says:
                leave = 2.5 * (arguments.memory + 1.5)
                taken = [start(["--child-ballast", leave], gpu, {}) for gpu in (0, 1)]
                for child in taken:
                    child.stdout.readline()
            if mode != "native":
                daemon = stage.scheduler(programs, directory, f'anti-thrash = "{mode}"\ntime-quantum = 5\n')
                environment = stage.under_nvshare(programs, directory)
            all_said = together(spawning if "spawn" in says else order, environment, says, arguments, port)
            for child in taken:
                child.kill()
                child.wait()
            if daemon:
                daemon.terminate()
                daemon.wait()
                if arguments.keep:
                    (directory / "record.jsonl").rename(arguments.keep / f"{case}.jsonl")
            ranks = [all_said[name][0] for name in all_said if name[0] in "ab"]
            jobs[case] = None if None in ranks else max(ranks)
            marks = []
            for name, (seconds, digest) in all_said.items():
                is_right = digest == right[name]
                wrong |= not is_right
                marks.append(f"{name} " + ("never" if seconds is None else f"{seconds:.1f}") + ("" if is_right else f"! {digest}"))
            print(f"{case}: {', '.join(marks)}", flush=True)
    native, turns, auto = (jobs.get(case) for case in ("native", "on-announced", "auto-announced"))
    if arguments.json and native and turns and auto:
        note = f"the later of two jobs of two ranks: {auto:.1f} s in auto, {native:.1f} s without nvshare, {turns:.1f} s in turns"
        figures.add(arguments.json, [("gang-auto-over-best", auto / min(native, turns), "ratio", note)], arguments.commit)
    sys.exit("a result marked with ! differs from the program's result alone" if wrong else 0)


if __name__ == "__main__":
    kind, rest = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] else ("", [])
    if kind == "--child-rank":
        print(json.dumps(rank(int(rest[0]), int(rest[1]), int(rest[2]), float(rest[3]))))
    elif kind == "--child-launcher":
        print(json.dumps(launcher(int(rest[0]), int(rest[1]), float(rest[2]))))
    elif kind == "--child-single":
        print(json.dumps(single(int(rest[0]), float(rest[1]))))
    elif kind == "--child-ballast":
        ballast(float(rest[0]))
    else:
        main()
