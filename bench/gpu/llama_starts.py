#!/usr/bin/env python3
"""Measures how long llama-servers that are started one after the other take until each has answered.

  llama_starts.py --llama-server FILE [--programs target/release] [--modes native,nvshare]
                  [--servers 10] [--weights 7] [--free 17] [--questions 1] [--out DIRECTORY]

Each of --servers servers has --weights GiB of random weights; with its context and its cache it needs
about a GiB more. A ballast process leaves --free GiB of the GPU free. Each server is started when the
one before it has answered a question, with 16 tokens, greedily.

The modes are:
  native   each server is ended when it has answered, because the next one would not fit beside it
  nvshare  all servers stay. At the end, each is asked --questions questions more, in turn

Prints a JSON line for each mode: the seconds from a server's start to its answer (natively, to its end),
for each server, and their sum; the seconds of each later answer; the number of answers that differ from
the first mode's. The exit status is 1 if one differs. Needs a GPU, but not PyTorch. --out has all logs.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
from pathlib import Path

import llama_swap
import llama_weights
import stage
from hibernate_stage import port


def start(options, weights, name, environment):
    """Starts a server. Returns its address and its process."""
    number = port()
    with open(options.out / f"{name}.log", "w") as log:
        child = subprocess.Popen(
            llama_weights.server(options.llama_server, weights, number),
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            preexec_fn=stage.end_with_parent,
        )
    return f"http://127.0.0.1:{number}", child


def first_answer(address, child):
    """Asks until the server answers: it refuses questions while it loads its weights."""
    until = time.monotonic() + llama_swap.START
    while time.monotonic() < until and child.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            return llama_swap.ask(address, "any", 0)[0]["text"]
        time.sleep(0.05)
    raise SystemExit("a server does not answer: see its log")


def run(options, weights, mode, environment):
    """Returns the seconds until each server has answered, its answers, and the seconds of later answers."""
    seconds, answers, later, running = [], [], [], []
    try:
        for number in range(options.servers):
            begun = time.monotonic()
            address, child = start(options, weights, f"{mode}-{number}", environment)
            running.append((address, child))
            answers.append(first_answer(address, child))
            if mode == "native":
                stage.end(running.pop()[1])
            seconds.append(time.monotonic() - begun)
        for question in range(options.questions if mode == "nvshare" else 0):
            for address, _ in running:
                answer, took = llama_swap.ask(address, "any", 0)
                answers.append(answer["text"])
                later.append(took)
    finally:
        stage.end(*(child for _, child in running))
    return seconds, answers, later


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    absolute = lambda text: Path(text).resolve()
    parser.add_argument("--llama-server", type=absolute, required=True)
    parser.add_argument("--programs", type=absolute, default=absolute("target/release"))
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["native", "nvshare"])
    parser.add_argument("--servers", type=int, default=10)
    parser.add_argument("--weights", type=int, default=7)
    parser.add_argument("--free", type=float, default=17)
    parser.add_argument("--questions", type=int, default=1)
    parser.add_argument("--out", type=absolute, default=absolute(tempfile.mkdtemp(prefix="llama-starts-")))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    weights = options.out / "weights.gguf"
    llama_weights.write(weights, options.weights)
    expected, wrong = None, 0
    rounded = lambda all: [round(each, 2) for each in all]
    with stage.ballast(options.free):
        for mode in options.modes:
            with contextlib.ExitStack() as stack:
                environment = {}
                if mode == "nvshare":
                    stack.callback(stage.end, stage.scheduler(options.programs, options.out, ""))
                    environment = stage.under_nvshare(options.programs, options.out)
                seconds, answers, later = run(options, weights, mode, environment)
            expected = expected or answers[0]
            different = sum(answer != expected for answer in answers)
            wrong += different
            row = {"mode": mode, "seconds": rounded(seconds), "sum": round(sum(seconds), 1), "later": rounded(later)}
            print(json.dumps(row | {"answers": len(answers), "wrong": different}), flush=True)
    os.unlink(weights)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
