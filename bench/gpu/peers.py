#!/usr/bin/env python3
"""Compares nvshare with other ways to share a GPU, with the same programs in one run on one GPU.

  peers.py [--programs target/release] [--original DIR] [--hami libvgpu.so]
           [--setups serial,native,…] [--cases half-fits,…] [--work 10] [--limit 90] [--keep FILE]
           [--json FILE] [--commit ID]

The setups are:
  serial    the programs one after the other, without nvshare
  native    all programs at the same time, without a sharing layer
  original  under the original nvshare; --original is the directory of its nvshare-scheduler and
            libnvshare.so. The original needs /var/run/nvshare, so the script must run as root
  hami      under HAMi-core, with a memory limit for each program: the room divided by the number of
            programs; --hami is HAMi-core's library
  mps       under MPS
  nvshare   under nvshare
If --original or --hami is missing, or if MPS does not start, the table contains the reason. A second
line has the energy that the GPU used, in kilojoules, from the start of the first program until all are
done. The energy of other programs on the GPU counts too.

The cases are:
  half-fits, most-fits  two programs of 7.2 GiB with 17 GiB of room, which compute for 50 or 90 % of
                        the time: seconds until both are done
  half-big, most-big    the same with two programs of 15.3 GiB, of which only one fits
  servers               two Llamas of 12.6 GiB with 19.5 GiB of room; each answers 10 questions
                        without a pause: seconds until all questions are answered
  notebooks             ten programs of 1 GiB with 17 GiB of room, each with a burst of work every
                        0.5 s: the 99th percentile of the seconds of a burst

Another process holds all of the GPU's memory except the room. The original turns all memory into
managed memory. More managed memory than is free can hang a GPU, so the original is not run if the
programs do not fit. Every program checks its results. Needs a GPU, PyTorch, `cuda-program` in
--programs and, for `servers`, transformers.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import llama
import stage

GIB = 2**30
CONTEXT = 0.6  # GiB of a program's CUDA context, which its own memory does not include
# For each case: the child's kind and arguments, the number of children, GiB of each child, GiB of
# room, and whether latencies are measured instead of the time until all are done.
CASES = {
    "half-fits": (("mix", 7.2, 0.5), 2, 7.2, 17, False),
    "most-fits": (("mix", 7.2, 0.9), 2, 7.2, 17, False),
    "half-big": (("mix", 15.3, 0.5), 2, 15.3, 17, False),
    "most-big": (("mix", 15.3, 0.9), 2, 15.3, 17, False),
    "servers": (("server", 10), 2, 12.7, 19.5, False),
    "notebooks": (("bursts", 1, 20), 10, 1, 17, True),
}
SETUPS = ["serial", "native", "original", "hami", "mps", "nvshare"]


# Child processes in Python. Each child creates a file when its memory is ready, and then waits for
# another file. It prints a line of JSON when it is done.


def bursts(gib, number):
    import torch

    parts = [torch.zeros(2**26, dtype=torch.int32, device="cuda") for _ in range(4 * int(gib))]

    def passes(times):
        for _ in range(times):
            for part in parts:
                part.add_(1)
        torch.cuda.synchronize()

    passes(1)
    yield
    took = []
    for _ in range(int(number)):
        time.sleep(0.5)
        begin = time.perf_counter()
        passes(30)
        took.append(time.perf_counter() - begin)
    return {"right": all(bool((part == 1 + 30 * int(number)).all()) for part in parts), "took": took}


def server(answers):
    """Answers questions. Only answers that are not finite count as wrong, because answers also
    differ between native runs."""
    import torch

    model = llama.build()
    question = torch.randint(0, llama.VOCABULARY, (1, 256), device="cuda")
    yield
    right = True
    with torch.inference_mode():
        for _ in range(int(answers)):
            cache, token = None, question
            for _ in range(32):
                output = model(token, past_key_values=cache, use_cache=True)
                cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
                token.item()
            right &= bool(torch.isfinite(output.logits).all())
    return {"right": right}


def reason(message):
    signs = ("out of memory", "outofmemory", "out_of_memory", "alloc_failed")
    return "out of memory" if any(sign in message.lower() for sign in signs) else message[:80]


def child(kind, words, ready, go):
    stage.end_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error
    said = {}
    try:
        steps = {"bursts": bursts, "server": server}[kind](*words)
        try:
            next(steps)
            stage.wait_to_begin(Path(ready), Path(go))
            said = {"began": time.time()}
            next(steps)
        except StopIteration as end:
            said |= end.value | {"ended": time.time()}
    except Exception as e:
        said |= {"error": reason(f"{type(e).__name__} {e}")}
    print(json.dumps(said), file=out, flush=True)


def ballast(room):
    stage.end_with_parent()
    import torch

    # The ballast's own context exists already, so `free` does not include it.
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, int(free - float(room) * GIB)), dtype=torch.uint8, device="cuda")
    print(json.dumps({"free": torch.cuda.mem_get_info()[0] / GIB, "held": held.numel() / GIB}), flush=True)
    sys.stdin.read()


# Setups. Each yields the environment of the programs, or raises Unable with the reason why it
# cannot run.


class Unable(Exception):
    pass


@contextlib.contextmanager
def nothing(arguments, directory, number, room):
    yield {}


@contextlib.contextmanager
def original(arguments, directory, number, room):
    if not arguments.original:
        raise Unable("no --original")
    Path("/var/run/nvshare").mkdir(parents=True, exist_ok=True)
    Path("/var/run/nvshare/scheduler.sock").unlink(missing_ok=True)
    with open(directory / "original.log", "w") as log:
        daemon = subprocess.Popen([arguments.original / "nvshare-scheduler"], stderr=log, stdout=log)
    try:
        time.sleep(1)
        if daemon.poll() is not None:
            raise Unable("its scheduler ended")
        yield {"LD_PRELOAD": str(arguments.original / "libnvshare.so")}
    finally:
        stage.end(daemon)


@contextlib.contextmanager
def hami(arguments, directory, number, room):
    if not arguments.hami:
        raise Unable("no --hami")
    limit = f"{int(room * 1024 / number)}m"
    cache = directory / "hami.cache"
    cache.unlink(missing_ok=True)
    yield {
        "LD_PRELOAD": str(arguments.hami),
        "CUDA_DEVICE_MEMORY_LIMIT": limit,
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(cache),
        "LIBCUDA_LOG_LEVEL": "0",
    }


@contextlib.contextmanager
def mps(arguments, directory, number, room):
    if not shutil.which("nvidia-cuda-mps-control"):
        raise Unable("not installed")
    environment = {f"CUDA_MPS_{name}_DIRECTORY": str(directory / name.lower()) for name in ("PIPE", "LOG")}
    for path in environment.values():
        Path(path).mkdir(exist_ok=True)
    started = subprocess.run(["nvidia-cuda-mps-control", "-d"], env=os.environ | environment, capture_output=True, text=True)
    if started.returncode:
        raise Unable("does not start")
    try:
        yield environment
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", env=os.environ | environment, text=True, timeout=20, capture_output=True
            )


@contextlib.contextmanager
def nvshare(arguments, directory, number, room):
    daemon = stage.scheduler(arguments.programs, directory, "")
    try:
        time.sleep(1.5)  # until it has measured the GPU memory of other processes
        yield stage.under_nvshare(arguments.programs, directory)
    finally:
        stage.end(daemon)


MANAGERS = {"serial": nothing, "native": nothing, "original": original, "hami": hami, "mps": mps, "nvshare": nvshare}


def start(words, log, environment):
    with open(log, "w") as errors:
        return subprocess.Popen(
            [*map(str, words)], stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment
        )


def result(process, end, limit):
    """Returns the child's output. Kills the child at the deadline."""
    try:
        out = process.communicate(timeout=max(0.1, end - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        stage.end(process)
        return {"error": f"not done after {limit:g} s"}
    return json.loads(out) if out.strip() else {"error": f"status {process.returncode}"}


def mixes(words, number, environment, directory, arguments):
    """Runs `number` concurrent programs that use the driver API, as in `../mix.rs`. Measures the
    time from their start to their end. Returns their outputs."""
    end, began = time.monotonic() + arguments.limit, time.time()
    words = [arguments.programs / "cuda-program", "mix", *words]
    environment = environment | {"CUDA_LOOKUP": "getproc"}  # functions are found like in libcudart
    children = [start(words, directory / f"child-{i}.log", environment) for i in range(number)]
    said = []
    for process in children:
        one = result(process, end, arguments.limit)
        failed = {"error": reason(one["error"])} if "error" in one else {}
        said.append({"right": one.get("ok"), "passes": one.get("passes"), "began": began, "ended": time.time()} | failed)
    return said


def programs(job, number, environment, directory, arguments):
    """Runs `number` programs concurrently. Returns their outputs."""
    if job[0] == "mix":
        return mixes(job[1:], number, environment, directory, arguments)
    go = directory / "go"
    go.unlink(missing_ok=True)
    children = []
    for i in range(number):
        ready = directory / f"ready-{i}"
        ready.unlink(missing_ok=True)
        words = [sys.executable, __file__, "--child", job[0], ready, go, *job[1:]]
        children.append((start(words, directory / f"child-{i}.log", environment), ready))
    end = time.monotonic() + arguments.limit
    while any(not ready.exists() and child.poll() is None for child, ready in children) and time.monotonic() < end:
        time.sleep(0.01)
    go.touch()
    return [result(process, end, arguments.limit) for process, _ in children]


def verdict(said, counts_latency):
    """Returns the measured seconds, or a text if a program failed or had wrong results."""
    errors = sorted({s["error"] for s in said if "error" in s})
    failed = sum("error" in s for s in said)
    if errors:
        return f"{failed} of {len(said)}: {', '.join(errors)}"
    if not all(s["right"] for s in said):
        return "wrong results"
    if counts_latency:
        return figures.percentile([took for s in said for took in s["took"]], 0.99)
    return max(s["ended"] for s in said) - min(s["began"] for s in said)


def measure(case, setup, job, arguments, directory):
    _, number, gib, room, counts_latency = CASES[case]
    if setup == "original" and number * (gib + CONTEXT) > room:
        return "not run: more managed memory than is free"
    try:
        with MANAGERS[setup](arguments, directory, number, room) as environment:
            if setup != "serial":
                return verdict(programs(job, number, environment, directory, arguments), counts_latency)
            each = [programs(job, 1, environment, directory, arguments) for _ in range(1 if counts_latency else number)]
            results = [verdict(said, counts_latency) for said in each]
            return next((result for result in results if isinstance(result, str)), sum(results))
    except Unable as why:
        return f"not run: {why}"


def text(result):
    return result if isinstance(result, str) else f"{result:.3f} s" if result < 1 else f"{result:.1f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=lambda path: Path(path).resolve(), default=Path("target/release").resolve())
    parser.add_argument("--original", type=lambda path: Path(path).resolve())
    parser.add_argument("--hami", type=lambda path: Path(path).resolve())
    parser.add_argument("--setups", default=",".join(SETUPS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--work", type=int, default=10, help="seconds that a program takes alone")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which programs are killed")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    print(json.dumps({"files": figures.measured_files(arguments.programs), "hardware": figures.hardware()}), flush=True)
    setups = arguments.setups.split(",")
    print(f"| case | {' | '.join(setups)} |\n|---|{'---|' * len(setups)}", flush=True)
    measured = {}
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        for case in arguments.cases.split(","):
            job, _, _, room, _ = CASES[case]
            words = [sys.executable, __file__, "--ballast", str(room)]
            holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            try:
                left = json.loads(holder.stdout.readline())["free"]
                if job[0] == "mix":
                    _, gib, share = job
                    words = ["--mem", int(gib * GIB), "--chunks", 8]
                    once = programs(("mix", *words, "--gpu-ms", 1000 * share, "--rounds", 2), 1, {}, directory, arguments)[0]
                    words += ["--reps", once["passes"], "--rounds", arguments.work, "--cpu-ms", round(1000 * (1 - share))]
                    job = ("mix", *words)
                if not math.isclose(left, room, abs_tol=0.5):
                    print(f"{case}: {left:.1f} GiB are free instead of {room}", file=sys.stderr)
                measured[case] = {}
                energy = []
                for setup in setups:
                    before = stage.joules()
                    measured[case][setup] = measure(case, setup, job, arguments, directory)
                    energy.append("–" if before is None else f"{(stage.joules() - before) / 1000:.2f}")
                    if arguments.keep:
                        arguments.keep.write_text(json.dumps(measured, indent=1) + "\n")
            finally:
                stage.end(holder)
            print(f"| {case} | {' | '.join(text(measured[case][setup]) for setup in setups)} |")
            print(f"| {case}, kJ | {' | '.join(energy)} |", flush=True)
    if arguments.json:
        rows = []
        for case, results in measured.items():
            others = [value for setup, value in results.items() if setup != "nvshare" and not isinstance(value, str)]
            own = results.get("nvshare")
            if others and not isinstance(own, (str, type(None))):
                note = "; ".join(f"{setup} {text(value)}" for setup, value in results.items())
                rows.append((f"peers-{case}", own / min(others), "ratio", note))
        figures.add(arguments.json, rows, arguments.commit)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[5:], sys.argv[3], sys.argv[4])
    elif sys.argv[1:2] == ["--ballast"]:
        ballast(sys.argv[2])
    else:
        main()
