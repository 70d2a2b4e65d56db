#!/usr/bin/env python3
"""Checks that programs on a real GPU survive sleeping, and that killing them afterwards has no
effect on the host or on other programs.

  sleepers.py [--programs target/release] [--kills 300] [--crowd 8] [--memory 400M] [--limit 200]
              [--seed 1]

--crowd programs run at the same time, and constantly call the driver. Each program is paused until
it sleeps, and then resumed. Then it is killed at a random moment, and a new program replaces it.
Three in four programs are killed after they have woken, and the others possibly while they wake.
With several GPUs, half of the programs are migrated to another GPU instead of sleeping. Of the
programs that sleep, half are migrated to another GPU before they are resumed. At the end, a witness
runs and checks its results.

With some drivers, such kills have hung the host (NVIDIA/cuda-checkpoint#53). Run this script only
on an expendable host.

Prints a line of JSON: the numbers of kills and of migrated programs; the seconds to fall asleep, to
wake and to migrate (median and slowest); errors; and the MiB in use before and after. The exit
status is 1 if an error occurred.

Needs a GPU, and `cuda-program` and `nvshare-checkpoint` in --programs. As root, the script also
needs `setpriv`, and runs everything as the user nobody: the scheduler drops all capabilities, and
then cannot checkpoint programs of root.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stage

SETTINGS = 'time-quantum = 1\nsleep-after = "never"\n'
# Timeouts in seconds: for the whole life of a program, and until the memory of killed programs is
# free.
PATIENCE = 40
MEMORY_RETURNS = 5


def be_nobody():
    os.execvp("setpriv", ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, *sys.argv])


def in_use():
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.check_output(words, text=True).split()))


class Program:
    def __init__(self, start):
        self.child, self.state, self.since = start(), "starts", time.monotonic()
        self.kill_at, self.began, self.move = None, self.since, None

    def takes(self):
        """Returns the seconds since the program's current state began."""
        return time.monotonic() - self.began

    def goes_on(self, state):
        self.state, self.began = state, time.monotonic()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--crowd", type=int, default=8)
    parser.add_argument("--memory", default="400M")
    parser.add_argument("--limit", type=float, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if os.geteuid() == 0:
        be_nobody()
    programs, dice = options.programs.resolve(), random.Random(options.seed)
    before = in_use()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        daemon = stage.scheduler(programs, directory, SETTINGS)
        environment = os.environ | stage.under_nvshare(programs, directory)

        def start():
            words = [programs / "cuda-program", "naps", "--mem", options.memory, "--seconds", "600", "--pause-ms", "20"]
            quiet = subprocess.DEVNULL
            return subprocess.Popen(words, env=environment, stdout=quiet, stderr=quiet, preexec_fn=stage.end_with_parent)

        def control(*words):
            words = [programs / "nvsharectl", "--control", directory / "control.sock", *words]
            return subprocess.check_output(words, text=True, timeout=30)

        def move(program, client, gpus):
            """Starts the migration of the program to another GPU."""
            others = [gpu["uuid"] for gpu in gpus if gpu["uuid"] != client["gpus"][0]["uuid"]]
            words = [programs / "nvsharectl", "--control", directory / "control.sock", "migrate", str(program.child.pid)]
            program.move = subprocess.Popen([*words, "--to", dice.choice(others)], stderr=subprocess.PIPE, text=True)

        def kill(program):
            program.child.kill()
            program.child.wait()
            crowd.remove(program)

        crowd, kills, slept, woke, moved, wrong = [], {"back": 0, "on the way": 0}, [], [], [], []
        asleep_moved = 0
        begun = time.monotonic()
        while sum(kills.values()) < options.kills and time.monotonic() - begun < options.limit and not wrong:
            crowd += [Program(start) for _ in range(options.crowd - len(crowd))]
            status = json.loads(control("--json", "status"))
            known = {client["pid"]: client for client in status["clients"]}
            several = len(status["gpus"]) > 1
            for program in list(crowd):
                client = known.get(program.child.pid, {"sleep": None, "gpus": []})
                if program.child.poll() is not None:
                    wrong.append(f"a program that {program.state} ended with status {program.child.returncode}")
                elif time.monotonic() - program.since > PATIENCE:
                    wrong.append(f"timeout: a program that {program.state} is {client['sleep']}: {client.get('sleep-obstacle')}")
                elif program.state == "starts" and any(use["resident"] for use in client["gpus"]):
                    if several and dice.random() < 0.5:
                        move(program, client, status["gpus"])
                        program.goes_on("moves")
                        if dice.random() < 0.25:
                            program.kill_at = time.monotonic() + dice.uniform(0, 1)
                        continue
                    control("pause", str(program.child.pid))
                    program.goes_on("falls asleep")
                elif program.state == "moves" and program.kill_at and time.monotonic() > program.kill_at:
                    kill(program)
                    kills["on the way"] += 1
                elif program.state == "moves" and not program.kill_at and program.move.poll() is not None:
                    if program.move.returncode:
                        wrong.append(f"a program could not be migrated: {program.move.stderr.read().strip()}")
                    moved.append(program.takes())
                    program.goes_on("is back")
                    program.kill_at = time.monotonic() + dice.uniform(0, 0.3)
                elif program.state == "falls asleep" and client["sleep"] == "sleeping":
                    slept.append(program.takes())
                    if several and dice.random() < 0.5:
                        move(program, client, status["gpus"])
                        if program.move.wait(timeout=30):
                            wrong.append(f"a sleeping program could not be migrated: {program.move.stderr.read().strip()}")
                        asleep_moved += 1
                    control("resume", str(program.child.pid))
                    program.goes_on("wakes")
                    if dice.random() < 0.25:
                        program.kill_at = time.monotonic() + dice.uniform(0, 0.4)
                elif program.state == "wakes" and program.kill_at and time.monotonic() > program.kill_at:
                    kill(program)
                    kills["on the way"] += 1
                elif program.state == "wakes" and not program.kill_at and client["sleep"] == "awake":
                    woke.append(program.takes())
                    program.goes_on("is back")
                    program.kill_at = time.monotonic() + dice.uniform(0, 0.3)
                elif program.state == "is back" and time.monotonic() > program.kill_at:
                    kill(program)
                    kills["back"] += 1
        took = time.monotonic() - begun
        if stage.end(*(program.child for program in crowd)):
            wrong.append("killed programs did not end")
        words = [programs / "cuda-program", "mix", "--mem", "1G", "--chunks", "3", "--reps", "5", "--rounds", "5"]
        if subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, timeout=60).returncode:
            wrong.append("the witness has wrong results")
        daemon.terminate()
        daemon.wait()
    until = time.monotonic() + MEMORY_RETURNS
    while in_use() > before and time.monotonic() < until:
        time.sleep(0.1)
    after = in_use()
    if after > before:
        wrong.append("memory of killed programs is not free")

    def times(seconds):
        return {"median": round(statistics.median(seconds), 3), "slowest": round(max(seconds), 3)} if seconds else None

    result = {"kills": kills, "seconds": round(took, 1), "slept": times(slept), "woke": times(woke)}
    result |= {"moves": len(moved), "moves asleep": asleep_moved, "moved": times(moved)}
    print(json.dumps(result | {"wrong": wrong, "in_use_before": before, "in_use_after": after}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
