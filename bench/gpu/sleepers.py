#!/usr/bin/env python3
"""Checks that programs on a real GPU survive being taken off it and put back, and that killing them afterwards does no harm.

  sleepers.py [--programs target/release] [--kills 300] [--crowd 8] [--memory 400M] [--limit 200] [--seed 1]

Each program of a crowd, which constantly calls the driver, is paused until none of it is on the GPU, and resumed. Then it is killed at a
random moment: three in four after they are back, the others possibly during the wake. Another program replaces it. With several GPUs, half
of the sleeping programs change GPUs before they are resumed, and half of the others change GPUs instead of sleeping. At the end a witness
checks its results. Some drivers have hung hosts after such kills (NVIDIA/cuda-checkpoint#53): run this only on an expendable host.

Prints a line of JSON: the kills, the number of programs that changed GPUs, seconds to sleep, to wake and to change GPUs (median and
slowest), errors, and MiB in use before and after. The exit status is 1 if there was an error. `cuda-program` and `nvshare-checkpoint` must
be among --programs. Needs a GPU, and as root `setpriv`: the scheduler drops all capabilities, and then can only take programs of users
other than root off the GPU.
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
# Timeouts in seconds for a program to start, sleep and wake, and for the memory of killed programs
# to be free.
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
        """Seconds since the last step began."""
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
            """Migrates the program to another GPU."""
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
                    wrong.append(f"one that {program.state} has ended with {program.child.returncode}")
                elif time.monotonic() - program.since > PATIENCE:
                    wrong.append(f"one that {program.state} is {client['sleep']}: {client.get('sleep-obstacle')}")
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
                        wrong.append(f"one could not change GPUs: {program.move.stderr.read().strip()}")
                    moved.append(program.takes())
                    program.goes_on("is back")
                    program.kill_at = time.monotonic() + dice.uniform(0, 0.3)
                elif program.state == "falls asleep" and client["sleep"] == "sleeping":
                    slept.append(program.takes())
                    if several and dice.random() < 0.5:
                        move(program, client, status["gpus"])
                        if program.move.wait(timeout=30):
                            wrong.append(f"one that sleeps could not change GPUs: {program.move.stderr.read().strip()}")
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
            wrong.append("killed programs are not gone")
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
        wrong.append("memory is missing")

    def times(seconds):
        return {"median": round(statistics.median(seconds), 3), "slowest": round(max(seconds), 3)} if seconds else None

    result = {"kills": kills, "seconds": round(took, 1), "slept": times(slept), "woke": times(woke)}
    result |= {"moves": len(moved), "moves asleep": asleep_moved, "moved": times(moved)}
    print(json.dumps(result | {"wrong": wrong, "in_use_before": before, "in_use_after": after}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
