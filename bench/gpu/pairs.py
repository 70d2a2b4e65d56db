#!/usr/bin/env python3
"""Measures pairs of concurrent PyTorch loops on one GPU, whose memory fits together.

  pairs.py [--programs target/release] [--seconds 3] [--quantum 1]
           [--pairs add+add,tiny+tiny,add+tiny] [--runs 1] [--keep FILE] [--records DIRECTORY]
           [--measured FILE,…] [--json FILE] [--commit ID]

Each pair runs in three modes: without nvshare; in turns of the time quantum (`anti-thrash = on`);
and with `anti-thrash = auto`, which may run both loops at the same time. Prints the seconds until
both loops are done. `!` marks a result that differs from the result of a loop alone. All 15 pairs
take about eight minutes.

  --programs  directory of nvshare-scheduler and libnvshare.so
  --seconds   duration of a loop alone
  --keep      file to which all measurements are written
  --measured  files that --keep wrote, for example on several GPUs; computes the figure from them,
              and measures nothing
  --records   directory for the scheduler's record of each run
  --json      file to which the figure is written, see `../support/src/results.rs`
  --commit    commit of programs that were built elsewhere

Needs a GPU and PyTorch.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

LOOPS = ["add", "matmul", "conv", "tiny", "bursts"]
PAIRS = ["+".join(pair) for pair in itertools.combinations_with_replacement(LOOPS, 2)]


def loop(name):
    """Returns a function that runs one iteration, and the tensor with its result."""
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    if name == "add":  # memory-bound
        x = torch.zeros(2**28, device="cuda")
        return lambda: x.add_(1), x
    if name == "matmul":  # compute-bound
        x = torch.eye(4096, device="cuda", dtype=torch.bfloat16)
        y = torch.rand(4096, 4096, device="cuda").to(torch.bfloat16)
        return lambda: torch.matmul(y, x, out=y.clone()), y
    if name == "conv":  # many small kernels that are not launch-bound and do not fill the GPU
        net = torch.nn.Sequential(*[torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(8)]).cuda().requires_grad_(False)
        x = torch.rand(16, 32, 64, 64, device="cuda")
        return lambda: net(x), x
    if name == "tiny":  # launch-bound: the GPU is mostly idle
        x = torch.zeros(64, device="cuda")
        return lambda: x.add_(1), x
    if name == "bursts":  # about 30 ms of work, then a pause of 30 ms
        x = torch.eye(4096, device="cuda", dtype=torch.bfloat16)
        y = torch.rand(4096, 4096, device="cuda").to(torch.bfloat16)
        out = torch.empty_like(y)

        def burst():
            for _ in range(150):
                torch.matmul(y, x, out=out)
            torch.cuda.synchronize()
            time.sleep(0.03)

        return burst, out
    raise SystemExit(f"unknown loop {name!r}: the loops are {', '.join(LOOPS)}")


def at_once(name):
    """Returns the number of iterations between two checks of the clock. The number of all
    iterations is a multiple of it."""
    return 100 if name == "tiny" else 10


def run():
    """Child process: reads its task after it has imported PyTorch. Runs the loop `iterations` times
    once the file `go` exists. If `iterations` is 0, runs the loop for a second."""
    import torch

    name, iterations, ready, go = sys.stdin.readline().split()
    iterations, ready, go = int(iterations), Path(ready), Path(go)
    step, result = loop(name)
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    stage.wait_to_begin(ready, go)
    began, done = time.time(), 0
    while done < iterations or (not iterations and time.time() - began < 1):
        for _ in range(at_once(name)):
            step()
            done += 1
        if not iterations:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    digest = hashlib.sha256(result.float().cpu().numpy().tobytes()).hexdigest()[:16]
    print(json.dumps({"iterations": done, "began": began, "ended": time.time(), "digest": digest}))


class Children:
    """Processes that have imported PyTorch or are importing it. The next processes import PyTorch
    while others run."""

    def __init__(self):
        self.spare = []

    def take(self, number, environment):
        mine = [child for child in self.spare if child[0] == environment][:number]
        self.spare = [child for child in self.spare if child not in mine]
        mine += [self.start(environment) for _ in range(number - len(mine))]
        return [child for _, child in mine]

    def start(self, environment):
        words = [sys.executable, __file__, "--child"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        child = subprocess.Popen(words, env=os.environ | environment, preexec_fn=stage.end_with_parent, **pipes)
        return environment, child

    def prepare(self, number, environment):
        self.spare += [self.start(environment) for _ in range(number)]

    def end(self):
        stage.end(*(child for _, child in self.spare))


def together(children, jobs, environment, directory):
    """Runs the loops concurrently. Returns their outputs, and the seconds until all are done."""
    go = directory / "go"
    go.unlink(missing_ok=True)
    running = []
    for i, ((name, iterations), child) in enumerate(zip(jobs, children.take(len(jobs), environment))):
        ready = directory / f"ready-{i}"
        ready.unlink(missing_ok=True)
        child.stdin.write(f"{name} {iterations} {ready} {go}\n")
        child.stdin.flush()
        running.append((ready, child))
    while not all(ready.exists() for ready, _ in running):
        if any(child.poll() is not None for _, child in running):
            raise SystemExit("a loop ended during its start")
        time.sleep(0.01)
    go.touch()
    said = [json.loads(child.communicate()[0]) for _, child in running]
    seconds = max(s["ended"] for s in said) - min(s["began"] for s in said)
    return said, seconds


def measure(arguments):
    """Measures all pairs, and prints a line for each. Returns the seconds of each pair in each
    mode."""
    programs = arguments.programs.resolve()
    modes = {"native": None, "on": 'anti-thrash = "on"\n', "auto": 'anti-thrash = "auto"\n'}
    measured, children = [], Children()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        pairs = [pair.split("+") for pair in arguments.pairs.split(",")]
        alone = {}
        for name in sorted({name for pair in pairs for name in pair}):
            children.prepare(1, {})
            rate = together(children, [(name, 0)], {}, directory)[0][0]["iterations"]
            iterations = max(1, int(rate * arguments.seconds) // at_once(name)) * at_once(name)
            said, seconds = together(children, [(name, iterations)], {}, directory)
            alone[name] = (iterations, said[0]["digest"])
            print(f"{name} alone: {iterations} iterations in {seconds:.2f} s", flush=True)
        print(f"{'pair':>16}" + "".join(f"{mode:>9}" for mode in modes))
        under_nvshare = stage.under_nvshare(programs, directory)
        environments = [under_nvshare if settings else {} for settings in modes.values()]
        following = itertools.cycle(environments[1:] + environments[:1])
        for pair in pairs:
            line = f"{'+'.join(pair):>16}"
            for mode, settings in modes.items():
                taken, right = [], True
                following_mode = next(following)
                for number in range(arguments.runs):
                    environment, daemon = {}, None
                    if settings is not None:
                        daemon = stage.scheduler(programs, directory, f"time-quantum = {arguments.quantum}\n{settings}")
                        environment = under_nvshare
                    children.prepare(2, environment if number + 1 < arguments.runs else following_mode)
                    said, seconds = together(children, [(name, alone[name][0]) for name in pair], environment, directory)
                    right &= all(s["digest"] == alone[name][1] for s, name in zip(said, pair))
                    taken.append(seconds)
                    if daemon:
                        daemon.terminate()
                        daemon.wait()
                        if arguments.records:
                            arguments.records.mkdir(parents=True, exist_ok=True)
                            shutil.copy(directory / "record.jsonl", arguments.records / f"{'-'.join(pair)}-{mode}-{number}.jsonl")
                measured.append({"pair": "+".join(pair), "mode": mode, "seconds": taken, "right": right})
                line += f"{statistics.median(taken):>8.2f}{' ' if right else '!'}"
            print(line, flush=True)
    children.end()
    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--quantum", type=int, default=1)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--measured", type=lambda text: [Path(path) for path in text.split(",")], default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    measured = [case for path in arguments.measured for case in json.loads(path.read_text())] or measure(arguments)
    if arguments.keep:
        arguments.keep.write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.json:
        behind = {}
        for pair in {m["pair"] for m in measured}:
            seconds = {m["mode"]: statistics.median(m["seconds"]) for m in measured if m["pair"] == pair}
            behind[pair] = 100 * (seconds["auto"] / min(seconds["native"], seconds["on"]) - 1)
        note = f"the worst pair of loops of {arguments.seconds:g} s, median of {len(measured[0]['seconds'])}: "
        note += ", ".join(f"{pair} {percent:.1f}" for pair, percent in sorted(behind.items(), key=lambda item: -item[1]))
        figure = ("auto-against-best-of-native-and-turns", max(behind.values()), "percent", note)
        figures.add(arguments.json, [figure], arguments.commit)
    sys.exit(0 if all(m["right"] for m in measured) else "a result marked with ! is wrong")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run()
    else:
        main()
