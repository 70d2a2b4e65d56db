#!/usr/bin/env python3
"""Checks that programs of several frameworks compute the same results although they are put to
sleep at random moments, even during their work.

  frameworks.py [--programs target/release] [--rounds 20]
                [--only graphs,compile,jax,cupy,textures,warp,pools,llama] [--limit 400] [--seed 1]

  graphs   PyTorch: a training step, captured as a CUDA graph
  compile  PyTorch: a training step, compiled by torch.compile
  jax      JAX: a jitted training step, with JAX's preallocation
  cupy     CuPy: matrix products, with CuPy's memory pool
  textures CuPy: reads of a texture of 256 MiB, which is a driver array; the values are summed in
           ordinary memory
  warp     Warp: a step of a particle simulation, captured as a CUDA graph, with Warp's memory pool
  pools    PyTorch: a training step, with backend:cudaMallocAsync
  llama    a Llama of 4 layers that continues a text, with greedy decoding

Each program first runs twice natively, and prints a checksum after each piece of work. A program
whose two runs differ is skipped. Then all programs run at the same time under one scheduler. In
each round, a program is paused at a random moment, either during a piece of work or between two
pieces. It is resumed once it sleeps. With several GPUs, about 40 % of the rounds also move the
program to another GPU, while it sleeps or while it works. Every checksum must equal the checksum of
the native run.

Prints a line of JSON for each program: the numbers of rounds, sleeps and moves to another GPU;
their durations in seconds (median and slowest); the peaks of allocated and of pinned memory in MiB;
failed operations with their reasons; and wrong checksums. The exit status is 1 if a checksum is
wrong or a program ends early.

Needs `nvshare-checkpoint` in --programs and the frameworks; programs of missing frameworks are
skipped. As root, the script also needs `setpriv`; see sleepers.py.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import sleepers
import stage

PATIENCE = 60
# After this many seconds, a reported sleep obstacle counts. Earlier, the program may just be busy.
OBSTACLE = 5
SETTINGS = 'time-quantum = 1\nsleep-after = "never"\n'


def torch_model():
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048) for _ in range(8)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh()))).cuda()
    return torch, model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(512, 2048, device="cuda")


def torch_sum(torch, model):
    # The sum of integers does not depend on the order of the additions.
    return sum(int(parameter.detach().view(torch.int32).sum(dtype=torch.int64)) for parameter in model.parameters())


def train(compile=False):
    torch, model, optimizer, data = torch_model()

    def forward():
        return (model(data) ** 2).mean()

    forward = torch.compile(forward) if compile else forward

    def step():
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    return step, lambda: torch_sum(torch, model)


def graphs():
    step, total = train()
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, total


def pools():
    return train()


def jax():
    import jax
    import jax.numpy as jnp

    weights = [jax.random.normal(jax.random.key(n), (2048, 2048)) / 45 for n in range(8)]
    data = jax.random.normal(jax.random.key(9), (512, 2048))

    @jax.jit
    def descend(weights):
        def loss(weights):
            x = data
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return (x**2).mean()

        return [w - 1e-3 * g for w, g in zip(weights, jax.grad(loss)(weights))]

    state = [weights]

    def step():
        state[0] = descend(state[0])

    def total():
        return sum(int(jnp.sum(jax.lax.bitcast_convert_type(w, jnp.uint32), dtype=jnp.uint32)) for w in state[0])

    return step, total


def cupy():
    import cupy

    random_ = cupy.random.RandomState(1)
    matrices = [random_.standard_normal((2048, 2048), dtype=cupy.float32) / 45 for _ in range(16)]

    def step():
        x = matrices.pop(0)
        for matrix in matrices:
            x = cupy.tanh(x @ matrix)
        matrices.append(x)

    return step, lambda: sum(int(matrix.view(cupy.int32).sum(dtype=cupy.int64)) for matrix in matrices)


def textures():
    import cupy
    from cupy.cuda import texture

    number = 256  # the texture has 256 x 256 x 1024 floats
    channel = texture.ChannelFormatDescriptor(32, 0, 0, 0, cupy.cuda.runtime.cudaChannelFormatKindFloat)
    array = texture.CUDAarray(channel, number, number, 4 * number)
    array.copy_from(cupy.random.RandomState(1).standard_normal((4 * number, number, number), dtype=cupy.float32))
    resource = texture.ResourceDescriptor(cupy.cuda.runtime.cudaResourceTypeArray, cuArr=array)
    image = texture.TextureObject(resource, texture.TextureDescriptor((cupy.cuda.runtime.cudaAddressModeClamp,) * 3))
    code = """extern "C" __global__ void add(float *sum, cudaTextureObject_t image, int n, int turn) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        sum[i] += tex3D<float>(image, (i % n) + 0.5f, (i / n % n) + 0.5f, (i / n / n + turn) % (4 * n) + 0.5f);
    }"""
    add, sums, turn = cupy.RawKernel(code, "add"), cupy.zeros(number**3, dtype=cupy.float32), [0]

    def step():
        turn[0] += 1
        add((number**3 // 256,), (256,), (sums, image, cupy.int32(number), cupy.int32(turn[0])))

    return step, lambda: int(sums.view(cupy.int32).sum(dtype=cupy.int64))


def warp():
    import numpy
    import warp as wp

    @wp.kernel
    def move(at: wp.array(dtype=wp.vec3), speed: wp.array(dtype=wp.vec3)):
        i = wp.tid()
        speed[i] = speed[i] * 0.999 - at[i] * 0.01
        at[i] = at[i] + speed[i] * 0.01

    random_ = numpy.random.default_rng(1)
    at, speed = (wp.array(random_.standard_normal((2**22, 3)), dtype=wp.vec3, device="cuda:0") for _ in range(2))
    wp.load_module(device="cuda:0")
    with wp.ScopedCapture(device="cuda:0") as capture:
        between = wp.empty_like(at)  # memory of the graph
        wp.copy(between, at)
        wp.launch(move, dim=len(at), inputs=[between, speed], device="cuda:0")
        wp.copy(at, between)

    def total():
        return sum(int(array.numpy().view(numpy.int32).sum(dtype=numpy.int64)) for array in (at, speed))

    return lambda: wp.capture_launch(capture.graph), total


def llama():
    import torch

    import llama as model_of

    torch.use_deterministic_algorithms(True)
    model = model_of.build(layers=4)
    state = [torch.arange(64, device="cuda")[None]]

    def step():
        with torch.inference_mode():
            text = state[0] if state[0].shape[1] < 512 else state[0][:, -64:]
            state[0] = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=8, do_sample=False, pad_token_id=0)

    def total():
        weights = sum(int(weight.view(torch.int16).sum(dtype=torch.int64)) for weight in model.parameters())
        return [weights, state[0][0].tolist()]

    return step, total


WORK = {
    "graphs": (graphs, 400),
    "compile": (lambda: train(compile=True), 300),
    "jax": (jax, 300),
    "cupy": (cupy, 200),
    "textures": (textures, 500),
    "warp": (warp, 300),
    "pools": (pools, 300),
    "llama": (llama, 10),
}
ENVIRONMENT = {
    # Autotuning can choose another algorithm in each run, which changes the sums.
    "jax": {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"},
    "llama": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "pools": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
}


def work(name):
    """Child process: does a piece of work for each input line, and prints the checksum."""
    stage.end_with_parent()
    # Messages that frameworks print go to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    make, steps = WORK[name]
    step, total = make()
    step()
    print(json.dumps(total()), file=answers, flush=True)
    for _ in iter(sys.stdin.readline, ""):
        for _ in range(steps):
            step()
        print(json.dumps(total()), file=answers, flush=True)


class Program:
    def __init__(self, name, environment, directory):
        self.name = name
        own = directory / name
        own.mkdir(exist_ok=True)
        # Frameworks cache compiled code in this directory. The native run fills the cache, and the
        # run under nvshare uses it.
        caches = {"HOME": own, "TORCHINDUCTOR_CACHE_DIR": own, "TRITON_CACHE_DIR": own, "CUPY_CACHE_DIR": own, "WARP_CACHE_PATH": own}
        environment = environment | {key: str(path) for key, path in caches.items()} | ENVIRONMENT.get(name, {})
        self.log = own / "stderr"
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.child = subprocess.Popen([sys.executable, __file__, "--child", name], env=environment, **pipes)

    def begin(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def said(self):
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.child.wait()}: {self.log.read_text()[-1500:]}")
        return json.loads(line)


def natively(name, rounds, directory):
    program, begun = Program(name, dict(os.environ), directory), time.monotonic()
    try:
        sums, begun = [program.said()], time.monotonic()
        for _ in range(rounds):
            program.begin()
            sums.append(program.said())
        return sums, (time.monotonic() - begun) / rounds
    finally:
        stage.end(program.child)


class Sleeper(threading.Thread):
    """A thread that runs one program, and puts it to sleep in each round."""

    def __init__(self, name, expected, seconds, stage_, dice, until):
        super().__init__()
        self.name, self.expected, self.seconds = name, expected, seconds
        self.stage, self.dice, self.until = stage_, dice, until
        self.slept, self.woke, self.moved, self.obstacles, self.wrong, self.rounds = [], [], [], {}, [], 0
        self.demand, self.pinned = 0, 0

    def status(self):
        status = json.loads(self.stage.control("--json", "status"))
        clients = [client for client in status["clients"] if client["pid"] == self.program.child.pid]
        for gpu in clients[0]["gpus"] if clients else []:
            self.demand, self.pinned = max(self.demand, gpu["demand"]), max(self.pinned, gpu["pinned"])
        return status["gpus"], (clients or [None])[0]

    def pause(self):
        """Pauses the program. Returns whether the program sleeps."""
        begun = time.monotonic()
        self.stage.control("pause", str(self.program.child.pid))
        while time.monotonic() - begun < PATIENCE:
            client = self.status()[1]
            if client and client["sleep"] == "sleeping":
                self.slept.append(time.monotonic() - begun)
                return True
            if client and client.get("sleep-obstacle") and time.monotonic() - begun > OBSTACLE:
                break
            time.sleep(0.02)
        why = str(client and client.get("sleep-obstacle"))
        self.obstacles[why] = self.obstacles.get(why, 0) + 1
        return False

    def move(self):
        gpus, client = self.status()
        others = [gpu["uuid"] for gpu in gpus if client["gpus"] and gpu["uuid"] != client["gpus"][0]["uuid"]]
        if not others:
            return
        begun = time.monotonic()
        try:
            self.stage.control("migrate", str(self.program.child.pid), "--to", self.dice.choice(others))
            self.moved.append(time.monotonic() - begun)
        except subprocess.CalledProcessError as error:
            why = (error.stderr or "").strip()
            self.obstacles[why] = self.obstacles.get(why, 0) + 1

    def round(self, expected):
        if self.dice.random() < 0.5:  # between two pieces of work
            asleep = self.pause()
            if asleep and self.dice.random() < 0.5:
                self.move()
            self.program.begin()
        else:
            self.program.begin()
            time.sleep(self.dice.uniform(0, self.seconds))
            if self.dice.random() < 0.3:
                self.move()
            self.pause()
        begun = time.monotonic()
        self.stage.control("resume", str(self.program.child.pid))
        said = self.program.said()
        self.woke.append(time.monotonic() - begun)
        if said != expected:
            self.wrong.append([self.rounds, expected, said])

    def run(self):
        self.program = Program(self.name, self.stage.environment, self.stage.directory)
        try:
            if (said := self.program.said()) != self.expected[0]:
                self.wrong.append([0, self.expected[0], said])
            for expected in self.expected[1:]:
                if time.monotonic() > self.until or self.wrong:
                    break
                self.rounds += 1
                self.round(expected)
        except (RuntimeError, subprocess.SubprocessError) as error:
            self.wrong.append(str(error) + str(getattr(error, "stderr", "") or ""))
        finally:
            stage.end(self.program.child)

    def result(self):
        def times(seconds):
            return {"n": len(seconds), "median": round(statistics.median(seconds), 3), "slowest": round(max(seconds), 3)} if seconds else None

        result = {"program": self.name, "rounds": self.rounds, "slept": times(self.slept), "moved": times(self.moved)}
        memory = {"demand": self.demand >> 20, "pinned": self.pinned >> 20}
        return result | memory | {"obstacles": self.obstacles, "wrong": self.wrong}


class Stage:
    def __init__(self, programs, directory):
        self.programs, self.directory = programs, directory
        self.daemon = stage.scheduler(programs, directory, SETTINGS)
        self.environment = os.environ | stage.under_nvshare(programs, directory)

    def control(self, *words):
        words = [self.programs / "nvsharectl", "--control", self.directory / "control.sock", *words]
        done = subprocess.run(words, text=True, timeout=PATIENCE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True)
        return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(WORK))
    parser.add_argument("--limit", type=float, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if os.geteuid() == 0:
        sleepers.be_nobody()
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory:
        directory, expected, threads = Path(directory), {}, []

        def alone(name):
            try:
                first, seconds = natively(name, options.rounds, directory)
                if (second := natively(name, options.rounds, directory)[0]) != first:
                    differ = [n for n, (a, b) in enumerate(zip(first, second)) if a != b]
                    raise RuntimeError(f"two native runs differ in rounds {differ}")
                expected[name] = first, seconds
            except RuntimeError as error:
                print(json.dumps({"program": name, "skipped": str(error)[-600:]}), flush=True)

        alone_ = [threading.Thread(target=alone, args=(name,)) for name in options.only.split(",")]
        for thread in alone_:
            thread.start()
        for thread in alone_:
            thread.join()
        print(json.dumps({"natively": {name: round(seconds, 2) for name, (_, seconds) in expected.items()}}), flush=True)
        stage_ = Stage(options.programs.resolve(), directory)
        for name, (sums, seconds) in expected.items():
            dice = random.Random(f"{options.seed} {name}")
            threads.append(Sleeper(name, sums, seconds, stage_, dice, begun + options.limit))
            threads[-1].start()
        for thread in threads:
            thread.join()
            print(json.dumps(thread.result()), flush=True)
            wrong += len(thread.wrong)
        stage_.daemon.terminate()
        stage_.daemon.wait()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        work(sys.argv[2])
    else:
        main()
