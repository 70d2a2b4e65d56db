#!/usr/bin/env python3
"""Measures all figures of a GPU, in parts, the most important first.

  all.py [--programs target/card] [--only PART,...] [--budget SECONDS] [--json FILE] [--commit ID]
         [--out DIR] [--tests DIR] [--original DIR] [--hami libvgpu.so] [--criu PROGRAM] [--touch GIB] [--again]
         [--list]

Each part is one of the other benchmarks, and writes its figures to FILE when it has measured them. A
part is skipped if FILE already has all its figures, of the same commit and GPU. So a run that was
interrupted or whose budget was spent continues when it is repeated. A part only begins if the rest of
the budget is enough for it; none needs more than nine minutes. The outputs of the parts are in DIR.

With --touch, this many GiB of host memory are written to once before the first part. A virtual machine's
host provides memory at the first write, which can be slower than anything that is measured.

A part that needs more GPUs or Python packages than there are is skipped, and named. `make card`
builds what --programs contains, for a machine without Rust. peers.py describes --original and --hami,
suites.py --tests, and hibernate.py --criu, which is its --stand-ins.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import figures
import stage

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Part:
    name: str
    seconds: int  # the longest time that it takes
    figures: list  # the figures that it measures
    words: list  # the script and its arguments; a name without a suffix is a program of --programs
    gpus: int = 1
    modules: tuple = ("torch",)
    environment: dict = dataclasses.field(default_factory=dict)


def peers(case, seconds, *modules):
    return Part(f"peers-{case}", seconds, [f"peers-{case}"], ["peers.py", "--cases", case], modules=("torch", *modules))


# See README.md about vLLM with kvcached.
KVCACHED = {"VLLM_USE_V2_MODEL_RUNNER": "0", "ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}
KVCACHED |= {"KVCACHED_GPU_UTILIZATION": "0.98"}

PARTS = [
    Part("pairs", 540, ["auto-against-best-of-native-and-turns"], ["pairs.py"]),
    peers("half-big", 200),
    peers("half-fits", 200),
    peers("most-big", 200),
    peers("most-fits", 200),
    peers("servers", 300, "transformers"),
    peers("notebooks", 300),
    Part(
        "exchange-14",
        120,
        ["first-handover-14GiB", "handover-14GiB", "exchange-bandwidth-each-way"],
        ["exchange", "--mem", "14G", "--leave", "17G"],
        modules=(),
    ),
    Part(
        "exchange-40",
        150,
        ["handover-40GiB", "exchange-over-link"],
        ["exchange", "--mem", "40G", "--leave", "44G", "--seconds", "30"],
        modules=(),
    ),
    Part("migrate", 300, ["migrate-16GiB", "drain-gpu"], ["migrate.py"], gpus=2),
    Part(
        "big-half",
        330,
        ["big-0.5-period10-tq5-over-serial", "big-0.5-period10-tq30-over-serial"],
        ["mix", "--sizes", "15.3G", "--shares", "0.5", "--periods", "10", "--quanta", "5,30", "--work", "60"],
        modules=(),
    ),
    Part(
        "big-most",
        460,
        ["big-0.9-period10-tq5-over-serial", "big-0.9-period10-tq30-over-serial"],
        ["mix", "--sizes", "15.3G", "--shares", "0.9", "--periods", "10", "--quanta", "5,30", "--work", "60"],
        modules=(),
    ),
    Part(
        "small-half",
        120,
        ["small-0.5-period10-over-serial"],
        ["mix", "--sizes", "7.2G", "--shares", "0.5", "--periods", "10", "--quanta", "30"],
        modules=(),
    ),
    Part(
        "ten",
        120,
        ["ten-by-8GiB-over-serial"],
        ["mix", "--jobs", "10", "--sizes", "8G", "--shares", "0.9", "--periods", "1", "--quanta", "30", "--work", "3"],
        modules=(),
    ),
    Part(
        "fits",
        200,
        ["pair-mix-0.5-fits", "pair-mix-0.9-fits", "bursts-beside-mix-0.9-p99", "revoke-drain-matmul-p99"],
        ["fits.py"],
    ),
    Part("launches", 180, ["launch-bound-slowdown"], ["launch_path.py"]),
    Part(
        "decode",
        240,
        ["solo-slowdown-decode"],
        ["launch_path.py", "--load", "decode", "--pairs", "60"],
        modules=("torch", "transformers"),
    ),
    Part("train", 300, ["solo-slowdown-train"], ["solo.py", "--loads", "train"]),
    Part(
        "queues",
        150,
        ["queued-launches-over-native", "stream-cycle-over-native"],
        ["queues.py", "--cases", "queued-1000,queued-10000,cycles"],
        modules=(),
    ),
    Part("pools", 180, ["pool-alloc-free-over-native"], ["pools.py", "--cases", "pairs"], modules=()),
    Part("build", 240, ["model-build-slowdown"], ["growth.py", "--only", "build"], modules=("torch", "transformers")),
    Part("alloc", 90, ["alloc-32MiB-over-vmm"], ["growth.py", "--only", "alloc"], modules=()),
    Part("room", 240, ["make-room-8GiB", "stranger-growth-failures"], ["room.py"], modules=()),
    Part("sleep", 300, ["sleep-16GiB", "wake-16GiB", "left-on-gpu-asleep", "eight-notebooks-free"], ["sleep.py"]),
    Part(
        "servers",
        540,
        ["llm-pair-starts-stuck", "llm-switch-first-token-p99"],
        ["llm.py", "--free", "19.5", "--starts", "10", "--switches", "100", "--budget", "520"],
        modules=("torch", "transformers"),
    ),
    Part(
        "contended",
        240,
        ["llm-contended-longest", "llm-contended-throughput"],
        ["llm.py", "--starts", "1", "--switches", "4", "--contended", "25", "--budget", "220"],
        modules=("torch", "transformers"),
    ),
    Part("shares", 300, ["share-error-30-70"], ["shares.py", "--rows", "30+70"]),
    Part(
        "suites", 420, ["foreign-suites-outcomes-changed"], ["suites.py", "--budget", "400"], modules=("torch", "pytest")
    ),
    Part(
        "vllm",
        540,
        ["vllm-first-token-after-switch-p99", "vllm-outputs-changed"],
        ["vllm_servers.py", "--steps", "graph,http", "--switches", "100", "--switch-time", "400"],
        modules=("torch", "vllm"),
    ),
    Part(
        "kvcached",
        270,
        ["kvcached-pair-over-alone"],
        ["vllm_servers.py", "--steps", "graph,pair"],
        modules=("torch", "vllm", "kvcached"),
        environment=KVCACHED,
    ),
    Part(
        "hibernate",
        480,
        ["hibernate-16GiB", "restore-16GiB", "hibernate-16GiB-over-disk", "restore-16GiB-over-disk"],
        ["hibernate.py", "--cases", "train"],
    ),
    Part("foreign", 120, ["foreign-checkpoint-room"], ["foreign.py"], modules=()),
    Part("gangs", 300, ["gang-auto-over-best"], ["gangs.py", "--cases", "native,on-announced,auto-announced"], gpus=2),
]


def gpus():
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return len(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")) - 1


def has_figures(part, arguments, hardware):
    """Returns true if the file has all figures of the part, of this commit and this kind of GPU."""
    rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    # The number of processors and of GPUs may differ.
    kind = hardware.split(" × ")[-1].split(" (")[0]
    known = {row["name"] for row in rows if row["commit"] == arguments.commit and kind in row["hardware"]}
    return set(part.figures) <= known


def rows_of(part, arguments):
    """Returns the file to which the part writes its figures."""
    return arguments.out / f"{part.name}.json"


def command(part, arguments):
    program, *words = part.words
    if program.endswith(".py"):
        words = [sys.executable, HERE / program, *words]
    else:
        words = [arguments.programs / program, *words]
    words += ["--programs", arguments.programs, "--json", rows_of(part, arguments)]
    if program in ("hibernate.py", "llm.py", "suites.py", "vllm_servers.py"):
        words += ["--out", arguments.out / part.name]
    for option, value in (("--original", arguments.original), ("--hami", arguments.hami)):
        if program == "peers.py" and value:
            words += [option, value]
    if program == "hibernate.py" and arguments.criu:
        words += ["--stand-ins", arguments.criu]
    if program == "suites.py" and arguments.tests:
        words += ["--tests", arguments.tests]
    return list(map(str, words))


def measure(part, arguments):
    """Runs a part, and ends it with all its processes if it takes too long. Returns why it failed."""
    rows_of(part, arguments).unlink(missing_ok=True)
    with open(arguments.out / f"{part.name}.log", "w") as log:
        environment = os.environ | part.environment
        child = subprocess.Popen(command(part, arguments), env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = child.wait(part.seconds)
        except subprocess.TimeoutExpired:
            status = f"not done after {part.seconds} s"
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # also what the part has left
            except ProcessLookupError:
                pass
            child.wait()
    return "" if status == 0 else f"status {status}" if isinstance(status, int) else status


def keep(part, arguments, hardware):
    """Adds the figures of a part to the file. Returns which are missing."""
    path = rows_of(part, arguments)
    rows = json.loads(path.read_text()) if path.exists() else []
    # The benchmarks in Rust know neither the GPU nor, without a repository, the commit.
    figures.put(arguments.json, [row | {"commit": arguments.commit, "hardware": hardware} for row in rows])
    absent = sorted(set(part.figures) - {row["name"] for row in rows})
    return f"without {', '.join(absent)}" if absent else ""


def missing(part, count):
    absent = [module for module in part.modules if importlib.util.find_spec(module) is None]
    if absent:
        return f"needs {', '.join(absent)}"
    return f"needs {part.gpus} GPUs" if count < part.gpus else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    absolute = lambda path: Path(path).resolve()
    parser.add_argument("--programs", type=absolute, default=absolute("target/card"))
    parser.add_argument("--only", type=lambda text: text.split(","), default=[part.name for part in PARTS])
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--json", type=absolute, default=absolute("bench/results.json"))
    parser.add_argument("--commit", default=figures.checked_out())
    parser.add_argument("--out", type=absolute, default=absolute("out"))
    parser.add_argument("--tests", type=absolute, help="directory of the tests for suites.py")
    parser.add_argument("--original", type=absolute)
    parser.add_argument("--hami", type=absolute)
    parser.add_argument("--criu", type=absolute)
    parser.add_argument("--touch", type=int, default=0, help="GiB of host memory to write to first")
    parser.add_argument("--again", action="store_true", help="also measure what FILE has already")
    parser.add_argument("--list", action="store_true", help="print the parts, and measure nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.only) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}. Run all.py --list")
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:>16} {part.seconds:>4} s  {', '.join(part.figures)}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.budget
    count, hardware, failed = gpus(), figures.hardware(), False
    if arguments.touch:
        print(f"wrote to host memory at {stage.touch_host_memory(arguments.touch):.1f} GiB/s", flush=True)
    for part in PARTS:
        if part.name not in arguments.only:
            continue
        if not arguments.again and has_figures(part, arguments, hardware):
            print(f"{part.name}: measured already", flush=True)
        elif why := missing(part, count):
            print(f"{part.name}: skipped: {why}", flush=True)
        elif part.seconds > end - time.monotonic():
            print(f"{part.name}: left, needs up to {part.seconds} s", flush=True)
        else:
            began = time.monotonic()
            why = measure(part, arguments) or keep(part, arguments, hardware)
            failed |= bool(why)
            print(f"{part.name}: {why or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
