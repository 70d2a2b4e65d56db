#!/usr/bin/env python3
"""Measures the cost of large numbers of calls, alternating between native and nvshare.

  queues.py [--programs target/release] [--cases queued-1000,queued-10000,cycles,aliases] [--runs 5]
            [--processor] [--json bench/results.json] [--commit ID]

queued    1,000 and 10,000 launches to each of 16 streams. The launches wait behind a kernel that
          runs until the host ends it. Natively, launches block once a certain number of them waits;
          the script first determines this depth, and keeps 5 % below it. Figure:
          queued-launches-over-native, the larger of the two ratios of the medians.
cycles    40,000 streams, each of which is created, used for a memset, synchronized and destroyed.
          Figure: stream-cycle-over-native, the ratio of the medians for the last eighth of them.
aliases   a chunk of 2 MiB that is mapped at 32,768 addresses. Figure: aliases-32768, the median
          under nvshare.

Needs a GPU and `cuda-program` in --programs, but neither PyTorch nor root. With `--processor`, the
script compares the processor time of the calls instead of the wall time. Use it with the simulated
driver, whose own threads do the GPU's work on the host's processors.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import figures
import stage

SETTINGS = 'time-quantum = 5\nanti-thrash = "auto"\n'
STREAMS = 16
# Timeout of a program in seconds. A program whose launches block behind its own kernel never ends.
PATIENCE = 4
# For each case: the arguments of cuda-program, and the keys of the wall time and of the processor
# time in its output.
CASES = {
    "queued-1000": (f"queued --streams {STREAMS} --each 1000 --held {{held}}", "queue_seconds", "launch_us"),
    "queued-10000": (f"queued --streams {STREAMS} --each 10000 --held {{held}}", "queue_seconds", "launch_us"),
    "cycles": ("cycles --streams 40000", "last_us", "last_us"),
    "aliases": ("aliases --count 32768", "map_seconds", "map_seconds"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    programs = options.programs.resolve()
    held = 0
    if any(name.startswith("queued") for name in options.cases):
        held = depth(programs) * 95 // 100
        print(json.dumps({"case": "depth", "launches of each stream that wait": held}), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        scheduler = stage.scheduler(programs, directory, SETTINGS)
        shared = stage.under_nvshare(programs, directory)
        medians = {}
        for name in options.cases:
            words, by_time, by_processor = CASES[name]
            what, samples = by_processor if options.processor else by_time, ([], [])
            for _ in range(options.runs):
                for environment, values in zip(({}, shared), samples):
                    command = [programs / "cuda-program", *words.format(held=held).split()]
                    said = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True).stdout
                    values.append(json.loads(said)[what])
            medians[name] = [statistics.median(values) for values in samples]
            print(json.dumps({"case": name, "measured": what, "native": samples[0], "nvshare": samples[1]}), flush=True)
        stage.end(scheduler)
    if options.json:
        figures.add(options.json, rows(medians, held, options), options.commit)


def depth(programs):
    """Returns the number of launches per stream, behind a running kernel, that natively do not
    block."""
    least, most = 0, 1024
    while most - least > 8:
        tried = (least + most) // 2
        words = ["queued", "--streams", STREAMS, "--each", tried, "--held", tried]
        try:
            subprocess.run([programs / "cuda-program", *map(str, words)], stdout=subprocess.DEVNULL, timeout=PATIENCE, check=True)
            least = tried
        except subprocess.TimeoutExpired:
            most = tried
    return least


def rows(medians, held, options):
    ratios = {name: shared / native for name, (native, shared) in medians.items()}
    unit = "processor time" if options.processor else "wall time"
    told = "; ".join(f"{name}: {native:.4g} natively, {shared:.4g} under nvshare" for name, (native, shared) in medians.items())
    note = f"medians of {options.runs} runs, {unit}{f', {held} launches of each stream wait' if held else ''}; {told}"
    said = []
    if {"queued-1000", "queued-10000"} <= set(ratios):
        said.append(("queued-launches-over-native", max(ratios["queued-1000"], ratios["queued-10000"]), "ratio", note))
    if "cycles" in ratios:
        said.append(("stream-cycle-over-native", ratios["cycles"], "ratio", note))
    if "aliases" in medians:
        said.append(("aliases-32768", medians["aliases"][1], "s", note))
    return said


if __name__ == "__main__":
    main()
