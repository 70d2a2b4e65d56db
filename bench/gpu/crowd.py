#!/usr/bin/env python3
"""Checks that ten programs with different allocators, whose memory does not fit on the GPU together,
compute the same results under nvshare as natively.

  crowd.py [--programs target/release] [--steps native,again,nvshare]
           [--only jax,jax-managed,rmm-pool,rmm-arena,rmm-async,rmm-managed,torch,torch-async,torch-segments,cupy]
           [--free 48] [--gib 3] [--jax 40] [--pieces 6] [--settings TOML] [--budget 470]
           [--out DIRECTORY]

  jax             JAX, which allocates 75 % of the GPU when it starts, as it does by default. The
                  program sees a GPU of --jax GiB
  jax-managed     JAX with TF_FORCE_UNIFIED_MEMORY: nine tenths of the 4 GiB that the program sees, as
                  managed memory
  rmm-pool        CuPy with RAPIDS' memory pool
  rmm-arena       CuPy with RAPIDS' arenas
  rmm-async       CuPy with RAPIDS' pool of cudaMallocAsync
  rmm-managed     CuPy with RAPIDS' pool of at most 2.5 GiB of managed memory
  torch           PyTorch: training steps with Adam
  torch-async     the same with backend:cudaMallocAsync
  torch-segments  the same with expandable_segments
  cupy            CuPy with its own memory pool

All others allocate about --gib GiB. After each of --pieces pieces of work, a program prints a
checksum of all its memory.

The steps:
  native   all programs at the same time, without nvshare and with the whole GPU. JAX does not
           preallocate. The checksums are the reference, and are kept in --out
  again    the same again; a program whose checksums differ is not compared
  nvshare  under nvshare, while a ballast process leaves --free GiB of the GPU free. The programs with
           managed memory start first, so that the GPU never has less free memory than they ask for

Prints JSON lines:
  program  for each program of a step: the seconds to start, for each piece, and in all; the number of
           compared and of wrong checksums; whether its memory is managed; or why it failed
  STEP     the numbers of programs, of checksums and of wrong ones; under nvshare the GiB moved in and
           out, and the seconds until all programs were done
The lines are also in results.jsonl in --out, with all logs in logs.tar.gz. The exit status is 1 if a
checksum was wrong or a program failed.

Needs a GPU, PyTorch, JAX, CuPy, and rmm for CUDA 13. Programs of missing packages fail alone.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import figures
import stage

GIB = 2**30
MANAGED = 2  # GiB of each program with managed memory
ARRAY = 8192  # elements of an array's edge; an array of floats has a quarter of a GiB
LAYER = 4096  # elements of a layer's edge; its floats have a 16th of a GiB
STEPS = {"native": 130, "again": 130, "nvshare": 260}  # limits in seconds
SHORTEST_STEP = 30  # seconds: a step does not begin if less of the budget is left
IS_MANAGED = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED


# Programs. Each returns a function that does a piece of work, a function that returns the checksum,
# and a device address.


def arrays(gib):
    import cupy

    held = []
    for n in range(max(2, int(4 * gib))):
        held.append(cupy.random.RandomState(n).standard_normal((ARRAY, ARRAY), dtype=cupy.float32))
    part = ARRAY // 4

    def piece():
        for n in range(len(held)):
            held[n] = cupy.tanh(held[n] * 1.01 + held[n - 1][::-1] * 0.1)
            held[n][:part, :part] = cupy.tanh(held[n][:part, :part] @ held[n - 1][:part, :part] / 45)

    def total():
        # The sum of integers does not depend on the order of the additions.
        return sum(int(array.view(cupy.int32).sum(dtype=cupy.int64)) for array in held)

    return piece, total, held[0].data.ptr


def rmm(kind, gib):
    import cupy
    import rmm
    from rmm.allocators.cupy import rmm_cupy_allocator

    def bytes_of(gib):
        return int(gib * GIB) // 2**20 * 2**20

    device = rmm.mr.CudaMemoryResource
    if kind == "pool":
        memory = rmm.mr.PoolMemoryResource(device(), initial_pool_size=bytes_of(gib), maximum_pool_size=bytes_of(gib + 4))
    elif kind == "arena":
        memory = rmm.mr.ArenaMemoryResource(device(), arena_size=bytes_of(gib + 3))
    elif kind == "async":
        memory = rmm.mr.CudaAsyncMemoryResource(initial_pool_size=bytes_of(gib))
    else:
        gib, managed = MANAGED * 3 / 8, rmm.mr.ManagedMemoryResource()
        memory = rmm.mr.PoolMemoryResource(managed, initial_pool_size=bytes_of(MANAGED), maximum_pool_size=bytes_of(MANAGED + 0.5))
    rmm.mr.set_current_device_resource(memory)
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    return arrays(gib)


def torch(gib):
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    # A layer, its gradient and Adam's two states have a quarter of a GiB.
    layers = [torch.nn.Linear(LAYER, LAYER, device="cuda") for _ in range(max(1, int(4 * gib)))]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    optimizer, data = torch.optim.Adam(model.parameters(), lr=1e-4), torch.randn(1024, LAYER, device="cuda")

    def piece():
        for _ in range(10):
            optimizer.zero_grad()
            (model(data) ** 2).mean().backward()
            optimizer.step()
        torch.cuda.synchronize()

    def total():
        return sum(int(weight.detach().view(torch.int32).sum(dtype=torch.int64)) for weight in model.parameters())

    return piece, total, next(model.parameters()).data_ptr()


def jax(gib):
    import jax
    import jax.numpy as jnp

    number = max(1, int(4 * gib))  # layers
    weights = [jax.random.normal(jax.random.key(n), (LAYER, LAYER)) / 64 for n in range(number)]
    momenta = [jnp.zeros_like(weight) for weight in weights]
    data = jax.random.normal(jax.random.key(number), (1024, LAYER))

    def loss(weights):
        x = data
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x**2).mean()

    @jax.jit
    def descend(weights, momenta):
        momenta = [0.9 * m + g for m, g in zip(momenta, jax.grad(loss)(weights))]
        return [w - 1e-3 * m for w, m in zip(weights, momenta)], momenta

    @jax.jit
    def bits(x):
        return jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)

    state = [weights, momenta]
    del weights, momenta

    def piece():
        for _ in range(10):
            state[:] = descend(*state)
        jax.block_until_ready(state)

    return piece, lambda: sum(int(bits(x)) for part in state for x in part), state[0][0].unsafe_buffer_pointer()


PROGRAMS = {
    "jax-managed": lambda gib: jax(MANAGED / 2),
    "rmm-managed": lambda gib: rmm("managed", gib),
    "jax": jax,
    "rmm-pool": lambda gib: rmm("pool", gib),
    "rmm-arena": lambda gib: rmm("arena", gib),
    "rmm-async": lambda gib: rmm("async", gib),
    "torch": torch,
    "torch-async": torch,
    "torch-segments": torch,
    "cupy": arrays,
}
FIRST = ("jax-managed", "rmm-managed")
# Autotuning can choose another algorithm in each run, which changes the sums.
XLA = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
TORCH = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ENVIRONMENT = {
    "jax": XLA,
    "jax-managed": XLA,
    "torch": TORCH,
    "torch-async": TORCH | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "torch-segments": TORCH | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def environment_of(name, is_native, arguments):
    own = dict(ENVIRONMENT.get(name, {}))
    if name.startswith("jax") and is_native:
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    elif name == "jax":
        own["NVSHARE_MEMORY_MAX"] = f"{arguments.jax}G"
    elif name == "jax-managed":
        # JAX allocates nine tenths of what it sees as managed memory, whatever fraction it is told.
        own |= {"TF_FORCE_UNIFIED_MEMORY": "1", "NVSHARE_MEMORY_MAX": f"{2 * MANAGED}G"}
    return own


def is_managed(address):
    """Whether the memory is managed; None if the driver does not tell."""
    managed = ctypes.c_uint()
    with contextlib.suppress(OSError):
        if not ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(managed), IS_MANAGED, ctypes.c_uint64(address)):
            return bool(managed.value)
    return None


def work(name, gib, pieces):
    """Child process: allocates its memory, waits for a line of input, and does its pieces of work."""
    stage.end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Messages of frameworks go to standard error.

    def say(**what):
        print(json.dumps(what), file=answers, flush=True)

    begun = time.time()
    piece, total, address = PROGRAMS[name](gib)
    first = total()
    say(loaded=True, sum=first, managed=is_managed(address), seconds=round(time.time() - begun, 1))
    sys.stdin.readline()
    for _ in range(pieces):
        began = time.time()
        piece()
        say(sum=total(), seconds=round(time.time() - began, 2))
    say(done=True)


# The steps.


class Run:
    def __init__(self, arguments, directory):
        self.arguments, self.directory, self.began = arguments, directory, time.time()
        self.metrics, self.failed = directory / "metrics.sock", False
        self.logs = directory / "logs"
        self.logs.mkdir()
        self.kept = arguments.out / "crowd-native.json"
        self.native = json.loads(self.kept.read_text()) if self.kept.exists() else {}

    def say(self, kind, **what):
        line = json.dumps({"kind": kind, "at": round(time.time() - self.began, 1)} | what)
        print(line, flush=True)
        with open(self.arguments.out / "results.jsonl", "a") as file:
            file.write(line + "\n")

    @contextlib.contextmanager
    def stage(self, step, said):
        """Yields the environment of the step's programs."""
        if step != "nvshare":
            yield {}
            return
        with contextlib.ExitStack() as stack:
            self.say("ballast", **stack.enter_context(stage.ballast(self.arguments.free)))
            settings = f"time-quantum = 1\n{self.arguments.settings}\n[metrics]\nlisten = {json.dumps(str(self.metrics))}\n"
            daemon = stage.scheduler(self.arguments.programs, self.directory, settings)
            stack.callback(stage.end, daemon)
            time.sleep(1.5)  # until it has measured the GPU memory of other processes
            try:
                yield stage.under_nvshare(self.arguments.programs, self.directory)
            finally:
                with contextlib.suppress(OSError):
                    said["swapped-gib"] = [round(count / GIB, 2) for count in stage.swapped(self.metrics)]
                for name in ("scheduler.log", "record.jsonl"):
                    with contextlib.suppress(FileNotFoundError):
                        shutil.move(self.directory / name, self.logs / f"{step}-{name}")

    def start(self, step, names, environment, heard, until):
        """Starts the programs. Returns them once they have allocated their memory."""
        children = []

        def hear(name, said):
            heard[name].append(said)

        for name in names:
            words = [__file__, "--child", name, self.arguments.gib, self.arguments.pieces]
            own = environment | environment_of(name, step != "nvshare", self.arguments)
            children.append(stage.Child(name, words, own, self.logs / f"{step}-{name}.log", hear))
        for child in children:
            child.loaded.wait(max(0, until - time.time()))
        return children

    def step(self, step, limit):
        until, began = time.time() + limit, time.time()
        heard, children, troubles, line = {name: [] for name in self.arguments.only}, [], {}, {}
        first = [name for name in heard if name in FIRST]
        try:
            with self.stage(step, line) as environment:
                try:
                    children += self.start(step, first, environment, heard, until)
                    children += self.start(step, [name for name in heard if name not in FIRST], environment, heard, until)
                    line["start-seconds"] = round(time.time() - began, 1)
                    for child in children:
                        with contextlib.suppress(OSError):
                            child.process.stdin.write("\n")
                            child.process.stdin.flush()
                    for child in children:
                        child.thread.join(max(0, until - time.time()))
                    line["seconds"] = round(time.time() - began, 1)
                    troubles = {child.name: child.trouble() for child in children}
                finally:
                    stage.end(*(child.process for child in children))
        finally:
            self.judge(step, heard, line, troubles)

    def judge(self, step, heard, line, troubles):
        count = wrong = failed = 0
        for name, said in heard.items():
            sums = [each["sum"] for each in said if "sum" in each]
            pieces = [each["seconds"] for each in said[1:] if "seconds" in each]
            result = {"step": step, "program": name, "checksums": len(sums), "piece-seconds": pieces}
            result |= {key: said[0][key] for key in ("managed", "seconds") if said}
            reference = self.native.get(name)
            if step == "native":
                self.native[name] = sums
            elif reference is None:
                result["uncompared"] = "no native checksums, or they do not repeat"
            else:
                result["wrong"] = sum(a != b for a, b in zip(sums, reference))
                count, wrong = count + min(len(sums), len(reference)), wrong + result["wrong"]
                if step == "again" and result["wrong"]:
                    del self.native[name]
            if not any("done" in each for each in said):
                result["failed"], failed = troubles.get(name) or "did not complete", failed + 1
            self.say("program", **result)
        if step != "nvshare":
            self.kept.write_text(json.dumps(self.native))
        ok = not failed and (not wrong or step == "again")
        self.failed |= not ok
        self.say(step, ok=ok, programs=len(heard), failed=failed, compared=count, wrong=wrong, **line)

    def run(self):
        measured = figures.measured_files(self.arguments.programs)
        missing = [name for name in ("rmm", "cupy", "jax", "torch") if not importlib.util.find_spec(name)]
        self.say("begin", steps=self.arguments.steps, missing=missing, measured=measured, hardware=figures.hardware())
        for step in self.arguments.steps:
            left = self.arguments.budget - (time.time() - self.began)
            if left < SHORTEST_STEP:
                self.failed = True
                self.say(step, ok=False, errors=["no time left"])
                continue
            try:
                self.step(step, min(left, STEPS[step]))
            except (Exception, SystemExit) as error:
                self.failed = True
                self.say(step, ok=False, errors=[f"{type(error).__name__}: {error}"[:1500]], where=traceback.format_exc().splitlines()[-3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of nvshare-scheduler and libnvshare.so")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=list(STEPS))
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PROGRAMS))
    parser.add_argument("--free", type=float, default=48, help="GiB that the ballast leaves free")
    parser.add_argument("--gib", type=float, default=3, help="GiB of a program")
    parser.add_argument("--jax", type=int, default=40, help="GiB of the GPU that JAX sees, of which it allocates 75 %%")
    parser.add_argument("--pieces", type=int, default=6, help="pieces of work of each program")
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--budget", type=float, default=470, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    known = [*STEPS, *PROGRAMS]
    if unknown := [name for name in arguments.steps + arguments.only if name not in known]:
        parser.error(f"unknown step or program: {unknown[0]}")
    arguments.programs = arguments.programs.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Turns signals into an exit, so that all started processes are killed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        run = Run(arguments, Path(directory))
        try:
            run.run()
        finally:
            shutil.make_archive(arguments.out / "logs", "gztar", run.logs)
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        work(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
