"""The booted system: the simulated GPUs, programs on them under nvshare, and the scheduler's status."""

import json
import subprocess
import time

from browser import PATIENCE

URL = "https://localhost:9090"
SIMULATED = "/srv/gpu"
GPU = {
    "CUDA_SIM_DIR": SIMULATED, "NVSHARE_DEVICES": SIMULATED, "CUDA_SIM_MEMORY": "256M", "CUDA_SIM_CONTEXT": "4M",
    "CUDA_SIM_GPUS": "2",
}
BUS = ["org.nvshare.Scheduler1", "/org/nvshare/Scheduler1", "org.nvshare.Scheduler1"]


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def program(user, *arguments):
    """Starts a program on the simulated GPU under nvshare, and returns its process ID."""
    environment = [f"{name}={value}" for name, value in GPU.items()]
    command = ["runuser", "-u", user, "--", "env", *environment, "nvsharectl", "run", "--", "cuda-program", *arguments]
    known = {client["pid"] for client in status()["clients"]}
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, umask=0)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        new = [client["pid"] for client in status()["clients"]
               if client["pid"] not in known and any(use["grants"] > 0 for use in client["gpus"])]
        if new:
            return new[0]
        time.sleep(0.1)
    raise AssertionError(f"{arguments} does not start: {status()}")


def status():
    return json.loads(run("nvsharectl", "--json"))


def client(pid):
    return next(one for one in status()["clients"] if one["pid"] == pid)


def is_so(what, check, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not check():
        assert time.monotonic() < deadline, f"waited in vain for {what}: {status()}"
        time.sleep(0.1)


def step(text):
    print(f"    {text}", flush=True)
