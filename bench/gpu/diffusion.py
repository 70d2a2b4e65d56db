#!/usr/bin/env python3
"""Checks that diffusion pipelines with low-VRAM offloading render the same images under nvshare as
natively, beside a program without nvshare that grows.

  diffusion.py [--programs target/release] [--steps native,again,pair] [--checkpoints 8,4]
               [--render 8] [--free 24] [--game 12] [--images 4] [--size 1024] [--denoise 2]
               [--settings TOML] [--budget 500] [--out DIRECTORY]

A program holds several checkpoints in host memory: a UNet and a decoder with the shapes of SDXL and
random weights, 4.9 GiB in bf16. As ComfyUI does, it page-locks each large weight of all checkpoints
with cudaHostRegister, and uses PyTorch's backend cudaMallocAsync. It renders --images images with
each of the first --render checkpoints, in turn with two ways of low-VRAM offloading:
  sequential  the weights of each layer are on the GPU only while the layer runs
  streams     the same, but another stream copies the weights of the next layer in advance
The text embeddings are random, so there are no text encoders. Decoding all images at the same time
needs several GiB of GPU memory.

A ballast process leaves --free GiB of the GPU free. The steps:
  native  one program natively, with --render checkpoints; the hashes of its images are the
          reference. They are kept in --out
  again   the same with the first two checkpoints; checks that native hashes repeat
  alone   one program under nvshare, without other programs
  pair    two programs under nvshare, with the two numbers of --checkpoints, beside the game: a
          program without nvshare that allocates 64 MiB sixteen times a second up to --game GiB,
          checks the contents, keeps the memory for some seconds, frees it, and begins again

Prints JSON lines:
  image    one checkpoint of one program: the offloading, the seconds, and whether the images equal
           the native ones
  program  the page-locked GiB and weights, the weights whose page-locking failed, the seconds to
           start and to load, and the peak of allocated GPU memory in GiB
  game     the rounds, the allocations, how many failed, the largest delay of an allocation in
           seconds, and the number of 64-MiB chunks with wrong contents
  STEP     the numbers of images and of changed images; under nvshare the GiB moved in and out
With 256 GiB of host memory, `--checkpoints 25,20 --render 3 --steps native,pair` page-locks nearly
nine tenths of it.

A failed step does not stop the next. The lines are also in results.jsonl in --out, with all logs.
The exit status is 1 if an image changed, a program failed, or the game's memory was wrong.

Needs a GPU, PyTorch, diffusers, accelerate, and host memory for the checkpoints.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from pathlib import Path

import figures
import stage

GIB, MIB = 2**30, 2**20
CHUNK, RATE = 64 * MIB, GIB  # the game's allocations, and its bytes per second
GAME_HOLDS, GAME_RESTS = 3, 1  # seconds
PAGE, LOCKED_FROM = 4096, MIB  # smaller weights are not page-locked
WAYS = ("sequential", "streams")
STEPS = {"native": 170, "again": 80, "alone": 170, "pair": 260}  # limits in seconds
SHORTEST_STEP = 30  # seconds: a step does not begin if less of the budget is left
LAST_IMAGE = 15  # seconds before its limit in which a program begins no more images
DEVICE = "cuda"
UNET = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
    "force_upcast": False,
}
TEXT, POOLED = (1, 77, 2048), (1, 1280)  # shapes of the embeddings of a text
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DIFFUSERS_VERBOSITY": "error",
}


# Child processes.


class Checkpoint:
    """A UNet and a decoder, whose weights are in one buffer of host memory."""

    def __init__(self, number):
        import torch
        from diffusers import AutoencoderKL, UNet2DConditionModel

        with torch.device("meta"):
            self.unet, self.vae = UNet2DConditionModel(**UNET).eval(), AutoencoderKL(**VAE).eval()
        weights = [(model, name, weight) for model in (self.unet, self.vae) for name, weight in model.named_parameters()]
        sizes = [-(-2 * weight.numel() // PAGE) * PAGE for _, _, weight in weights]
        self.buffer = torch.empty(sum(sizes) + PAGE, dtype=torch.uint8)
        at = -self.buffer.data_ptr() % PAGE
        self.locked, self.count, self.failed = 0, 0, []
        for (model, name, weight), size in zip(weights, sizes):
            own = self.buffer[at : at + 2 * weight.numel()].view(torch.bfloat16).view(weight.shape)
            self.lock(own, size)
            own.copy_(values(f"{number} {type(model).__name__} {name}", weight.shape))
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._parameters[leaf] = torch.nn.Parameter(own, requires_grad=False)
            at += size
        if left := [name for model in (self.unet, self.vae) for name, buffer in model.named_buffers() if buffer.is_meta]:
            raise SystemExit(f"buffers without values: {left}")

    def lock(self, weight, size):
        import torch

        if size < LOCKED_FROM:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(weight.data_ptr(), size, 0))
        if code:
            self.failed.append(code)
        else:
            self.locked, self.count = self.locked + size, self.count + 1


def values(name, shape):
    """Returns random values on the GPU. The seed is the CRC of the name, so every process gets the
    same values."""
    import torch

    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), device=DEVICE, dtype=torch.bfloat16)
    seed = torch.Generator(device=DEVICE).manual_seed(zlib.crc32(name.encode()))
    fan_in = shape.numel() // shape[0]
    return torch.randn(shape, generator=seed, device=DEVICE).mul_(fan_in**-0.5).to(torch.bfloat16)


def render(checkpoint, number, way, arguments):
    """Returns the hash of the images."""
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
    parts = {"unet": checkpoint.unet, "vae": checkpoint.vae, "scheduler": scheduler}
    parts |= dict.fromkeys(["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])
    pipeline = StableDiffusionXLPipeline(**parts, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    if way == "sequential":
        pipeline.enable_sequential_cpu_offload(device=DEVICE)
    else:
        with_stream = {"use_stream": True, "record_stream": True} if DEVICE == "cuda" else {}
        pipeline.enable_group_offload(torch.device(DEVICE), offload_type="leaf_level", **with_stream)
    seed = torch.Generator("cpu").manual_seed(number)
    texts = [torch.randn(shape, generator=seed).to(DEVICE, torch.bfloat16) for shape in (TEXT, TEXT, POOLED, POOLED)]
    names = ["prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"]
    more = {"num_images_per_prompt": arguments["images"], "num_inference_steps": arguments["denoise"]}
    more |= {"height": arguments["size"], "width": arguments["size"], "generator": seed, "output_type": "pt"}
    images = pipeline(**dict(zip(names, texts)), **more).images.float().cpu()
    if not images.isfinite().all() or not images.std() > 0.01:
        raise ValueError(f"the images have no contents: mean {images.mean()}, deviation {images.std()}")
    return hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16]


def program(arguments):
    stage.end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Messages of libraries go to standard error.

    def say(**what):
        print(json.dumps(what), file=answers, flush=True)

    until, begun = time.time() + arguments["seconds"] - LAST_IMAGE, time.time()
    import torch

    torch.backends.cudnn.deterministic = True
    torch.cuda.init()
    imported = time.time()
    checkpoints = []
    for number in range(arguments["checkpoints"]):
        if time.time() < until:
            checkpoints.append(Checkpoint(number))
    torch.cuda.synchronize()
    failed = sum((each.failed for each in checkpoints), [])
    locked = {"locked-gib": round(sum(each.locked for each in checkpoints) / GIB, 2), "locked": sum(each.count for each in checkpoints)}
    locked |= {"lock-failures": len(failed), "lock-errors": sorted(set(failed))}
    seconds = {"start-seconds": round(imported - begun, 1), "load-seconds": round(time.time() - imported, 1)}
    say(loaded=len(checkpoints), backend=torch.cuda.get_allocator_backend(), **locked, **seconds)
    for number, checkpoint in enumerate(checkpoints[: arguments["render"]]):
        if time.time() > until:
            break
        way, began = WAYS[number % len(WAYS)], time.time()
        said = {"image": number, "way": way}
        try:
            said["hash"] = render(checkpoint, number, way, arguments)
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        say(**said, seconds=round(time.time() - began, 2))
    say(done=True, **{"peak-gib": round(torch.cuda.max_memory_allocated() / GIB, 2)})


def game(size):
    """Grows and shrinks until standard input is closed, then prints what happened."""
    stage.end_with_parent()
    driver, ended, word = stage.Driver(), threading.Event(), ctypes.c_uint()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    said = {"rounds": 0, "allocations": 0, "failures": 0, "latest": 0.0, "wrong": 0}
    while not ended.is_set():
        begun, held, said["rounds"] = time.perf_counter(), [], said["rounds"] + 1
        for n in range(size // CHUNK):
            due = begun + n * CHUNK / RATE
            if ended.wait(max(0.0, due - time.perf_counter())):
                break
            at = ctypes.c_uint64()
            code = driver.library.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(CHUNK))
            said["latest"] = round(max(said["latest"], time.perf_counter() - due), 4)
            said["allocations"] += 1
            if code:
                said["failures"] += 1
                continue
            driver.call("cuMemsetD32_v2", at, ctypes.c_uint(n), ctypes.c_size_t(CHUNK // 4))
            held.append((at, n))
        ended.wait(GAME_HOLDS)
        for at, n in held:
            seen = set()
            for offset in (0, CHUNK // 2, CHUNK - 4):
                driver.call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(at.value + offset), ctypes.c_size_t(4))
                seen.add(word.value)
            said["wrong"] += seen != {n}
            driver.call("cuMemFree_v2", at)
        ended.wait(GAME_RESTS)
    print(json.dumps(said), flush=True)


# The steps.


class Run:
    def __init__(self, arguments, directory):
        self.arguments, self.directory, self.began = arguments, directory, time.time()
        self.metrics, self.failed = directory / "metrics.sock", False
        self.lock = threading.Lock()
        self.kept = arguments.out / "diffusion-native.json"
        self.native = json.loads(self.kept.read_text()) if self.kept.exists() else {}

    def say(self, kind, **what):
        line = json.dumps({"kind": kind, "at": round(time.time() - self.began, 1)} | what)
        with self.lock:
            print(line, flush=True)
            with open(self.arguments.out / "results.jsonl", "a") as file:
                file.write(line + "\n")

    def child(self, step, name, count, seconds, environment, hear):
        shape = {name: getattr(self.arguments, name) for name in ("images", "size", "denoise", "render")}
        words = ["--child", json.dumps(shape | {"checkpoints": count, "seconds": seconds})]
        log = self.arguments.out / f"{step}-{name}.log"
        return stage.Child(name, [__file__, *words], ENVIRONMENT | environment, log, hear)

    @contextlib.contextmanager
    def stage(self, step):
        """Yields the environment of the step's programs, and a dictionary for the step's line."""
        said = {}
        with contextlib.ExitStack() as stack:
            self.say("ballast", **stack.enter_context(stage.ballast(self.arguments.free)))
            if step in ("native", "again"):
                yield {}, said
                return
            settings = f"{self.arguments.settings}\n[metrics]\nlisten = {json.dumps(str(self.metrics))}\n"
            daemon = stage.scheduler(self.arguments.programs, self.directory, settings)
            stack.callback(stage.end, daemon)
            time.sleep(1.5)  # until it has measured the GPU memory of other processes
            try:
                yield stage.under_nvshare(self.arguments.programs, self.directory), said
            finally:
                with contextlib.suppress(OSError):
                    said["swapped-gib"] = [round(count / GIB, 2) for count in stage.swapped(self.metrics)]
                (self.directory / "scheduler.log").replace(self.arguments.out / f"{step}-scheduler.log")

    def step(self, step, limit):
        first, second = (self.arguments.checkpoints * 2)[:2]
        rendered = min(first, self.arguments.render)
        counts = {"native": [rendered], "again": [min(2, rendered)], "alone": [first], "pair": [first, second]}[step]
        hashes, changed, uncompared, errors = {}, [], 0, []

        def hear(name, said):
            nonlocal uncompared
            if "image" in said:
                key, value = f"{said['image']} {said['way']}", said.get("hash")
                if value is None:
                    errors.append(f"{name}, {key}: {said['error']}")
                elif step == "native":
                    hashes[key] = value
                elif key not in self.native:
                    uncompared += 1
                else:
                    said["equal"] = value == self.native[key]
                    hashes[f"{name} {key}"] = value
                    changed.extend([f"{name} {key}"] * (not said["equal"]))
                self.say("image", step=step, program=name, **said)
            else:
                self.say("program", step=step, program=name, **said)

        until = time.time() + limit
        with self.stage(step) as (environment, line):
            children = []
            try:
                for i, count in enumerate(counts):
                    children.append(self.child(step, f"program-{i}", count, limit - 5, environment, hear))
                player = self.play(children, until) if step == "pair" else None
                for child in children:
                    child.thread.join(max(0, until - time.time()))
                errors += filter(None, (child.trouble() for child in children))
                if player:
                    self.score(player, errors)
            finally:
                stage.end(*(child.process for child in children))
        if step == "native":
            self.native = hashes
            self.kept.write_text(json.dumps(hashes))
        images = sum(min(count, self.arguments.render) for count in counts)
        line |= {"ok": not changed and not errors and bool(hashes), "images": len(hashes), "of": images, "changed": len(changed)}
        self.failed |= not line["ok"]
        self.say(step, **line, **{"changed-images": changed, "uncompared": uncompared, "errors": errors})

    def play(self, children, until):
        """Starts the game once the programs have loaded their checkpoints."""
        for child in children:
            child.loaded.wait(max(0, until - time.time()))
        words = [sys.executable, __file__, "--play", str(int(self.arguments.game * GIB))]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def score(self, player, errors):
        try:
            said = json.loads(player.communicate(timeout=30)[0])
            self.say("game", **said)
            if said["wrong"]:
                errors.append(f"the game's memory was wrong in {said['wrong']} chunks")
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            errors.append(f"the game failed: {error}")
            stage.end(player)

    def run(self):
        measured = figures.measured_files(self.arguments.programs)
        self.say("begin", steps=self.arguments.steps, measured=measured, hardware=figures.hardware())
        for step in self.arguments.steps:
            left = self.arguments.budget - (time.time() - self.began)
            if left < SHORTEST_STEP:
                self.failed = True
                self.say(step, ok=False, errors=["no time left"])
                continue
            began = time.time()
            try:
                self.step(step, min(left, STEPS[step]))
            except (Exception, SystemExit) as error:
                self.failed = True
                self.say(step, ok=False, errors=[f"{type(error).__name__}: {error}"[:1500]], where=traceback.format_exc().splitlines()[-3:])
            self.say("took", step=step, seconds=round(time.time() - began, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of nvshare-scheduler and libnvshare.so")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=["native", "again", "pair"])
    parser.add_argument("--checkpoints", type=lambda text: [int(count) for count in text.split(",")], default=[8, 4], help="of each program")
    parser.add_argument("--render", type=int, default=8, help="checkpoints of each program that render images")
    parser.add_argument("--free", type=float, default=24, help="GiB that the ballast leaves free")
    parser.add_argument("--game", type=float, default=12, help="GiB to which the game grows")
    parser.add_argument("--images", type=int, default=4, help="images per checkpoint")
    parser.add_argument("--size", type=int, default=1024, help="pixels of an image's edge")
    parser.add_argument("--denoise", type=int, default=2, help="denoising steps")
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--budget", type=float, default=500, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    if unknown := [step for step in arguments.steps if step not in STEPS]:
        parser.error(f"unknown step: {unknown[0]}")
    arguments.programs = arguments.programs.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Turns signals into an exit, so that all started processes are killed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        run = Run(arguments, Path(directory))
        run.run()
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        program(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--play"]:
        game(int(sys.argv[2]))
    else:
        main()
