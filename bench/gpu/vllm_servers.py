#!/usr/bin/env python3
"""Measures vLLM under nvshare: two engines or two servers that do not fit on the GPU together, and
vLLM's own sleep mode. Compares every answer with the native answer.

  vllm_servers.py [--programs target/release]
                  [--steps eager,graph,pair,http,asleep,sleep,sleep-nvshare,tensor-native,tensor]
                  [--free 40] [--switches 16] [--questions 2] [--switch-time 25] [--contended 10]
                  [--start 90] [--model DIRECTORY] [--backend NAME] [--settings TOML] [--touch 0]
                  [--budget 540] [--out DIRECTORY] [--json bench/results.json] [--commit COMMIT]

The model has the shapes of Llama 3 8B and a vocabulary of 32,000: 7.24 billion random weights, 13.5
GiB in bf16. A ballast process leaves --free GiB of the GPU free. Each engine may allocate nine
tenths of them. Prompts have 256 tokens and answers 32. Decoding is greedy, one request at a time.

The steps, each with its own processes:
  eager, graph, default  natively, without the ballast: the hashes of all answers, twice; and whether
                         a batch gives the same answers. `graph` uses CUDA graphs for decoding, but
                         not torch.compile; its hashes are the reference for the other steps.
                         `default` uses vLLM's defaults
  pair                   two engines that start together under nvshare. They answer in turn,
                         --questions questions each; then one engine answers back-to-back questions,
                         then both
  http                   the same with two `vllm serve`
  tensor-native          as `graph`, with tensor parallelism on two GPUs; its hashes are the
                         reference for `tensor`
  tensor                 as `pair`, with tensor parallelism on two GPUs, each with a ballast. Nothing
                         names the two jobs
  asleep                 two engines under nvshare, which nvsharectl pauses and resumes several
                         times
  sleep                  natively, two engines with sleep mode (level 1). The second engine starts
                         while the first sleeps; then they change places four times
  sleep-nvshare          the same under nvshare; then both are awake and answer in turn

Prints JSON lines:
  …-start       the seconds until each engine was ready
  …-switches    the times to the first token after a question to the other engine
                ("first_switched") and to the same engine ("first_same"), the number of answers and
                of wrong answers since the start, and the GiB moved in and out per switch
  …-contended   the durations of the answers, and the throughput of both engines divided by the
                throughput of one
  asleep        the seconds from `nvsharectl pause` of both engines until both are asleep, the GPU
                memory in use before they started and while they sleep, and the seconds from
                `nvsharectl resume` of both to the end of the first answer, and from there to
                the end of the other engine's answer
  sleep, …      the seconds from the call of sleep() of one engine to the first token of the other,
                and their parts. `swapped` are the GiB that nvshare moved in and out so far
A failed step does not stop the next. The lines are also in results.jsonl in --out, with the logs of
all programs and the scheduler's records. The exit status is 1 if a step failed or an answer was
wrong.

With --json, the time to the first token after a switch between two `vllm serve` and the number of
wrong answers are written as figures. If ENABLE_KVCACHED=true is set, so is the throughput of both
engines.

The step `asleep` needs nvsharectl and nvshare-checkpoint in --programs, and an ordinary user: the
scheduler cannot checkpoint programs of root.

Needs a GPU (two for `tensor-native` and `tensor`, which therefore are not in the default of
--steps), vLLM, PyTorch and transformers.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from pathlib import Path

import figures
import stage
import vllm_engine

HERE = Path(__file__).resolve().parent
GIB = 2**30
UTILIZATION = 0.9  # part of --free that an engine may allocate
FIRST_PORT = 8001
SERVED_NAME = "m"
TENSOR = 2  # GPUs of an engine in the steps `tensor-native` and `tensor`
SLEEP_SWITCHES, AWAKE_ROUNDS, SLEEPS = 4, 6, 4
ALONE_SECONDS = 5
LIMITS = {"eager": 110, "graph": 110, "default": 200, "pair": 160, "http": 480, "asleep": 150, "sleep": 120, "sleep-nvshare": 150}
LIMITS |= {"tensor-native": 150, "tensor": 220}
STEPS = ("eager", "graph", "pair", "http", "asleep", "sleep", "sleep-nvshare")
SHORTEST_STEP = 20  # seconds: a step does not begin if less of the budget is left
ENVIRONMENT = {
    # The native reference and all engines must select the same kernels, and flashinfer and DeepGEMM
    # are not always installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_RUST_FRONTEND": "0",
    # Without it, apache-tvm-ffi compiles an extension when it is imported.
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    # The machine may have no network.
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "NO_COLOR": "1",
}


class Failed(Exception):
    pass


class OutOfTime(BaseException):
    """Ends a step. It is no Exception, so that no handler of a step takes it for an answer's error."""


# The model and the plugin.

BEGIN, END = "<s>", "</s>"


def write_model(directory):
    """Writes the configuration and a tokenizer. There is no weights file: vllm_weights.py fills the
    weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = vllm_engine.VOCABULARY
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary}
    config |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}
    config |= {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    config |= {"tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True}
    config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    special = {"bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config | special | {"pad_token_id": 1}, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(special))
    words = [BEGIN, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{number}" for number in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    said |= {"bos_token": BEGIN, "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))


def write_plugin(directory):
    """Makes vllm_weights.py a plugin that every vLLM process with `directory` in PYTHONPATH loads.
    vLLM finds plugins by their entry points, so a patch in this process would not reach the engine's
    own process."""
    shutil.copy(HERE / "vllm_weights.py", directory)
    package = directory / "vllm_weights-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-weights\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_weights = vllm_weights:register\n")


# Engines and servers.


class Program:
    def __init__(self, name, words, environment, log, **pipes):
        self.name, self.log, self.began = name, log, time.time()
        with open(log, "a") as errors:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                stderr=errors,
                env=os.environ | environment,
                start_new_session=True,
                **pipes,
            )

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        end_session(self.process.pid)

    def errors(self):
        """Returns the last lines of the log that look like errors."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if "rror" in line or "Exception" in line][-4:]


def end_session(session):
    """Kills the session's remaining processes. vLLM's engine process can have its own process
    group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if path.read_text().rsplit(")", 1)[1].split()[3] == str(session):
                os.kill(int(path.parent.name), signal.SIGKILL)


class Engine(Program):
    """vllm_engine.py."""

    def __init__(self, name, words, environment, log):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(name, words, environment, log, **pipes)
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                self.lines.put(json.loads(line))
        self.lines.put({"error": "ended"})

    def hear(self, patience):
        try:
            said = self.lines.get(timeout=max(0.1, patience))
        except queue.Empty:
            raise Failed(f"{self.name}: no answer after {patience:.0f} s {self.errors()}") from None
        if "error" in said:
            raise Failed(f"{self.name}: {said} {self.errors()}")
        return said

    def ready(self, patience):
        return self.hear(self.began + patience - time.time())

    def call(self, operation, patience=90, **more):
        self.process.stdin.write(json.dumps({"op": operation} | more) + "\n")
        self.process.stdin.flush()
        return self.hear(patience)

    def ask(self, number):
        return self.call("ask", prompt=number)


class Server(Program):
    """`vllm serve`."""

    def __init__(self, name, words, environment, log, port):
        self.address = f"http://127.0.0.1:{port}"
        with open(log, "a") as output:
            super().__init__(name, words, environment, log, stdin=subprocess.DEVNULL, stdout=output)

    def ready(self, patience):
        while time.time() < self.began + patience:
            if self.process.poll() is not None:
                raise Failed(f"{self.name}: ended with {self.process.returncode} {self.errors()}")
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=2).read()
                return {"seconds": round(time.time() - self.began, 2)}
            except OSError:
                time.sleep(0.2)
        raise Failed(f"{self.name}: not ready after {patience:.0f} s {self.errors()}")

    def ask(self, number):
        body = {"model": SERVED_NAME, "prompt": vllm_engine.prompt(number), "max_tokens": vllm_engine.ANSWER_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode(), headers)
        began, first, tokens = time.perf_counter(), None, []
        with urllib.request.urlopen(request, timeout=90) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                if choices:
                    first = first or time.perf_counter() - began
                    tokens += choices[0].get("token_ids") or []
        return {"first": first, "whole": time.perf_counter() - began, "hash": vllm_engine.digest(tokens)}


def summary(values):
    return figures.summary(values) | {"min": round(min(values), 4)} if values else None


# Steps.


class Answers:
    """Compares answers with the expected hashes, and counts them."""

    def __init__(self, expected):
        self.expected, self.count, self.wrong = expected, 0, 0

    def ask(self, program, number):
        number %= vllm_engine.PROMPTS
        answer = program.ask(number)
        self.count += 1
        if self.expected and answer["hash"] != self.expected[number]:
            self.wrong += 1
        return answer

    def counts(self):
        return {"answers": self.count, "wrong": self.wrong, "compared": bool(self.expected)}


class Run:
    def __init__(self, arguments, directory):
        self.arguments, self.directory, self.began = arguments, directory, time.time()
        self.programs, self.failed, self.figures = set(), False, []
        self.kept = arguments.out / "native.json"
        self.hashes = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        self.metrics = directory / "metrics.sock"
        # vLLM takes a fraction of the GPU's total memory, which the ballast does not lower.
        self.total = total_memory()
        self.utilization = round(UTILIZATION * arguments.free / self.total, 4)

    def say(self, step, **what):
        line = json.dumps({"step": step, "at": round(time.time() - self.began, 1)} | what)
        print(line, flush=True)
        with open(self.arguments.out / "results.jsonl", "a") as file:
            file.write(line + "\n")
        self.failed |= not what.get("ok", True)

    def log(self, name):
        return self.arguments.out / f"{name}.log"

    def engine(self, name, environment, mode="graph", sleep_mode=False, tensor=1):
        words = [sys.executable, HERE / "vllm_engine.py", "--model", self.arguments.model, "--mode", mode]
        words += ["--utilization", self.utilization, "--tensor", tensor]
        words += ["--backend", self.arguments.backend] if self.arguments.backend else []
        words += ["--sleep-mode"] if sleep_mode else []
        return self.started(Engine(name, words, environment, self.log(name)))

    def server(self, name, environment, port):
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.arguments.model]
        words += ["--host", "127.0.0.1", "--port", port, "--served-model-name", SERVED_NAME]
        words += ["--load-format", "dummy", "--dtype", "bfloat16", "--seed", 0]
        words += ["--gpu-memory-utilization", self.utilization, "--max-model-len", vllm_engine.MAX_MODEL_LEN]
        words += ["--max-num-batched-tokens", vllm_engine.MAX_BATCHED_TOKENS]
        words += ["--max-num-seqs", vllm_engine.PROMPTS, "--no-enable-prefix-caching"]
        words += ["--compilation-config", json.dumps(vllm_engine.GRAPHS)]
        words += ["--attention-backend", self.arguments.backend] if self.arguments.backend else []
        return self.started(Server(name, words, environment, self.log(name), port))

    def started(self, program):
        self.programs.add(program)
        return program

    def clear(self):
        for program in self.programs:
            program.end()
        self.programs.clear()

    @contextlib.contextmanager
    def ballast(self, gpus=1):
        """Leaves --free GiB of each of the GPUs free."""
        with contextlib.ExitStack() as stack:
            for gpu in range(gpus):
                left = stack.enter_context(stage.ballast(self.arguments.free, gpu))
                self.say("ballast", gpu=gpu, total=self.total, **left)
                if left["free-gib"] < self.arguments.free - 0.1:
                    raise Failed(f"only {left['free-gib']} GiB of GPU {gpu} are free")
            try:
                yield
            finally:
                self.clear()  # before the memory that the ballast kept from the programs becomes free

    @contextlib.contextmanager
    def scheduler(self, step):
        """Runs a scheduler. Yields the environment of its programs."""
        settings = f"{self.arguments.settings}\n[metrics]\nlisten = {json.dumps(str(self.metrics))}\n"
        daemon = stage.scheduler(self.arguments.programs, self.directory, settings)
        try:
            time.sleep(1.5)  # until it has measured the GPU memory of other processes
            yield stage.under_nvshare(self.arguments.programs, self.directory)
        finally:
            self.clear()
            stage.end(daemon)
            for name in ("scheduler.log", "record.jsonl"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.move(self.directory / name, self.arguments.out / f"{step}-{name}")

    def swapped(self):
        """Returns the GiB that nvshare has moved in and out."""
        return [round(moved / GIB, 2) for moved in stage.swapped(self.metrics)]

    def reference(self, step="graph"):
        """Returns the native hashes: of this run, or of an earlier run with the same --out."""
        return self.hashes.get(step)

    def native(self, step):
        if step == "tensor-native":
            engine = self.engine(step, {}, tensor=TENSOR)
        else:
            engine = self.engine(step, {}, mode=step)
        ready = engine.ready(150)
        one, two = engine.call("all"), engine.call("all")
        batches = [engine.call("batch") for _ in range(2)]
        self.hashes[step] = one["hashes"]
        self.kept.write_text(json.dumps(self.hashes))
        equal = one["hashes"] == two["hashes"]
        said = {"ok": equal, "ready": ready, "repeat_equal": equal}
        said["batch_equal"] = batches[0]["hashes"] == batches[1]["hashes"]
        said["batch_like_single"] = sum(a == b for a, b in zip(batches[0]["hashes"], one["hashes"]))
        self.say(step, **said, **one | {"batch": batches[1]["whole"]})

    def pair(self, step):
        tensor = TENSOR if step == "tensor" else 1
        with self.ballast(tensor), self.scheduler(step) as environment:
            if step == "http":
                programs = [self.server(f"http-{i}", environment, FIRST_PORT + i) for i in range(2)]
            else:
                programs = [self.engine(f"{step}-{i}", environment, tensor=tensor) for i in range(2)]
            ready = [program.ready(self.arguments.start) for program in programs]
            self.say(f"{step}-start", ok=True, ready=ready, swapped=self.swapped())
            answers = Answers(self.reference("tensor-native" if step == "tensor" else "graph"))
            self.switches(step, programs, answers)
            self.contended(step, programs, answers)

    def switches(self, step, programs, answers):
        # The first switch to each program is not measured, because it creates host buffers.
        for program in programs:
            answers.ask(program, 0)
        before, switched, same, whole, number = self.swapped(), [], [], [], 0
        until = time.time() + self.arguments.switch_time
        while len(switched) < self.arguments.switches and time.time() < until:
            for program in programs:
                answer = answers.ask(program, number)
                switched.append(answer["first"])
                whole.append(answer["whole"])
                for _ in range(self.arguments.questions - 1):
                    number += 1
                    same.append(answers.ask(program, number)["first"])
        time.sleep(1)  # until the clients have reported the moved bytes
        moved = [round((b - a) / len(switched), 2) for a, b in zip(before, self.swapped())] if switched else None
        said = {"first_switched": summary(switched), "first_same": summary(same), "whole_switched": summary(whole)}
        self.say(f"{step}-switches", ok=not answers.wrong, **answers.counts(), **said, moved=moved)
        if step == "http" and switched:
            note = f"{len(switched)} switches between two `vllm serve` of {UTILIZATION * self.arguments.free:.0f} GiB"
            note += f" in {self.arguments.free:g} GiB; {moved[0]} GiB in and {moved[1]} GiB out per switch"
            value = figures.percentile(switched, 0.99)
            self.figures = [("vllm-first-token-after-switch-p99", value, "s", note)]
            if answers.expected:
                note = f"of {answers.count} answers of 32 tokens, greedy decoding"
                self.figures.append(("vllm-outputs-changed", answers.wrong, "count", note))

    def contended(self, step, programs, answers):
        errors = []

        def loop(program, seconds, took):
            end, number = time.time() + seconds, 0
            while (began := time.time()) < end:
                try:
                    answers.ask(program, number)
                except Exception as e:
                    errors.append(f"{program.name}: {type(e).__name__}: {e}"[:300])
                    return
                took.append(time.time() - began)
                number += 1

        answers.ask(programs[0], 0)  # The memory of the program that runs alone is on the GPU.
        alone, each = [], [[] for _ in programs]
        loop(programs[0], ALONE_SECONDS, alone)
        began = time.time()
        threads = [
            threading.Thread(target=loop, args=[program, self.arguments.contended, took], daemon=True)
            for program, took in zip(programs, each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Answers in progress at the end count, and so does the time until they are complete.
        rate = sum(map(len, each)) / (time.time() - began)
        said = {"alone": summary(alone), "each": [summary(took) for took in each]}
        said["throughput"] = round(rate / (len(alone) / sum(alone)), 3) if alone else None
        if said["throughput"] and os.environ.get("ENABLE_KVCACHED") == "true":
            note = f"two engines with kvcached in {self.arguments.free:g} GiB, {sum(map(len, each))} answers of both"
            self.figures.append(("kvcached-pair-over-alone", said["throughput"], "ratio", note))
        ok = not answers.wrong and not errors
        self.say(f"{step}-contended", ok=ok, errors=errors, **answers.counts(), **said)

    def asleep(self, step):
        answers = Answers(self.reference())
        with self.ballast(), self.scheduler(step) as environment:
            before = used_memory()
            engines = [self.engine(f"{step}-{i}", environment) for i in range(2)]
            ready = [engine.ready(self.arguments.start) for engine in engines]
            took, left, woken = [], [], []
            for number in range(SLEEPS):
                for engine in engines:
                    answers.ask(engine, number)
                began = time.time()
                clients = [client["pid"] for client in self.status()]
                for pid in clients:
                    self.control("pause", str(pid))
                while any(client["sleep"] != "sleeping" for client in self.status()):
                    if time.time() > began + 60:
                        raise Failed(f"not asleep after 60 s: {self.status()}")
                    time.sleep(0.02)
                took.append(time.time() - began)
                left.append(used_memory())
                began = time.time()
                for pid in clients:
                    self.control("resume", str(pid))
                for engine in engines:
                    answers.ask(engine, number + 1)
                    woken.append(time.time() - began)
                    began = time.time()
            said = {"pause": summary(took), "resume_whole_answer": summary(woken)}
            said |= {"used_mib": {"before": before, "asleep": left}, "ready": ready}
            self.say(step, ok=not answers.wrong, **answers.counts(), **said)

    def control(self, *words):
        words = [self.arguments.programs / "nvsharectl", "--control", self.directory / "control.sock", *words]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def status(self):
        return json.loads(self.control("--json", "status"))["clients"]

    def sleep_mode(self, step, under_nvshare):
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.ballast())
            environment = stack.enter_context(self.scheduler(step)) if under_nvshare else {}
            first = self.engine(f"{step}-a", environment, sleep_mode=True)
            ready = [first.ready(self.arguments.start)]
            expected = first.call("all")["hashes"]
            slept = [first.call("sleep")["seconds"]]
            second = self.engine(f"{step}-b", environment, sleep_mode=True)
            ready.append(second.ready(self.arguments.start))
            equal = [second.call("all")["hashes"] == expected]
            equal.append(self.reference() == expected if self.reference() else None)
            self.say(f"{step}-start", ok=False not in equal, ready=ready, sleep=slept[0], equal=equal)
            answers = Answers(expected)
            running, waiting = second, first
            switched, woken, firsts = [], [], []
            for number in range(SLEEP_SWITCHES):
                began = time.time()
                slept.append(running.call("sleep")["seconds"])
                woken.append(waiting.call("wake")["seconds"])
                asked = time.time()
                firsts.append(answers.ask(waiting, number)["first"])
                switched.append(asked - began + firsts[-1])
                running, waiting = waiting, running
            said = {"switch_first_token": summary(switched), "sleep": summary(slept), "wake": summary(woken)}
            said |= {"first_after_wake": summary(firsts), "swapped": self.swapped() if under_nvshare else None}
            self.say(step, ok=not answers.wrong, **answers.counts(), **said)
            if under_nvshare:
                waiting.call("wake")
                self.both_awake(f"{step}-both-awake", [first, second], Answers(expected))

    def both_awake(self, step, engines, answers):
        firsts = []
        for number in range(AWAKE_ROUNDS):
            firsts += [answers.ask(engine, number)["first"] for engine in engines]
        said = {"first_switched": summary(firsts), "swapped": self.swapped()}
        self.say(step, ok=not answers.wrong, **answers.counts(), **said)

    def step(self, step):
        if step in ("eager", "graph", "default", "tensor-native"):
            self.native(step)
        elif step in ("pair", "http", "tensor"):
            self.pair(step)
        elif step == "asleep":
            self.asleep(step)
        else:
            self.sleep_mode(step, step == "sleep-nvshare")

    def run(self):
        measured = figures.measured_files(self.arguments.programs)
        self.say("begin", total=self.total, utilization=self.utilization, steps=self.arguments.steps, measured=measured)
        for step in self.arguments.steps:
            left = self.arguments.budget - (time.time() - self.began)
            if left < SHORTEST_STEP:
                self.say(step, ok=False, error="no time left")
                continue
            began = time.time()
            try:
                signal.setitimer(signal.ITIMER_REAL, min(left, LIMITS[step]))
                self.step(step)
            except (Exception, OutOfTime, SystemExit) as e:
                where = None if isinstance(e, (Failed, OutOfTime)) else traceback.format_exc().splitlines()[-3:]
                self.say(step, ok=False, error=f"{type(e).__name__}: {e}"[:2500], where=where)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.clear()
            self.say(f"{step}-took", seconds=round(time.time() - began, 1))


def used_memory():
    """Returns the MiB of the GPU in use, by any program."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0])


def total_memory():
    """Returns the GiB of the GPU. Another process asks, so that this one has no CUDA context."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[1])"]
    return int(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]) / GIB


def touch(gib):
    """Uses host memory once, in the background. The RAM of some virtual machines grows as it is
    used, which would slow down the first evictions."""
    program = f"keep = [b'\\1' * {GIB} for _ in range({gib})]"
    subprocess.Popen([sys.executable, "-c", program], preexec_fn=stage.end_with_parent)


def steps(text):
    chosen = text.split(",")
    for step in chosen:
        if step not in LIMITS:
            raise argparse.ArgumentTypeError(f"unknown step {step}")
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--programs", type=Path, default=Path("target/release"), help="directory of nvshare-scheduler and libnvshare.so"
    )
    parser.add_argument("--steps", type=steps, default=list(STEPS))
    parser.add_argument("--free", type=float, default=40, help="GiB that the ballast leaves free")
    parser.add_argument("--switches", type=int, default=16)
    parser.add_argument("--questions", type=int, default=2, help="questions after each switch")
    parser.add_argument("--switch-time", type=float, default=25, help="maximum seconds of the switches")
    parser.add_argument("--contended", type=float, default=10, help="seconds of back-to-back questions to both")
    parser.add_argument("--start", type=float, default=90, help="timeout of a start, in seconds")
    parser.add_argument("--model", type=Path, help="directory of a model (default: the model above)")
    parser.add_argument("--backend", default="", help="vLLM's attention backend (default: vLLM's choice)")
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--touch", type=int, default=0, help="GiB of host memory to use once at the beginning")
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--commit", help="commit of the measured binaries (default: the checked-out commit)")
    arguments = parser.parse_args()
    arguments.programs = arguments.programs.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Turns signals into exceptions, so that all started processes are killed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGALRM, out_of_time)
    if arguments.touch:
        touch(arguments.touch)
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        (directory / "plugin").mkdir()
        write_plugin(directory / "plugin")
        paths = [str(directory / "plugin"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if not arguments.model:
            arguments.model = directory / "model"
            arguments.model.mkdir()
            write_model(arguments.model)
        run = Run(arguments, directory)
        run.run()
        if arguments.json and run.figures:
            figures.add(arguments.json, run.figures, arguments.commit)
    sys.exit(1 if run.failed else 0)


def out_of_time(*_):
    raise OutOfTime("the step's time is over")


if __name__ == "__main__":
    main()
