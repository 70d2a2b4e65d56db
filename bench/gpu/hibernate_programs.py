"""The programs that hibernate.py saves to disk. Each program prints lines of JSON, and its last line
contains the result.

  hibernate_programs.py train GIB STEPS         trains a network of this many GiB, with its optimizer
  hibernate_programs.py serve GIB PORT          answers HTTP requests with a model's output
  hibernate_programs.py ranks GIB STEPS PORT    trains on two GPUs, with one process for each
  hibernate_programs.py tree COMMAND…           runs a command that uses a GPU, in a session of its own
"""

import http.server
import json
import os
import subprocess
import sys
import time

# The shortest time of a step, so that a program does not end before it is saved.
STEP = 0.05
WIDTH = 8192


def say(**line):
    print(json.dumps(line), flush=True)


def network(gib, device, torch):
    """Returns layers, and an optimizer: with Adam's two moments and the gradients, each layer takes 1 GiB. The
    optimizer updates one layer at a time, because its temporary memory would otherwise be as large as all layers."""
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(gib))
    return layers, torch.optim.Adam(layers.parameters(), lr=1e-5, foreach=False)


def begin(device="cuda"):
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    if device != "cuda":
        torch.cuda.set_device(device)
    return torch


def checksum(layers, torch):
    """Returns the sum of the bits of all weights."""
    return sum(int(weights.detach().view(torch.int32).sum(dtype=torch.int64)) for weights in layers.parameters())


def steps(layers, optimizer, count, torch, device, reduce=lambda _: None):
    for step in range(count):
        begun = time.monotonic()
        value = torch.full((64, WIDTH), 1 + step % 7, dtype=torch.float32, device=device)
        for layer in layers:
            value = value + torch.tanh(layer(value))
        loss = value.square().mean()
        loss.backward()
        reduce(layers)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        shown = float(loss)
        say(step=step, loss=shown, at=time.time())
        time.sleep(max(0.0, STEP - (time.monotonic() - begun)))


def train(gib, count):
    torch = begin()
    layers, optimizer = network(gib, "cuda", torch)
    steps(layers, optimizer, count, torch, "cuda")
    say(done=True, sum=checksum(layers, torch), gib=round(torch.cuda.memory_allocated() / 2**30, 2))


def ranks(gib, count, port):
    """Trains on two GPUs. Rank 0 starts rank 1."""
    rank = int(os.environ.get("RANK", 0))
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    other = None
    if rank == 0:
        words = [sys.executable, *sys.argv]
        other = subprocess.Popen(words, env=environment | {"RANK": "1"}, stdout=subprocess.DEVNULL)
    os.environ.update(environment | {"RANK": str(rank)})
    device = f"cuda:{rank}"
    torch = begin(device)
    import torch.distributed as group

    group.init_process_group("nccl")
    layers, optimizer = network(gib, device, torch)

    def reduce(layers):
        for weights in layers.parameters():
            group.all_reduce(weights.grad)

    steps(layers, optimizer, count, torch, device, reduce)
    say(done=True, sum=checksum(layers, torch))
    # NCCL's destruction waits for the other rank, so both must reach it.
    group.destroy_process_group()
    if other:
        other.wait()


def model(gib):
    """Returns a function that runs a model with PyTorch, or adds numbers on the GPU with the driver alone."""
    if "HIBERNATE_DRIVER" in os.environ:
        import ctypes

        import stage

        driver, memory = stage.Driver(), ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
        driver.call("cuMemsetD32_v2", memory, ctypes.c_uint(7), ctypes.c_size_t(1 << 18))

        def read():
            value = ctypes.c_uint()
            driver.call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(4))
            return value.value

        return read
    torch = begin()
    layers, _ = network(max(1, gib), "cuda", torch)

    def run():
        with torch.no_grad():
            value = torch.ones((1, WIDTH), device="cuda")
            for layer in layers:
                value = torch.tanh(layer(value))
            return float(value.sum())

    return run


def serve(gib, port):
    run = model(gib)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(run()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    say(step=0, output=run(), at=time.time())
    server.serve_forever()


def tree(*command):
    """Like a notebook server: uses no GPU itself, and its kernel has a session of its own and the same log."""
    kernel = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    say(kernel=kernel.pid)
    kernel.wait()


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    if name == "tree":
        tree(*words)
    else:
        {"train": train, "serve": serve, "ranks": ranks}[name](*map(int, words))
