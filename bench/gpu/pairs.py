#!/usr/bin/env python3
"""Two PyTorch loops at once on one GPU, whose memory fits together: without nvshare, in turns of the time quantum
(`anti-thrash = on`), and under `auto`, which may let them run at the same moment. Prints, for each pair, the seconds until
both are done, and whether every result is the one that the loop gives alone.

  pairs.py [--programs target/release] [--seconds 3] [--quantum 1] [--pairs add+add,tiny+tiny,add+tiny] [--runs 1] [--keep FILE]
           [--json FILE] [--commit ID]

`--seconds`: how long a loop takes alone. `--keep`: a file for all that was measured. `--json`: puts the figure into that file, as
`../support/src/results.rs` does; `--commit` says what was built if the programs come from elsewhere. `--programs`: where nvshare-scheduler and libnvshare.so are. Needs a GPU and PyTorch.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import figures
import stage

LOOPS = ["add", "matmul", "conv", "tiny"]
PAIRS = ["add+add", "matmul+matmul", "conv+conv", "tiny+tiny", "matmul+tiny"]


def loop(name):
    """The work of one iteration, and what it leaves behind."""
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    if name == "add":  # memory-bound
        x = torch.zeros(2**28, device="cuda")
        return lambda: x.add_(1), x
    if name == "matmul":  # compute-bound
        x = torch.eye(4096, device="cuda", dtype=torch.bfloat16)
        y = torch.rand(4096, 4096, device="cuda").to(torch.bfloat16)
        return lambda: torch.matmul(y, x, out=y.clone()), y
    if name == "conv":  # many small kernels, neither bound by launches nor filling the GPU
        net = torch.nn.Sequential(*[torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(8)]).cuda().requires_grad_(False)
        x = torch.rand(16, 32, 64, 64, device="cuda")
        return lambda: net(x), x
    if name == "tiny":  # launch-bound: the GPU is mostly idle
        x = torch.zeros(64, device="cuda")
        return lambda: x.add_(1), x
    raise SystemExit(f"there is no loop {name!r}: there are {', '.join(LOOPS)}")


def run(name, iterations, ready, go):
    """A child: runs the loop so often, once the file `go` is there; with no iterations, as often as fits into a second."""
    import torch

    step, result = loop(name)
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    stage.wait_to_begin(ready, go)
    began, done = time.time(), 0
    while done < iterations or (not iterations and time.time() - began < 1):
        for _ in range(100 if name == "tiny" else 10):
            step()
            done += 1
        if not iterations:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    digest = hashlib.sha256(result.float().cpu().numpy().tobytes()).hexdigest()[:16]
    print(json.dumps({"iterations": done, "began": began, "ended": time.time(), "digest": digest}))


def together(jobs, environment, directory):
    """Starts them, has them begin at once, and gives what each said."""
    words = [[sys.executable, __file__, "--child", name, iterations] for name, iterations in jobs]
    said = [json.loads(child.communicate()[0]) for child in stage.begin(words, environment, directory)]
    seconds = max(s["ended"] for s in said) - min(s["began"] for s in said)
    return said, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"))
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--quantum", type=int, default=1)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    modes = {"native": None, "on": 'anti-thrash = "on"\n', "auto": 'anti-thrash = "auto"\n'}
    measured = []
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        pairs = [pair.split("+") for pair in arguments.pairs.split(",")]
        alone = {}
        for name in sorted({name for pair in pairs for name in pair}):
            rate = together([(name, 0)], {}, directory)[0][0]["iterations"]
            iterations = int(rate * arguments.seconds) // 100 * 100 or 100
            said, seconds = together([(name, iterations)], {}, directory)
            alone[name] = (iterations, said[0]["digest"])
            print(f"{name} alone: {iterations} iterations in {seconds:.2f} s", flush=True)
        print(f"{'pair':>16}" + "".join(f"{mode:>9}" for mode in modes))
        for pair in pairs:
            line = f"{'+'.join(pair):>16}"
            for mode, settings in modes.items():
                taken, right = [], True
                for _ in range(arguments.runs):
                    environment, daemon = {}, None
                    if settings is not None:
                        daemon = stage.scheduler(programs, directory, f"time-quantum = {arguments.quantum}\n{settings}")
                        environment = stage.under_nvshare(programs, directory)
                    said, seconds = together([(name, alone[name][0]) for name in pair], environment, directory)
                    right &= all(s["digest"] == alone[name][1] for s, name in zip(said, pair))
                    taken.append(seconds)
                    if daemon:
                        daemon.terminate()
                        daemon.wait()
                measured.append({"pair": "+".join(pair), "mode": mode, "seconds": taken, "right": right})
                line += f"{statistics.median(taken):>8.2f}{' ' if right else '!'}"
            print(line, flush=True)
    if arguments.keep:
        arguments.keep.write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.json:
        behind = {}
        for pair in {m["pair"] for m in measured}:
            seconds = {m["mode"]: statistics.median(m["seconds"]) for m in measured if m["pair"] == pair}
            behind[pair] = 100 * (seconds["auto"] / min(seconds["native"], seconds["on"]) - 1)
        note = f"the worst pair of loops of {arguments.seconds:g} s, median of {arguments.runs}: "
        note += ", ".join(f"{pair} {percent:.1f}" for pair, percent in sorted(behind.items(), key=lambda item: -item[1]))
        figure = ("auto-against-best-of-native-and-turns", max(behind.values()), "percent", note)
        figures.add(arguments.json, [figure], arguments.commit)
    sys.exit(0 if all(m["right"] for m in measured) else "a result marked with ! is wrong")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
