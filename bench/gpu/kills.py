#!/usr/bin/env python3
"""Checks that programs survive while other programs, and sometimes the scheduler, are killed at
random moments on a real GPU.

  kills.py [--programs target/release] [--kills 300] [--crowd 7] [--memory 600M] [--leave 7G]
           [--scheduler-every 40] [--limit 240]

--crowd programs with --memory each run at the same time. They do not fit on the GPU together,
because a ballast leaves only --leave of the GPU free. At random moments, the script kills a random
one of these programs, and starts a new one. Beside them, witnesses run to completion one after the
other, and check their results. After every --scheduler-every kills, the script also kills and
restarts the scheduler.

Prints a line of JSON: the numbers of kills and witnesses, errors of programs, and the GPU's free
memory before and after. The exit status is 1 if an error occurred. Needs a GPU, and `cuda-program`
in --programs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stage

GIB = 2**30
SETTINGS = "time-quantum = 1\n"
# With a short time quantum and long programs, most kills hit a program that waits or moves memory.
VICTIM = ["mix", "--chunks", "3", "--reps", "20", "--rounds", "400"]
WITNESS = ["mix", "--chunks", "3", "--reps", "20", "--rounds", "40"]
# Seconds until the memory of killed programs must be free.
MEMORY_RETURNS = 5
# Maximum growth in bytes of the driver's memory for this process until then.
OWN = 16 << 20


def gib(text):
    return float(text[:-1]) / {"G": 1, "M": 1024}[text[-1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--crowd", type=int, default=7)
    parser.add_argument("--memory", default="600M")
    parser.add_argument("--leave", default="7G")
    parser.add_argument("--scheduler-every", type=int, default=40)
    parser.add_argument("--limit", type=float, default=240)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    programs, dice = options.programs.resolve(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        driver = stage.Driver()
        room = int(gib(options.leave) * GIB)
        words = [programs / "cuda-program", "stranger", "--mem", str(driver.free() - room), "--seconds", "3600"]
        ballast = subprocess.Popen(words, stdout=subprocess.DEVNULL, preexec_fn=stage.end_with_parent)
        while driver.free() > room + GIB // 4:
            time.sleep(0.05)
        time.sleep(1)
        before = driver.free()
        environment = os.environ | stage.under_nvshare(programs, directory)

        def start(words):
            out = open(directory / f"out-{time.monotonic_ns()}", "w+")
            words = [programs / "cuda-program", *words, "--mem", options.memory]
            child = subprocess.Popen(words, env=environment, stdout=out, stderr=out, preexec_fn=stage.end_with_parent)
            return child, out

        def said(out):
            out.seek(0)
            return out.read()[-400:]

        daemon, begun, schedulers = stage.scheduler(programs, directory, SETTINGS), time.monotonic(), 0
        crowd, witness = [start(VICTIM) for _ in range(options.crowd)], start(WITNESS)
        kills, right, ended, wrong = 0, 0, 0, []
        while kills < options.kills and time.monotonic() - begun < options.limit and not wrong:
            time.sleep(dice.uniform(0, 0.3))
            if schedulers < kills // options.scheduler_every:
                daemon.kill()
                daemon.wait()
                daemon, schedulers = stage.scheduler(programs, directory, SETTINGS), schedulers + 1
            i = dice.randrange(options.crowd)
            child, out = crowd[i]
            if child.poll() is None:
                child.kill()
                child.wait()
                kills += 1
            elif child.returncode:
                wrong.append(said(out))
            else:
                ended += 1
            out.close()
            crowd[i] = start(VICTIM)
            if witness[0].poll() is not None:
                if witness[0].returncode:
                    wrong.append(said(witness[1]))
                right += not witness[0].returncode
                witness[1].close()
                witness = start(WITNESS)
        took = time.monotonic() - begun
        if stage.end(*(child for child, _ in crowd)):
            wrong.append("killed programs did not end")
        # The last witness finishes once the other programs have ended.
        try:
            if witness[0].wait(60):
                wrong.append(said(witness[1]))
            else:
                right += 1
        except subprocess.TimeoutExpired:
            wrong.append(f"the last witness did not end: {said(witness[1])}")
            stage.end(witness[0])
        daemon.terminate()
        daemon.wait()
        until = time.monotonic() + MEMORY_RETURNS
        while driver.free() + OWN < before and time.monotonic() < until:
            time.sleep(0.1)
        after = driver.free()
        if after + OWN < before:
            wrong.append("memory of killed programs is not free")
        result = {"kills": kills, "schedulers": schedulers, "seconds": round(took, 1), "witnesses": right, "ended": ended, "wrong": wrong}
        print(json.dumps(result | {"free_before": round(before / GIB, 3), "free_after": round(after / GIB, 3)}))
        stage.end(ballast)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
