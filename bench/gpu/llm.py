#!/usr/bin/env python3
"""Measures language-model servers that do not fit on the GPU together: whether they start at the
same time, and the time to the first token after a switch to another server.

  llm.py [--programs target/release] [--free 19.5,15,16,26,14] [--servers 2] [--starts 5]
         [--limit 60] [--serial 1] [--switches 40] [--questions 2] [--contended 0] [--budget 540]
         [--out DIRECTORY] [--json bench/results.json]

Each server builds a Llama with 12.6 GiB of random weights on the GPU, and answers a prompt of 256
tokens with 32 tokens. The values of --free are measured one after the other, each with its own
scheduler. A ballast process leaves this many GiB of the GPU free ("all": no ballast).

Prints JSON lines:
  serial    the seconds until each server is ready, when the servers start one after the other
            without nvshare on an empty GPU; and the bound, 1.3 times the sum of these seconds
  start     --starts times for each value of --free, the outcome:
              ready    with the seconds until the last server was ready
              refused  a server ended because it was out of memory
              failed   a server ended for another reason
              stuck    a server was not ready after --limit seconds
              cut      the budget ended before the servers were ready
  switches  after the first successful start: each server in turn gets --questions questions. Prints
            the number of answers, and the first-token times of questions that follow a question to
            another server ("switched") or to the same server ("same"). Also prints the bytes that
            were mapped for each switch (about as many bytes leave), the bytes that clients copied
            according to their own count, and the bounds: moved / 47 GiB/s, plus 0.08 s for the
            median and 0.18 s for the 99th percentile
  contended with --contended SECONDS, after the switches: back-to-back questions for this time,
            first to one server alone, then to all servers. Prints the number of answers, the
            longest time, and the ratio of the throughputs
  summary   a summary, and the figures llm-pair-starts-stuck, llm-switch-first-token-p99,
            llm-contended-longest and llm-contended-throughput

If a start is stuck, the scheduler's status, record and log, and the wait channels of the servers'
threads are written to a file in --out. The record of the contended part is written there, too.
After --budget seconds, the script stops and reports its results. The values of --free share this
time equally. Needs a GPU, PyTorch and transformers.
"""

import argparse
import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import figures
import llama
import stage

GIB = 2**30
LINK = 47  # GiB/s in each direction while both are in use, H200 on PCIe 5 ×16
# The outcome of a start is the first of these that any of its servers has.
OUTCOMES = ["stuck", "failed", "refused", "cut", "ready"]
ASSUMED_START = 25  # seconds of a start, until one has been measured
KEPT_FILES = 4  # maximum number of files about stuck starts in --out


# Servers. Each server writes JSON lines: first {"ready": …} or {"error": …}, then an answer for
# each line that it reads.


def serve(layers, prompt, tokens):
    stage.end_with_parent()
    # Output of libraries goes to standard error. Only the protocol uses standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what):
        print(json.dumps(what), file=out, flush=True)

    try:
        answer = model_answers(layers, prompt, tokens)
        answer()
        say({"ready": True})
        for _ in sys.stdin:
            say(answer())
    except Exception as e:
        say({"error": type(e).__name__, "out-of-memory": is_out_of_memory(e), "message": str(e)[:400]})
        sys.exit(1)


def model_answers(layers, prompt, tokens):
    import torch

    model = llama.build(layers)
    question = torch.randint(0, llama.VOCABULARY, (1, prompt), device="cuda")

    @torch.inference_mode()
    def answer():
        began, first, cache, token = time.perf_counter(), None, None, question
        for _ in range(tokens):
            output = model(token, past_key_values=cache, use_cache=True)
            cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
            token.item()
            first = first or time.perf_counter() - began
        return {"first": first, "whole": time.perf_counter() - began}

    return answer


def is_out_of_memory(error):
    text = f"{type(error).__name__} {error}".lower()
    return any(sign in text for sign in ("outofmemory", "out of memory", "alloc_failed"))


class Server:
    def __init__(self, words, environment, stderr):
        self.stderr = stderr
        with open(stderr, "w") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | environment
            )
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                self.lines.put((time.monotonic(), json.loads(line)))
        self.lines.put((time.monotonic(), {"error": "ended", "out-of-memory": False, "message": ""}))

    def hear(self, until):
        """Returns the time of the next message, and the message; None after the deadline."""
        try:
            return self.lines.get(timeout=max(0, until - time.monotonic()))
        except queue.Empty:
            return None

    def ask(self, until):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        heard = self.hear(until)
        return heard[1] if heard and "first" in heard[1] else None


class Ballast:
    """A process that holds all of the GPU's memory except a given amount."""

    def __init__(self):
        words = [sys.executable, __file__, "--ballast"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def leave(self, gib):
        self.process.stdin.write(f"{gib}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or '{"error": "the ballast has ended"}')


def ballast():
    stage.end_with_parent()
    import torch

    held = None
    for line in sys.stdin:
        held = None
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        take = int(free - float(line) * GIB)
        if take < 0:
            print(json.dumps({"error": f"only {free / GIB:.1f} GiB are free"}), flush=True)
            continue
        held = torch.empty(take, dtype=torch.uint8, device="cuda")
        print(json.dumps({"free": round(torch.cuda.mem_get_info()[0] / GIB, 2)}), flush=True)
    del held


# Starts.


class Cast:
    """The server processes of one run."""

    def __init__(self, arguments, directory):
        self.arguments, self.directory, self.number = arguments, directory, 0
        self.servers = []

    def start(self, environment):
        words = shlex.split(self.arguments.server) if self.arguments.server else [sys.executable, __file__, "--serve"]
        for name in ("layers", "prompt", "tokens"):
            words += [] if self.arguments.server else [f"--{name}", str(getattr(self.arguments, name))]
        self.number += 1
        server = Server(words, environment, self.directory / f"server-{self.number}.log")
        self.servers.append(server)
        return server

    def clear(self):
        left = stage.end(*[server.process for server in self.servers])
        self.servers = []
        if left:
            say({"kind": "warning", "message": f"{len(left)} servers did not end after SIGKILL"})


def outcomes(servers, begin, limit, deadline):
    """Waits for the servers' starts. Returns for each server the outcome, and the seconds after
    which the server reported it."""
    until, results = begin + limit, []
    for server in servers:
        heard = server.hear(min(until, deadline))
        if heard is None:
            results.append({"outcome": "stuck" if until <= deadline else "cut"})
            continue
        at, said = heard
        result = {"seconds": round(at - begin, 2)}
        if "error" in said:
            status = server.process.poll()
            said = {name: value for name, value in said.items() if value != ""} | ({"status": status} if status else {})
            result |= {"outcome": "refused" if said["out-of-memory"] else "failed"} | said
        else:
            result |= {"outcome": "ready"}
        results.append(result)
    return results


def serial(cast, arguments, deadline):
    # Warms the page cache. Otherwise, the first server would read its libraries from the disk.
    if not arguments.server:
        subprocess.run([sys.executable, "-c", "import torch; from transformers import LlamaForCausalLM"], check=False)
    seconds = []
    for _ in range(arguments.servers):
        begin = time.monotonic()
        result = outcomes([cast.start({})], begin, arguments.limit, deadline)[0]
        cast.clear()
        if result["outcome"] != "ready":
            say({"kind": "serial", "outcome": result})
            return None
        seconds.append(result["seconds"])
    bound = round(1.3 * sum(seconds), 2)
    say({"kind": "serial", "seconds": seconds, "sum": round(sum(seconds), 2), "bound": bound})
    return bound


def mapped(record, windows):
    """Returns the bytes that a process mapped in each window (process ID, begin, end), from the
    scheduler's record."""
    all_mapped = [event for event in stage.events(record) if event["what"] == "mapped"]

    def within(pid, since, until):
        mine = (event for event in all_mapped if event["pid"] == pid)
        return sum(event["bytes"] for event in mine if since * 1000 <= event["ms"] <= until * 1000)

    return [within(*window) for window in windows]


def switches(servers, arguments, directory, deadline):
    """Sends questions to the servers in turn. Returns the measurements, and whether an answer is
    missing."""
    switched, same, whole, asked = [], [], [], []
    metrics, stuck = directory / "metrics.sock", False
    # The first switch to each server is not measured, because it creates host buffers.
    for server in servers:
        if not server.ask(time.monotonic() + arguments.limit):
            return None, True
    before = stage.swapped(metrics)
    for i in range(arguments.switches):
        server = servers[i % len(servers)]
        for number in range(arguments.questions):
            kind = same if number else switched
            time.sleep(arguments.pause)
            began = time.monotonic()
            answer = server.ask(began + arguments.limit)
            if answer is None:
                stuck = True
                break
            kind.append(answer["first"])
            whole.append(answer["whole"])
            if kind is switched:
                asked.append((server.process.pid, began, time.monotonic()))
        if stuck or time.monotonic() > deadline:
            break
    said = {"answers": len(whole), "switched": figures.summary(switched), "same": figures.summary(same), "whole": figures.summary(whole)}
    if asked and not stuck:
        time.sleep(1)  # until the clients have reported the moved bytes
        copied = [round((b - a) / GIB / len(asked), 3) for a, b in zip(before, stage.swapped(metrics))]
        moved = [part / GIB for part in mapped(directory / "record.jsonl", asked)]
        bound = {"p50": figures.percentile(moved, 0.5) / LINK + 0.08, "p99": figures.percentile(moved, 0.99) / LINK + 0.18}
        said["moved-gib"] = figures.summary(moved)
        said["copied-gib-a-switch"] = dict(zip(("in", "out"), copied))
        said["bound"] = {name: round(value, 4) for name, value in bound.items()}
        said["within-bound"] = all(said["switched"][name] <= value for name, value in bound.items())
    return said, stuck


def questions(server, seconds, limit):
    """Sends back-to-back questions for this many seconds. Returns the duration of each answer; None
    if an answer is missing."""
    end, took = time.monotonic() + seconds, []
    while (began := time.monotonic()) < end:
        if server.ask(began + limit) is None:
            return None
        took.append(time.monotonic() - began)
    return took


def contended(servers, arguments):
    """Compares back-to-back questions to all servers with back-to-back questions to one server."""
    # Each server is evicted once before, because the first eviction has its own figure.
    if not all(server.ask(time.monotonic() + arguments.limit) for server in [*servers, *servers, servers[0]]):
        return None
    alone = questions(servers[0], arguments.contended, arguments.limit)
    if alone is None:
        return None
    each = [None] * len(servers)

    def ask(i):
        each[i] = questions(servers[i], arguments.contended, arguments.limit)

    began = time.monotonic()
    threads = [threading.Thread(target=ask, args=[i]) for i in range(len(servers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in each:
        return None
    # Answers in progress at the end count, and so does the time until they are complete.
    rate = sum(map(len, each)) / (time.monotonic() - began)
    said = {"alone": figures.summary(alone), "each": [figures.summary(took) for took in each]}
    return said | {"longest": max(map(max, each)), "throughput": rate / (len(alone) / sum(alone))}


# Data about a stuck start.


def threads(pid):
    """Returns the wait channel, system call and kernel stack of each thread, as far as the kernel
    shows them."""
    said = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        thread = {"tid": int(task.name)}
        for name in ("comm", "wchan", "syscall", "stack"):
            with contextlib.suppress(OSError):
                thread[name] = (task / name).read_text().strip()
        said.append(thread)
    return said


def keep(file, case, servers, programs, directory):
    def ask(*words):
        command = [programs / "nvsharectl", "--control", directory / "control.sock", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as e:
            return {"error": str(e)}
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(done.stdout)
        return {"error": done.stderr or done.stdout}

    def lines(path, most):
        return path.read_text(errors="replace").splitlines()[-most:] if path.exists() else []

    said = {"case": case, "monotonic-ms": time.monotonic() * 1000, "status": ask("status", "--json")}
    said["servers"] = [
        {"pid": server.process.pid, "threads": threads(server.process.pid), "stderr": lines(server.stderr, 100)}
        for server in servers
    ]
    time.sleep(2)
    said["status-2s-later"] = ask("status", "--json")
    said["log"] = lines(directory / "scheduler.log", 2000)
    said["record"] = lines(directory / "record.jsonl", 20000)
    file.write_text(json.dumps(said, indent=1) + "\n")


# The whole run.


def amount(free):
    return free if free == "all" else f"{free} GiB"


def say(what):
    print(json.dumps(what, ensure_ascii=False), flush=True)


class Run:
    def __init__(self, arguments, directory):
        self.arguments, self.programs = arguments, arguments.programs.resolve()
        self.cast = Cast(arguments, directory)
        self.directory, self.kept = directory, 0
        self.deadline = time.monotonic() + (arguments.budget or float("inf"))
        self.longest, self.bound = 0, None
        self.starts = {free: [] for free in arguments.free}
        self.switches, self.contended = {}, {}

    def keep(self, case):
        if self.arguments.out and self.kept < KEPT_FILES:
            self.kept += 1
            keep(self.arguments.out / f"stuck-{self.kept}.json", case, self.cast.servers, self.programs, self.directory)

    def start(self, free, number, deadline):
        begin = time.monotonic()
        for _ in range(self.arguments.servers):
            self.cast.start(stage.under_nvshare(self.programs, self.directory))
        each = outcomes(self.cast.servers, begin, self.arguments.limit, deadline)
        outcome = min((result["outcome"] for result in each), key=OUTCOMES.index)
        said = {"kind": "start", "free": free, "start": number, "outcome": outcome, "servers": each}
        if outcome == "ready":
            said["seconds"] = max(result["seconds"] for result in each)
            self.longest = max(self.longest, said["seconds"])
            if self.bound:
                said["within-bound"] = said["seconds"] <= self.bound
        say(said)
        if outcome == "stuck":
            self.keep(said)
        if outcome != "cut":
            self.starts[free].append(said)
        return outcome

    def measure(self, free, deadline):
        """Measures all starts with this much free memory."""
        for number in range(self.arguments.starts):
            if time.monotonic() + (self.longest or ASSUMED_START) > deadline:
                break
            try:
                outcome = self.start(free, number, self.deadline)
                if outcome == "ready" and self.arguments.switches and free not in self.switches:
                    said, stuck = switches(self.cast.servers, self.arguments, self.directory, deadline)
                    case = {"kind": "switches", "free": free, "stuck": stuck} | (said or {})
                    say(case)
                    self.switches[free] = case
                    if stuck:
                        self.keep(case)
                if outcome == "ready" and self.arguments.contended and free not in self.contended:
                    said = contended(self.cast.servers, self.arguments)
                    case = {"kind": "contended", "free": free, "stuck": said is None} | (said or {})
                    say(case)
                    self.contended[free] = case
                    if self.arguments.out:
                        shutil.copy(self.directory / "record.jsonl", self.arguments.out / f"contended-{free}.jsonl")
                    if said is None:
                        self.keep(case)
            finally:
                self.cast.clear()

    def run(self):
        say({"kind": "measured", "files": figures.measured_files(self.programs), "hardware": figures.hardware()})
        with contextlib.ExitStack() as stack:
            stack.callback(self.cast.clear)
            if self.arguments.serial:
                self.bound = serial(self.cast, self.arguments, self.deadline)
            holder = None
            for i, free in enumerate(self.arguments.free):
                now = time.monotonic()
                deadline = now + (self.deadline - now) / (len(self.arguments.free) - i)
                if now + (self.longest or ASSUMED_START) > deadline:
                    continue
                if free != "all":
                    if holder is None:
                        holder = Ballast()
                        stack.callback(stage.end, holder.process)
                    left = holder.leave(float(free))
                    say({"kind": "ballast", "asked": free} | left)
                    if "error" in left:
                        continue
                metrics = self.directory / "metrics.sock"
                settings = f"{self.arguments.settings}\n[metrics]\nlisten = {json.dumps(str(metrics))}\n"
                daemon = stage.scheduler(self.programs, self.directory, settings)
                try:
                    time.sleep(1.5)  # until it has measured the GPU memory of other processes
                    self.measure(free, deadline)
                finally:
                    stage.end(daemon)

    def figures(self):
        said, done = [], {free: starts for free, starts in self.starts.items() if starts}
        everything = [start for starts in done.values() for start in starts]

        def count(starts, outcome):
            return sum(start["outcome"] == outcome for start in starts)

        if everything:
            each = ", ".join(f"{amount(free)} {count(starts, 'stuck')} of {len(starts)}" for free, starts in done.items())
            note = f"{self.arguments.servers} servers of 12.6 GiB started at once, stuck after {self.arguments.limit:g} s; free: {each}"
            others = {name: count(everything, name) for name in ("refused", "failed")}
            note += "".join(f"; {number} {name}" for name, number in others.items() if number)
            if self.longest:
                note += f"; longest start {self.longest:.1f} s"
            if self.bound:
                note += f", 1.3 times serial {self.bound:.1f} s"
            said.append(("llm-pair-starts-stuck", count(everything, "stuck"), "count", note))
        measured = [(free, case) for free, case in self.switches.items() if case.get("switched") and not case["stuck"]]
        if measured:
            free, case = measured[0]
            note = "{n} switches, {0} free; median {p50}, longest {max}".format(amount(free), **case["switched"])
            if "bound" in case:
                note += "; {p50} GiB moved in".format(**case["moved-gib"])
                note += ", so the bounds are {p50} (median) and {p99}".format(**case["bound"])
            said.append(("llm-switch-first-token-p99", case["switched"]["p99"], "s", note))
        for free, case in self.contended.items():
            if case["stuck"]:
                continue
            numbers = " and ".join(str(took["n"]) for took in case["each"])
            note = f"{amount(free)} free; {numbers} answers within {self.arguments.contended:g} s, medians "
            note += " and ".join(f"{took['p50']} s" for took in case["each"])
            note += f"; one server alone {case['alone']['n']} answers, median {case['alone']['p50']} s"
            said.append(("llm-contended-longest", case["longest"], "s", note))
            said.append(("llm-contended-throughput", case["throughput"], "ratio", note))
            break
        return said

    def report(self):
        said = self.figures()
        starts = {free: len(starts) for free, starts in self.starts.items()}
        over = time.monotonic() > self.deadline or any(n < self.arguments.starts for n in starts.values())
        rows = [{"name": name, "value": value, "unit": unit, "note": note} for name, value, unit, note in said]
        say({"kind": "summary", "starts": starts, "complete": not over, "figures": rows})
        if self.arguments.json and said:
            if self.arguments.servers == 2:
                figures.add(self.arguments.json, said, self.arguments.commit)
            else:
                say({"kind": "warning", "message": "figures not written: they are defined for two servers"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of nvshare-scheduler, nvsharectl and libnvshare.so")
    parser.add_argument("--free", type=lambda text: text.split(","), default=["19.5"], help="GiB, or all")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60, help="timeout of a start and of an answer, in seconds")
    parser.add_argument("--serial", type=int, choices=[0, 1], default=1, help="0: without the serial reference")
    parser.add_argument("--switches", type=int, default=40)
    parser.add_argument("--questions", type=int, default=2, help="questions to a server before the switch to the next server, at least 1")
    parser.add_argument("--contended", type=float, default=0, help="seconds of back-to-back questions to all servers")
    parser.add_argument("--pause", type=float, default=0, help="seconds between questions")
    parser.add_argument("--layers", type=int, default=llama.LAYERS)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a question")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--budget", type=float, default=0, help="seconds; 0: no limit")
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--server", default="", help="command of the servers, instead of this script's own server")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit of the measured programs (default: the checked-out commit)")
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    # Turns signals into an exit, so that all started processes are killed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        run = Run(arguments, Path(directory))
        try:
            run.run()
        finally:
            run.report()
    sys.exit(1 if any(start["outcome"] == "stuck" for starts in run.starts.values() for start in starts) else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--ballast", action="store_true")
    role, rest = parser.parse_known_args()
    if role.serve:
        for name in ("--layers", "--prompt", "--tokens"):
            parser.add_argument(name, type=int)
        asked = parser.parse_args()
        serve(asked.layers, asked.prompt, asked.tokens)
    elif role.ballast:
        ballast()
    else:
        main()
