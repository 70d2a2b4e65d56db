#!/usr/bin/env python3
"""Measures the time until a program has the GPU, after a program under nvshare has checkpointed the
program that filled the GPU.

  foreign.py [--programs target/release] [--gib 16] [--rounds 10] [--json FILE] [--commit ID]

Two programs together need more memory than is free: a ballast leaves 1.5 times --gib. The first
program holds the GPU, always has work, and its turn does not end. The second program waits. A third
program, under nvshare, locks and checkpoints the first program, like the sleep mode of a server. The
figure, foreign-checkpoint-room, is the time from the end of this program until the second program has the
lock, which it gets when its memory has room. The script uses the slowest of --rounds.

Needs `cuda-program` and `nvshare-checkpoint` in --programs, and a driver of 570 or newer, but not
PyTorch. As root, run it as another user with `setpriv`: the scheduler drops all capabilities, and then
cannot examine programs of root.
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import figures
import stage

SETTINGS = 'time-quantum = 3600\nanti-thrash = "on"\nsleep-after = "never"\n'
PATIENCE = 60


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ballast", type=int, default=1, help="0: the GPU has this little memory by itself")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    programs = options.programs.resolve()
    held = stage.ballast(1.5 * options.gib) if options.ballast else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as directory, held:
        times = [measure(programs, Path(directory), options.gib) for _ in range(options.rounds)]
    print(json.dumps({"seconds": [round(seconds, 4) for seconds in times]}), flush=True)
    if options.json:
        note = f"slowest of {options.rounds}; {options.gib:g} GiB each, 1.5 times as much is free; median {sorted(times)[len(times) // 2]:.3f} s"
        figures.add(options.json, [("foreign-checkpoint-room", max(times), "s", note)], options.commit)


def measure(programs, directory, gib):
    """Returns the seconds of one round."""
    (directory / "record.jsonl").unlink(missing_ok=True)
    scheduler = stage.scheduler(programs, directory, SETTINGS)
    environment = os.environ | stage.under_nvshare(programs, directory)

    def start(*words):
        command = [programs / "cuda-program", *map(str, words)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, preexec_fn=stage.end_with_parent)

    def wait(pid, what):
        """Returns the time, by the monotonic clock, of the program's first such move."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            moves = stage.events(directory / "record.jsonl") if (directory / "record.jsonl").exists() else []
            found = next((move["ms"] / 1e3 for move in moves if move["pid"] == pid and move["what"] == what), None)
            if found is not None:
                return found
            time.sleep(0.02)
        raise SystemExit(f"process {pid}: no {what} within {PATIENCE} s")

    words = ("mix", "--mem", int(gib * 2**30), "--chunks", 4, "--reps", 3, "--rounds", "endless")
    children = [start(*words)]
    try:
        wait(children[0].pid, "grant")
        children.append(start(*words))
        wait(children[1].pid, "request")
        tool = start("checkpoints", "--pid", children[0].pid, "--to", "asleep")
        if tool.wait(PATIENCE):
            raise SystemExit("the checkpoint failed")
        ended = time.monotonic()
        return max(0.0, wait(children[1].pid, "grant") - ended)
    finally:
        stage.end(*children, scheduler)


if __name__ == "__main__":
    main()
