#!/usr/bin/env python3
"""Measures the shares of GPU time that rules set.

  shares.py [--programs target/release] [--rows 30+70,10+90] [--loops short,long] [--period 5]
            [--periods 10] [--latency] [--keep DIRECTORY] [--json FILE] [--commit ID]

In a row such as 30+70, two PyTorch loops of different groups always have work, in kernels of about
1 ms (short) or 200 ms (long). Rules guarantee the groups 30 and 70 % of the time (`time-min`).
Prints the share of each loop over --periods time periods, in percent of the loop's throughput
alone. With `--latency`, prints instead the durations of another program's short bursts of work,
alone and beside such a loop, for several rules.

  --programs  directory of nvshare-scheduler, libnvshare.so and, for --latency, cuda-program; all
              users must be able to read it
  --json      file to which the figure of the row 30+70 is written, see `../support/src/results.rs`
  --commit    commit of programs that were built elsewhere

Needs a GPU and PyTorch, and root to start programs with other groups.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

# For each loop: the rows of square matrices whose product takes about 1 ms or 200 ms on a large GPU
# of 2024, and the number of products per batch.
LOOPS = {"short": (8192, 32), "long": (43008, 1)}
# The groups need not exist in /etc/group.
GROUPS = [61001, 61002]


def run(name, seconds, ready, go):
    """Child process: prints the time at which each batch of its kernels was done."""
    import torch

    size, batch = LOOPS[name]
    x = torch.rand(size, size, device="cuda").to(torch.bfloat16)
    y = torch.empty_like(x)
    torch.matmul(x, x, out=y)
    torch.cuda.synchronize()
    stage.wait_to_begin(ready, go)
    done, ahead, end = [], [], time.time() + seconds
    while time.time() < end:
        for _ in range(batch):
            torch.matmul(x, x, out=y)
        mark = torch.cuda.Event()
        mark.record()
        ahead.append(mark)
        # Two batches are in flight at any time, so that the loop always has work.
        if len(ahead) > 2:
            ahead.pop(0).synchronize()
            done.append(time.time())
    torch.cuda.synchronize()
    print(json.dumps(done))


def loops(names, seconds, environment, directory):
    words = [[sys.executable, __file__, "--child", name, seconds] for name in names]
    children = stage.begin(words, environment, directory, GROUPS[: len(names)])
    return [json.loads(child.communicate()[0]) for child in children]


def percent(done, rate, since, until):
    return 100 * sum(since <= at < until for at in done) / (rate * (until - since))


def shares(arguments, programs, directory):
    errors = {}
    for name in arguments.loops.split(","):
        done = loops([name], 6, {}, directory)[0]
        late = [at for at in done if at > done[-1] - 4]
        rate = (len(late) - 1) / (late[-1] - late[0])
        print(f"{name}: a kernel takes {1000 / rate / LOOPS[name][1]:.2f} ms alone", flush=True)
        for row in arguments.rows.split(","):
            wanted = row.split("+")
            rules = [f'[[rule]]\ngroup = {group}\ntime-min = "{part}%"\n' for group, part in zip(GROUPS, wanted)]
            daemon = stage.scheduler(programs, directory, f'time-period = "{arguments.period}s"\n' + "".join(rules))
            seconds = arguments.period * (arguments.periods + 2)
            all_done = loops([name, name], seconds, stage.under_nvshare(programs, directory), directory)
            daemon.terminate()
            daemon.wait()
            if arguments.keep:
                (directory / "record.jsonl").rename(arguments.keep / f"{name}-{wanted[0]}.jsonl")
                (arguments.keep / f"{name}-{wanted[0]}.json").write_text(json.dumps(all_done))
            # Excludes the first period, in which the shares have not settled yet.
            since = max(done[0] for done in all_done) + arguments.period
            until = since + arguments.period * arguments.periods
            for done, part in zip(all_done, wanted):
                had = percent(done, rate, since, until)
                each = [since + i * arguments.period for i in range(arguments.periods)]
                windows = [percent(done, rate, at, at + arguments.period) for at in each]
                if row == "30+70":
                    errors[f"{name} {part}"] = abs(had - float(part))
                print(
                    f"{name} time-min {part} of {row}: {had:.1f} % (periods: {min(windows):.1f} to {max(windows):.1f})",
                    flush=True,
                )
    if arguments.json and errors:
        note = f"percent of the GPU over {arguments.periods} periods of {arguments.period} s, the worst of: "
        note += ", ".join(f"{case} off by {error:.1f}" for case, error in errors.items())
        figures.add(arguments.json, [("share-error-30-70", max(errors.values()), "percent", note)], arguments.commit)


def latency(arguments, programs, directory):
    bursts = [programs / "cuda-program", "bursts", "--mem", "256M", "--bursts", "50", "--pause-ms", "200"]
    rules = {"alone": None, "no rule": "", "priority 10": "priority = 10", "interactive": "interactive = true"}
    for loop in arguments.loops.split(","):
        for name, rule in rules.items():
            text = f"[[rule]]\ngroup = {GROUPS[1]}\n{rule}\n" if rule else ""
            daemon = stage.scheduler(programs, directory, text)
            environment = stage.under_nvshare(programs, directory)
            words = [sys.executable, __file__, "--child", loop, 60]
            begun = stage.begin([words], environment, directory, GROUPS[:1]) if rule is not None else []
            output = subprocess.run(
                list(map(str, bursts)), env=os.environ | environment, group=GROUPS[1], capture_output=True, check=True
            )
            said = json.loads(output.stdout)
            print(
                f"bursts beside {loop}, {name}: p50 {said['p50'] * 1e3:.1f} p99 {said['p99'] * 1e3:.1f} max {said['max'] * 1e3:.1f} ms",
                flush=True,
            )
            for child in begun:
                child.kill()
                child.wait()
            daemon.terminate()
            daemon.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--rows", default="30+70,10+90")
    parser.add_argument("--loops", default="short,long")
    parser.add_argument("--period", type=int, default=5)
    parser.add_argument("--periods", type=int, default=10)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--keep", type=Path, help="directory for the scheduler's records and the end times of the batches")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        directory.chmod(0o777)
        if arguments.latency:
            latency(arguments, programs, directory)
        else:
            shares(arguments, programs, directory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
