"""Code that the scripts of this directory share: it starts their scheduler, reads the scheduler's
record, and starts programs that begin at the same time."""

import concurrent.futures
import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

LIBC = ctypes.CDLL(None)

# Events and commands in a record, and the names of the moves that they become in `events`.
EVENTS = {"requested": "request", "cancelled": "cancel", "released": "release", "held": "held", "detached": "detach"}
EVENTS |= {"disconnected": "disconnect", "grant": "grant", "revoke": "revoke", "undrainable": "undrainable"}
EVENTS |= {"eviction-blocked": "eviction-blocked", "prepare-sleep": "prepare-sleep", "awake": "awake"}


def scheduler(programs, directory, settings, **options):
    """Starts a scheduler with these settings. Its log goes to scheduler.log in `directory`. `options`: of its
    process, such as its user."""
    (directory / "scheduler.sock").unlink(missing_ok=True)
    (directory / "nvshare.toml").write_text(settings)
    words = [programs / "nvshare-scheduler", "--no-bus", "--socket", directory / "scheduler.sock"]
    words += ["--control-socket", directory / "control.sock", "--config", directory / "nvshare.toml"]
    words += ["--record", directory / "record.jsonl"]
    with open(directory / "scheduler.log", "w") as log:
        child = subprocess.Popen(words, stderr=log, preexec_fn=end_with_parent, **options)
    while not (directory / "scheduler.sock").exists():
        if child.poll() is not None:
            raise SystemExit((directory / "scheduler.log").read_text())
        time.sleep(0.01)
    return child


def under_nvshare(programs, directory):
    """Returns the environment variables of a program under nvshare."""
    return {"LD_PRELOAD": f"{programs}/libnvshare.so", "NVSHARE_SOCKET": f"{directory}/scheduler.sock"}


def swapped(metrics):
    """Returns the bytes that all programs have moved in and out since the scheduler started, from
    the scheduler's metrics socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(metrics))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def total(name):
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))

    return [total(f"nvshare_gpu_swapped_{way}_bytes_total") for way in ("in", "out")]


def events(record):
    """Returns the moves of locks and memory in the scheduler's record, as dictionaries with `ms`,
    `pid`, `client` and `what`. A dictionary has `gpu` and `bytes` if they apply to the move."""
    said, processes, memory = [], {}, {}

    def add(at, client, what, gpu=None, bytes_=None):
        event = {"ms": at / 1e6, "client": client, "pid": processes.get(client, {}).get("pid", 0), "what": what}
        said.append(event | {key: value for key, value in (("gpu", gpu), ("bytes", bytes_)) if value is not None})

    def handle(at, name, content):
        client, gpu = content.get("client"), content.get("gpu")
        if name == "connected":
            add(at, client, "resume" if processes.get(client, {}).get("resumed") else "connect")
        elif name == "attached":
            if "engine" in content:  # the event; the command with the same name has no engine
                memory[client, gpu] = [0, 0]
                add(at, client, "attach", gpu)
        elif name == "memory":
            before, mapped = memory[client, gpu][0], content["report"]["mapped"]
            memory[client, gpu][0] = mapped
            if mapped != before:
                add(at, client, "mapped" if mapped > before else "freed", gpu, abs(mapped - before))
        elif name == "allowance":
            mapped, before = memory[client, gpu]
            memory[client, gpu][1] = allowed = content["bytes"]
            what = "credit" if allowed >= before else "evict" if allowed < mapped else "take-back"
            add(at, client, what, gpu, abs(allowed - before))
        elif name == "stuck":
            for each in content["gpus"]:
                add(at, client, "untracked-work" if content["reason"] == "untracked-work" else "stuck", each)
        elif name in ("reserved", "mapping-failed"):
            add(at, client, name, gpu, content["bytes"])
        elif name in EVENTS:
            for each in content.get("gpus", [gpu]):
                add(at, client, EVENTS[name], each)

    for line in record.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line can be incomplete
            line = json.loads(line)
            if line["kind"] == "client":
                processes[line["client"]] = line
            elif line["kind"] == "entry":
                for happened in [line["event"], *line["commands"]]:
                    if isinstance(happened, dict):
                        for name, content in happened.items():
                            if isinstance(content, dict):
                                handle(line["at-ns"], name, content)
    return said


def begin(commands, environment, directory, groups=None):
    """Starts the programs, and lets them begin at the same time. Each program gets two paths as
    arguments: of a file that it creates when it is ready, and of a file that it then waits for."""
    go = directory / "go"
    go.unlink(missing_ok=True)
    children = []
    for i, words in enumerate(commands):
        ready = directory / f"ready-{i}"
        ready.unlink(missing_ok=True)
        with_group = {"group": groups[i]} if groups else {}
        child = subprocess.Popen(
            [*map(str, words), str(ready), str(go)], stdout=subprocess.PIPE, env=os.environ | environment, **with_group
        )
        children.append((ready, child))
    while not all(ready.exists() for ready, _ in children):
        if any(child.poll() is not None for _, child in children):
            raise SystemExit("a program ended during its start")
        time.sleep(0.01)
    go.touch()
    return [child for _, child in children]


def wait_to_begin(ready, go):
    """In a child process: creates the file `ready`, and waits for the file `go`."""
    ready.touch()
    while not go.exists():
        time.sleep(0.001)


class Child:
    """A Python program that prints lines of JSON. A thread passes each line to `hear`, with the
    program's name. The line with "loaded" tells that the program has allocated its memory, the line
    with "done" that it has completed."""

    def __init__(self, name, words, environment, log, hear):
        self.name, self.log, self.is_done = name, log, False
        with open(log, "w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            self.process = subprocess.Popen([sys.executable, *map(str, words)], env=os.environ | environment, **pipes)
        self.loaded = threading.Event()
        self.thread = threading.Thread(target=self.read, args=[hear], daemon=True)
        self.thread.start()

    def read(self, hear):
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                said = json.loads(line)
                self.is_done |= "done" in said
                hear(self.name, said)
                if "loaded" in said:
                    self.loaded.set()
        self.loaded.set()

    def trouble(self):
        """Returns why the program did not complete; an empty string if it did."""
        if self.is_done:
            return ""
        if not self.thread.is_alive():  # the program has closed its output, so it is ending
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        status, lines = self.process.poll(), self.log.read_text(errors="replace").splitlines()
        what = "ran out of time" if status is None else f"ended with status {status}"
        return f"{self.name} {what}: {' | '.join(lines[-3:])[-500:]}"


@contextlib.contextmanager
def ballast(free, gpu=0):
    """Holds GPU memory until only `free` GiB are free. Yields a dictionary that tells how much."""
    words = [sys.executable, Path(__file__).with_name("suites.py"), "--ballast", str(free), str(gpu)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = holder.stdout.readline()
        if not line:
            raise SystemExit("the ballast ended: is the GPU visible?")
        yield json.loads(line)
    finally:
        end(holder)


def end_with_parent():
    """In a child process: makes the kernel kill this process when its parent ends."""
    parent, set_parent_death_signal = os.getppid(), 1
    LIBC.prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end(*children, patience=20):
    """Kills the processes, and waits until they have ended. Returns the processes that have not
    ended after `patience` seconds."""
    for child in children:
        child.kill()
    left, until = [], time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            left.append(child)
    return left


def touch_host_memory(gib):
    """Writes once to this many GiB of the host's memory. A virtual machine's host provides memory at the first
    write, which can be slower than anything that is measured. Returns the GiB per second."""
    populate_write, huge, piece = 23, 14, 1 << 30
    memory = mmap.mmap(-1, gib * piece, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def touch(at):
        place, size = ctypes.c_void_p(base + at * piece), ctypes.c_size_t(piece)
        LIBC.madvise(place, size, huge)
        if LIBC.madvise(place, size, populate_write):
            raise SystemExit("cannot allocate host memory. This needs Linux 5.14")

    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(touch, range(gib)))
    return gib / (time.monotonic() - begun)


def joules():
    """Returns the energy that the first visible GPU has used since the driver was loaded, in joules; `None`
    if NVML does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    by_index = index.isdigit()
    find = nvml.nvmlDeviceGetHandleByIndex_v2 if by_index else nvml.nvmlDeviceGetHandleByUUID
    failed = nvml.nvmlInit_v2() or find(int(index) if by_index else index.encode(), ctypes.byref(device))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy))
    return None if failed else energy.value / 1000  # NVML counts millijoules


class Driver:
    """The driver API, with a context on a GPU."""

    def __init__(self, gpu=0):
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), gpu)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise SystemExit(f"{name} failed with error {code}")

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value
