#!/usr/bin/env python3
"""Measures the pause of a PyTorch program of 16 GiB while it is migrated between two GPUs, and the
time to drain six programs off a GPU.

  migrate.py [--programs target/release] [--gib 16] [--moves 10] [--visible LIST] [--drained 6]
             [--each 2] [--json FILE] [--commit ID]

A trainer is a program that trains a small network. Integers fill the rest of its memory, and each
step changes all of them. A checksum over all steps includes each step's loss and a part of the
integers.

First, one trainer is migrated between the GPUs --moves times. The pause is the longest time between
the ends of two steps, from one migration to the next. At the end, a trainer alone, without nvshare,
runs the same number of steps, and its checksums must be equal. The script also times copies of the
same number of bytes in each direction, between registered host memory and the GPU, without nvshare.

Then --drained trainers of --each GiB are drained off the first GPU. The time is measured from the
command until NVML shows no more memory in use than before the trainers. Afterwards, all trainers
must continue, and have the checksums of a trainer alone.

Prints lines of JSON. The exit status is 1 if a checksum is wrong, a program fails, or a program
does not leave its GPU.

Needs two GPUs of the same kind, PyTorch, and `nvshare-checkpoint` in --programs. As root, the
script also needs `setpriv`, and runs everything as the user nobody: the scheduler drops all
capabilities, and then cannot checkpoint programs of root. With some drivers, killing a restored
process has hung the host (NVIDIA/cuda-checkpoint#53), so the script lets the trainers end by
themselves.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import figures
import sleep
import stage

SETTINGS = 'time-quantum = 2\nsleep-after = "never"\nplacement = "none"\n'
GIB = 1 << 30
# Timeout in seconds of a command, and of the start and the end of a program. Bytes that NVML may
# still show for a program that has left the GPU.
PATIENCE, LEFT = 120, 16 << 20
# Seconds between two migrations, enough for some steps and for the turns of other programs.
PAUSE = 1.5


def trainer(gib, most):
    """Child process: runs `most` steps. If `most` is 0, runs until it reads a line."""
    import torch

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    wide = 4096
    layers = [torch.nn.Linear(wide, wide), torch.nn.GELU(), torch.nn.Linear(wide, wide)]
    net = torch.nn.Sequential(*layers).cuda()
    learn = torch.optim.Adam(net.parameters(), lr=1e-4)
    given, wanted = (torch.randn(512, wide).cuda() for _ in range(2))
    pieces = [torch.arange(GIB // 8, device="cuda").mul_(2 * n + 1) for n in range(gib)]
    odd, check, ends, told = 6364136223846793005, torch.zeros(1, dtype=torch.int64, device="cuda"), [], threading.Event()
    if not most:
        threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    print(json.dumps("ready"), flush=True)
    while len(ends) != most or not most:
        if told.is_set():
            break
        step = len(ends)
        loss = (net(given) - wanted).square().mean()
        learn.zero_grad()
        loss.backward()
        learn.step()
        for piece in pieces:
            piece.mul_(odd).add_(step)
        check.mul_(odd).add_(pieces[step % gib].sum()).add_(loss.detach().view(torch.int32))
        torch.cuda.synchronize()
        ends.append(time.monotonic())
    held = sum(int(piece.sum()) for piece in pieces) + sum(int(p.detach().view(torch.int32).sum()) for p in net.parameters())
    print(json.dumps({"steps": len(ends), "check": int(check), "held": held, "ends": ends}), flush=True)


class Trainer:
    def __init__(self, gib, environment, steps=0):
        words = [sys.executable, __file__, "--child-trainer", str(gib), str(steps)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # Deterministic matrix products need CUBLAS_WORKSPACE_CONFIG.
        environment = os.environ | environment | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self.child = subprocess.Popen(words, env=environment, preexec_fn=stage.end_with_parent, **pipes)

    def begun(self):
        """Waits until the trainer has its memory, and returns the trainer."""
        if self.child.stdout.readline() != '"ready"\n':
            raise SystemExit("a trainer ended during its start")
        return self

    def end(self):
        """Ends the trainer. Returns its final output; None if it has failed."""
        said, _ = self.child.communicate("\n", timeout=4 * PATIENCE)
        return json.loads(said) if self.child.returncode == 0 and said else None


def is_right(said, gib, environment):
    """Returns whether a trainer alone has the same results after the same number of steps."""
    if said is None:
        return False
    alone = Trainer(gib, environment, said["steps"]).begun().end()
    return alone is not None and all(alone[name] == said[name] for name in ("steps", "check", "held"))


class Nvml(sleep.Nvml):
    """The used memory of each GPU according to NVML, and the GPU's UUID."""

    def __init__(self):
        import ctypes

        super().__init__()
        self.devices, count = [], ctypes.c_uint()
        self.library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                raise SystemExit("NVML does not show all GPUs")
            self.devices.append(device)
        if len(self.devices) != 2:
            raise SystemExit("needs two GPUs")
        self.names = [self.name(device) for device in self.devices]

    def name(self, device):
        import ctypes

        text = ctypes.create_string_buffer(96)
        if self.library.nvmlDeviceGetUUID(device, text, 96):
            raise SystemExit("NVML does not name a GPU")
        return text.value.decode()

    def used(self, gpu):
        self.device = self.devices[gpu]
        return self.memory().used


class Stage(sleep.Stage):
    def __init__(self, programs, directory, nvml):
        self.programs, self.directory, self.nvml = programs, directory, nvml
        self.daemon = stage.scheduler(programs, directory, SETTINGS)
        self.environment = stage.under_nvshare(programs, directory)

    def until(self, what, is_so):
        """Waits until the condition holds. Returns the seconds of the wait."""
        begun = time.monotonic()
        while not is_so():
            if time.monotonic() - begun > PATIENCE:
                raise SystemExit(f"timed out while waiting for {what}: {self.control('status')}")
            time.sleep(0.005)
        return time.monotonic() - begun

    def migrate(self, one, to, before):
        """Migrates the trainer to the GPU `to`. Returns the seconds until NVML shows the trainer
        only there, and the bytes that are left on the other GPU."""
        begun, there = time.monotonic(), 1 - to
        self.control("migrate", str(one.child.pid), "--to", self.nvml.names[to])
        self.until("the trainer to leave its GPU", lambda: self.nvml.used(there) <= before[there] + LEFT)
        self.until("the trainer to be on the other GPU", lambda: self.nvml.used(to) > before[to] + LEFT)
        return time.monotonic() - begun, self.nvml.used(there) - before[there]


def one_of(gib, moves, environment, stage_):
    before = [stage_.nvml.used(gpu) for gpu in (0, 1)]
    one = Trainer(gib, stage_.environment | environment).begun()
    orders, took, left = [], [], []
    for number in range(moves):
        time.sleep(PAUSE)
        orders.append(time.monotonic())
        seconds, bytes_left = stage_.migrate(one, (number + 1) % 2, before)
        took.append(seconds)
        left.append(bytes_left)
    time.sleep(PAUSE)
    said = one.end()
    ends = said["ends"] if said else []
    gaps = [(end, later - end) for end, later in zip(ends, ends[1:])]
    # The step that is running when a command is sent ends after the command.
    windows = zip(orders, [*orders[1:], float("inf")])
    pauses = [max((gap for end, gap in gaps if begin <= end + gap and end < until), default=PATIENCE) for begin, until in windows]
    steps = statistics.median(gap for _, gap in gaps) if gaps else None
    shown = {"gib": gib, "pauses": pauses, "took": took, "left": [n >> 20 for n in left], "step": steps}
    return shown | {"steps": len(ends), "right": is_right(said, gib, environment)}


def drain(count, gib, stage_):
    before = [stage_.nvml.used(gpu) for gpu in (0, 1)]
    # The trainers start concurrently, because importing PyTorch takes a dozen seconds.
    all_of = [one.begun() for one in [Trainer(gib, stage_.environment) for _ in range(count)]]
    time.sleep(2 * PAUSE)
    begun = time.monotonic()
    name, control = stage_.nvml.names[0], stage_.directory / "control.sock"
    order = subprocess.Popen([stage_.programs / "nvsharectl", "--control", control, "drain", name], stdout=subprocess.DEVNULL)
    stage_.until("the GPU to be free", lambda: stage_.nvml.used(0) <= before[0] + LEFT)
    seconds = time.monotonic() - begun
    status = order.wait(PATIENCE)
    said_after = time.monotonic() - begun
    left = stage_.nvml.used(0) - before[0]
    drained = time.monotonic()
    time.sleep(2 * PAUSE * count)  # enough for a turn of each trainer
    stays = stage_.nvml.used(0) <= before[0] + LEFT
    stage_.control("undrain", name)
    said = [one.end() for one in all_of]
    goes_on = [bool(it and it["ends"] and it["ends"][-1] > drained) for it in said]
    right = [is_right(it, gib, {}) for it in said]
    shown = {"drained": count, "gib": gib, "seconds": seconds, "order": [status, said_after], "left": left >> 20}
    return shown | {"stays": stays, "go_on": sum(goes_on), "right": sum(right)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--moves", type=int, default=10, help="number of migrations; 0: none")
    parser.add_argument("--visible", help="CUDA_VISIBLE_DEVICES of the migrated trainer")
    parser.add_argument("--drained", type=int, default=6, help="number of drained trainers; 0: none")
    parser.add_argument("--each", type=int, default=2, help="GiB of each drained trainer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if os.geteuid() == 0:
        sys.exit(sleep.as_nobody(options.json))
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    nvml, rows, failed = Nvml(), [], False
    words = [sys.executable, sleep.__file__, "--child-copies", str(options.gib)]
    copies = json.loads(subprocess.check_output(words))
    with tempfile.TemporaryDirectory() as directory:
        stage_ = Stage(options.programs.resolve(), Path(directory), nvml)
        if options.moves:
            environment = {"CUDA_VISIBLE_DEVICES": options.visible} if options.visible else {}
            one = one_of(options.gib, options.moves, environment, stage_)
            print(json.dumps(one | {"copies": copies}), flush=True)
            failed |= not one["right"]
            note = "median of {} moves; longest {:.2f} s; the bytes alone take {:.2f} s both ways; {} steps with the checksum of one alone"
            counts = (options.moves, max(one["pauses"]), sum(copies), one["steps"])
            rows.append((f"migrate-{options.gib}GiB", statistics.median(one["pauses"]), "s", note.format(*counts)))
        if options.drained:
            many = drain(options.drained, options.each, stage_)
            print(json.dumps(many), flush=True)
            failed |= not (many["go_on"] == many["right"] == options.drained and many["stays"] and not many["order"][0])
            note = f"{options.drained} trainers of {options.each} GiB, busy, to the other GPU; {many['right']} of them with right results"
            rows.append(("drain-gpu", many["seconds"], "s", note))
        stage_.daemon.terminate()
        stage_.daemon.wait()
    if options.json and not failed:
        figures.add(options.json, rows, options.commit)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child-trainer"]:
        trainer(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
