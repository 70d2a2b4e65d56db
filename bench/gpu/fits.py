#!/usr/bin/env python3
"""Measures programs that share a GPU on which their memory fits together, with default settings.

  fits.py [--programs target/release] [--json FILE] [--commit ID]

  pair-mix-0.5-fits, pair-mix-0.9-fits
           two programs of 7.2 GiB, which take 10 s alone and compute for 50 or 90 % of each second:
           seconds until both are done
  bursts-beside-mix-0.9-p99
           a program of 2 GiB with a short burst of work every 0.5 s, beside one that computes for
           90 % of each second: the 99th percentile of the seconds of a burst
  revoke-drain-matmul-p99
           a loop of large matrix products in turns with the same bursts: the 99th percentile of the
           seconds from a revoke until the loop releases the lock, from the scheduler's record

Every program checks its results. Needs a GPU with 40 GiB of free memory, and PyTorch.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

WORK = 10  # seconds that a mix takes alone
BURSTS = 40
MATRIX = 8192


def tensor(gib):
    import torch

    return torch.zeros(int(gib * 2**30) // 4, dtype=torch.int32, device="cuda")


def passes(memory, number):
    import torch

    for _ in range(number):
        memory.add_(1)
    torch.cuda.synchronize()


def calibrate(gib, share):
    """Returns the number of passes over the memory that take `share` seconds."""
    memory = tensor(gib)
    passes(memory, 20)
    begin = time.perf_counter()
    passes(memory, 20)
    yield
    return {"passes": max(1, round(share * 20 / (time.perf_counter() - begin)))}


def mix(gib, share, number, seconds):
    memory = tensor(gib)
    passes(memory, 1)
    yield
    for _ in range(int(seconds)):
        passes(memory, int(number))
        end = time.perf_counter() + 1 - share
        while time.perf_counter() < end:
            sum(range(2000))
    return {"right": bool((memory == 1 + int(number) * int(seconds)).all())}


def bursts(gib, number):
    memory = tensor(gib)
    passes(memory, 1)
    yield
    took = []
    for _ in range(int(number)):
        time.sleep(0.5)
        begin = time.perf_counter()
        passes(memory, 1)
        took.append(time.perf_counter() - begin)
    return {"right": bool((memory == 1 + int(number)).all()), "took": took}


def matmul(seconds):
    import torch

    identity = torch.eye(MATRIX, device="cuda", dtype=torch.bfloat16)
    matrix = torch.rand(MATRIX, MATRIX, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(matrix)
    torch.matmul(matrix, identity, out=out)
    torch.cuda.synchronize()
    yield
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.matmul(matrix, identity, out=out)
    return {"right": torch.equal(out, matrix)}


def child(kind, *words):
    *numbers, ready, go = words
    stage.end_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error
    steps = {"calibrate": calibrate, "mix": mix, "bursts": bursts, "matmul": matmul}[kind](*map(float, numbers))
    next(steps)
    stage.wait_to_begin(Path(ready), Path(go))
    began = time.time()
    try:
        next(steps)
    except StopIteration as end:
        print(json.dumps({"pid": os.getpid(), "began": began, "ended": time.time()} | end.value), file=out, flush=True)


class Run:
    def __init__(self, programs, directory):
        self.programs, self.directory = programs, directory

    def programs_of(self, commands, environment):
        words = [[sys.executable, __file__, "--child", *command] for command in commands]
        children = stage.begin(words, environment, self.directory)
        return [json.loads(child.communicate()[0]) for child in children]

    def share(self, commands, settings=""):
        """Runs the programs under nvshare. Returns their outputs."""
        scheduler = stage.scheduler(self.programs, self.directory, settings)
        try:
            time.sleep(1.5)  # until the scheduler has measured the GPU memory of other processes
            said = self.programs_of(commands, stage.under_nvshare(self.programs, self.directory))
        finally:
            stage.end(scheduler)
        if not all(one["right"] for one in said):
            raise SystemExit(f"a result is wrong: {said}")
        return said

    def fits(self, share):
        number = self.programs_of([("calibrate", 7.2, share)], {})[0]["passes"]
        words = ("mix", 7.2, share, number)
        alone = self.programs_of([(*words, WORK)], {})[0]
        said = self.share([(*words, WORK)] * 2)
        seconds = max(one["ended"] for one in said) - min(one["began"] for one in said)
        note = f"until both are done; one alone {alone['ended'] - alone['began']:.1f} s"
        yield f"pair-mix-{share}-fits", seconds, "s", note
        if share == 0.9:
            took = self.share([("bursts", 2, BURSTS), (*words, BURSTS)])[0]["took"]
            note = f"{len(took)} bursts; median {figures.percentile(took, 0.5):.3f}"
            yield "bursts-beside-mix-0.9-p99", figures.percentile(took, 0.99), "s", note

    def drain(self):
        said = self.share([("matmul", 30), ("bursts", 2, BURSTS)], 'time-quantum = 1\nanti-thrash = "on"\n')
        revoked, took = None, []
        for event in stage.events(self.directory / "record.jsonl"):
            if event["pid"] == said[0]["pid"]:
                if event["what"] == "revoke":
                    revoked = event["ms"]
                elif event["what"] == "release" and revoked is not None:
                    took.append((event["ms"] - revoked) / 1e3)
                    revoked = None
        note = f"{len(took)} revokes of a loop of {MATRIX}×{MATRIX} bf16 matrix products; median {figures.percentile(took, 0.5):.3f}"
        yield "revoke-drain-matmul-p99", figures.percentile(took, 0.99), "s", note


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=lambda path: Path(path).resolve(), default=Path("target/release").resolve())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    print(json.dumps({"files": figures.measured_files(arguments.programs), "hardware": figures.hardware()}), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        run = Run(arguments.programs, Path(directory))
        for measure in (lambda: run.fits(0.5), lambda: run.fits(0.9), run.drain):
            for figure in measure():
                print(json.dumps(figure, ensure_ascii=False), flush=True)
                if arguments.json:
                    figures.add(arguments.json, [figure], arguments.commit)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
