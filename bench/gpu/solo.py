#!/usr/bin/env python3
"""Measures the slowdown under nvshare of a program that is alone on the GPU. Compares samples of
the same work natively and under nvshare.

  solo.py [--programs target/release] [--loads train,launches,decode] [--json FILE] [--commit ID]

  train     a small convolutional network with Adam
  launches  additions to 64 numbers, which are launch-bound
  decode    a Llama of 12.6 GiB that answers one request at a time

For each load, the script starts several groups of processes, one group after the other. A group has
one process under nvshare, one native process, and a second native process as the control. For
`decode`, there is no control, because the model is large. The processes of a group produce samples
in turn, in an order that rotates. The other processes are idle during a sample.

Samples of `launches` are short and numerous: the speed of processors changes from second to second,
but hardly between two successive samples. There are several groups, because processes also differ
in speed by the placement of their memory.

Prints the median of the ratios to the first native process, and its 95 % interval, for the process
under nvshare and for the control. The interval is determined by ranks, and therefore assumes
nothing about the distribution. The figures are the upper ends of the interval. With several groups,
the values are the medians of the processes, so that the interval includes the differences between
processes. Needs a GPU, PyTorch and, for `decode`, transformers.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import llama
import stage

# For each load: the figure, the samples of each process, the groups of processes, the seconds of a
# sample, and whether there is a control.
LOADS = {
    "train": ("solo-slowdown-train", 5, 6, 1, True),
    "launches": ("launch-bound-slowdown", 30, 8, 0.1, True),
    "decode": ("solo-slowdown-decode", 30, 1, 1, False),
}


def step_of(load):
    """Returns a function that does the smallest unit of work."""
    import torch

    torch.manual_seed(0)
    if load == "train":
        nn = torch.nn
        widths = [3, 64, 128, 256]
        layers = [part for a, b in zip(widths, widths[1:]) for part in (nn.Conv2d(a, b, 3, stride=2), nn.ReLU())]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)).cuda()
        optimizer = torch.optim.Adam(net.parameters())
        images, labels = torch.rand(256, 3, 128, 128, device="cuda"), torch.randint(0, 1000, (256,), device="cuda")

        def step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()

        return step
    if load == "launches":
        numbers = torch.zeros(64, device="cuda")

        def step():
            for _ in range(100):
                numbers.add_(1)

        return step
    model = llama.build()
    question = torch.randint(0, llama.VOCABULARY, (1, 64), device="cuda")

    @torch.inference_mode()
    def step():
        cache, token = None, question
        for _ in range(16):
            output = model(token, past_key_values=cache, use_cache=True)
            cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
            token.item()

    return step


def work(load):
    """Child process: for each input line, runs this number of steps, and prints the seconds."""
    stage.end_with_parent()
    import torch

    step = step_of(load)
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            step()
        torch.cuda.synchronize()
        print(time.perf_counter() - begin, flush=True)


class Worker:
    def __init__(self, load, environment):
        words = [sys.executable, __file__, "--work", load]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def ask(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a worker process ended")
        return float(answer)


def interval(values):
    """Returns the 95 % interval of the median. The binomial distribution determines the ranks of
    its ends."""
    ordered, n = sorted(values), len(values)
    below, outside = 0, 0.0
    while below < n // 2 and outside + math.comb(n, below) / 2**n <= 0.025:
        outside += math.comb(n, below) / 2**n
        below += 1
    below = max(below, 1)
    return ordered[below - 1], ordered[n - below]


def measure(load, environment):
    name, samples, groups, sample, has_control = LOADS[load]
    ratios, alone = {"nvshare": [], "control": []}, []
    for _ in range(groups):
        workers = {"native": Worker(load, {}), "nvshare": Worker(load, environment)}
        if has_control:
            workers["control"] = Worker(load, {})
        try:
            for worker in workers.values():
                worker.ask(3)
            steps = max(1, round(sample / (workers["native"].ask(3) / 3)))
            for worker in workers.values():
                worker.ask(steps)
            these = {other: [] for other in workers if other != "native"}
            order = list(workers)
            for _ in range(samples):
                order.append(order.pop(0))
                seconds = {which: workers[which].ask(steps) for which in order}
                for which, found in these.items():
                    found.append(100 * (seconds[which] / seconds["native"] - 1))
                alone.append(seconds["native"] / steps)
            for which, found in these.items():
                ratios[which] += [statistics.median(found)] if groups > 1 else found
        finally:
            stage.end(*(worker.process for worker in workers.values()))

    def said(values):
        low, high = interval(values)
        return f"median {statistics.median(values):.2f}, its 95 % interval {low:.2f} to {high:.2f}"

    note = f"{groups} groups of processes, {samples} samples of about {sample:g} s of each: {said(ratios['nvshare'])}, which ends at the figure; "
    if has_control:
        note += f"a second native process instead: {said(ratios['control'])}; "
    note += f"a step takes {1e3 * statistics.median(alone):.3f} ms natively"
    print(f"{load}: {note}", flush=True)
    return (name, interval(ratios["nvshare"])[1], "percent", note)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    print(json.dumps({"files": figures.measured_files(programs), "hardware": figures.hardware()}), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        daemon = stage.scheduler(programs, Path(directory), "")
        try:
            environment = stage.under_nvshare(programs, Path(directory))
            for load in arguments.loads.split(","):
                figure = measure(load, environment)
                if arguments.json:
                    figures.add(arguments.json, [figure], arguments.commit)
        finally:
            stage.end(daemon)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main()
