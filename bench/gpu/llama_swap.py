#!/usr/bin/env python3
"""Measures llama-swap in front of two llama-servers that do not fit on the GPU together.

  llama_swap.py --llama-swap FILE --llama-server FILE [--programs target/release]
                [--modes resident,restarted,nvshare] [--weights 14] [--free 24] [--switches 20]
                [--out DIRECTORY]

Both servers have --weights GiB of random weights. A ballast process leaves --free GiB of the GPU
free. Each of --switches questions goes to the other server than the question before, through
llama-swap. The servers answer 16 tokens, greedily.

The modes are:
  resident   natively, without the ballast: both servers stay, and fit
  restarted  natively: llama-swap ends one server and starts the other at each switch
  nvshare    both servers stay, under nvshare

Prints a JSON line for each mode: the seconds until the first answer of each server, from the
question that starts it; the seconds from a later question to its answer (median and longest); the
number of answers, and of those that differ from the first mode's, if there are several modes. The
exit status is 1 if one differs. Needs a GPU, but not PyTorch. --out has all logs.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import llama_weights
import stage
from hibernate_stage import port

MODELS = ("a", "b")
TOKENS = 16
START = 180  # seconds until a server listens


def configuration(options, weights, first_port, stays, environment):
    """llama-swap's settings. `stays`: both servers run at the same time."""
    words = " ".join(llama_weights.server(options.llama_server, weights, "${PORT}"))
    model = {"cmd": words, "env": ["CUDA_VISIBLE_DEVICES=0"] + [f"{name}={value}" for name, value in environment.items()]}
    model["proxy"] = "http://127.0.0.1:${PORT}"
    both = {"swap": not stays, "exclusive": False, "members": MODELS}
    settings = {"healthCheckTimeout": START, "startPort": first_port, "groups": {"both": both}}
    return json.dumps(settings | {"models": {name: model for name in MODELS}})  # YAML includes JSON


def ask(address, model, question):
    """Returns a server's answer, and the seconds until it."""
    body = {"model": model, "prompt": f"word{question} word{question + 1} word{question + 2}", "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    begun = time.monotonic()
    answer = json.loads(urllib.request.urlopen(request, timeout=START).read())
    return answer["choices"][0], time.monotonic() - begun


def until_ready(address, child):
    until = time.monotonic() + 20
    while time.monotonic() < until and child.poll() is None:
        try:
            return urllib.request.urlopen(f"{address}/v1/models", timeout=5).read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit("llama-swap does not start: see its log")


def run(options, weights, mode, environment):
    """Returns the answers of a mode, and the seconds until each."""
    settings = options.out / f"{mode}.yaml"
    settings.write_text(configuration(options, weights, port(), mode != "restarted", environment))
    number = port()
    words = [options.llama_swap, "--config", settings, "--listen", f"127.0.0.1:{number}"]
    with open(options.out / f"{mode}.log", "w") as log:
        child = subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=stage.end_with_parent)
    address = f"http://127.0.0.1:{number}"
    try:
        until_ready(address, child)
        return [ask(address, MODELS[each % 2], each) for each in range(options.switches + 2)]
    finally:
        child.terminate()  # it ends its servers
        child.wait(30)


def row(mode, said, reference):
    begun, later = [round(seconds, 2) for _, seconds in said[:2]], [seconds for _, seconds in said[2:]]
    wrong = sum(answer["text"] != expected["text"] for (answer, _), (expected, _) in zip(said, reference))
    median, longest = round(statistics.median(later), 2), round(max(later), 2)
    return {"mode": mode, "starts": begun, "median": median, "longest": longest, "answers": len(said), "wrong": wrong}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    absolute = lambda text: Path(text).resolve()
    parser.add_argument("--llama-swap", type=absolute, required=True)
    parser.add_argument("--llama-server", type=absolute, required=True)
    parser.add_argument("--programs", type=absolute, default=absolute("target/release"))
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["resident", "restarted", "nvshare"])
    parser.add_argument("--weights", type=int, default=14)
    parser.add_argument("--free", type=int, default=24)
    parser.add_argument("--switches", type=int, default=20)
    parser.add_argument("--out", type=absolute, default=absolute(tempfile.mkdtemp(prefix="llama-swap-")))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    weights = options.out / "weights.gguf"
    llama_weights.write(weights, options.weights)
    rows, reference = [], None
    for mode in options.modes:
        with contextlib.ExitStack() as stack:
            environment = {}
            if mode != "resident":
                stack.enter_context(stage.ballast(options.free))
            if mode == "nvshare":
                stack.callback(stage.end, stage.scheduler(options.programs, options.out, ""))
                environment = stage.under_nvshare(options.programs, options.out)
            said = run(options, weights, mode, environment)
            reference = reference or said
            rows.append(row(mode, said, reference))
            print(json.dumps(rows[-1]), flush=True)
    os.unlink(weights)
    sys.exit(any(each["wrong"] for each in rows))


if __name__ == "__main__":
    main()
