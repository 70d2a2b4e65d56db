#!/usr/bin/env python3
"""Saves PyTorch programs to disk with `nvshare-hibernate` and CRIU, restores them, and compares their results
with a run without nvshare.

  hibernate.py [--programs target/release] [--cases train,…] [--gib 16] [--small 2] [--images DIR] [--warm GIB]
               [--stand-ins CRIU] [--plugin DIR] [--llama-server FILE] [--driver] [--out DIR] [--json FILE]
               [--commit ID]

The cases:

  plugin     a training of --gib GiB as root, without nvshare: CRIU's own CUDA plugin saves and restores it.
  train      a training of --gib GiB. It measures the figures.
  reset      a training of --small GiB. Between, all processes of nvshare end, and its run directory is emptied.
  server     an HTTP server, which has a listening socket. CRIU 4.1.1 cannot save it on Linux 6.18.
  llama-server  llama.cpp's server, from --llama-server. Its second answer continues the first, with the cache.
  jupyter    a Jupyter server and its kernel, which has a model on the GPU and a variable: over Unix sockets,
             and over TCP with --close-connections. If the server's tree is refused, because the server uses no
             GPU, then once more with a server that uses one.
  tree       a program without a GPU, and its child, which uses one: like a notebook server and its kernel.
  ranks      a training of two processes on two GPUs, with NCCL.
  other-gpu  two GPUs: the program is restored while the driver lists the GPUs in another order, and then
             while its GPU is drained.

The figures are the seconds of `nvsharectl hibernate`, and the seconds from `nvsharectl restore` until the program
has completed its next step; and both divided by the seconds for writing and reading as many bytes in the same
directory, in pieces of 16 MiB, one after the other. If the disk reaches less than 2 GB/s, the images are in a new
tmpfs. With --images, they are in this directory.

Each case is a process of its own with a time limit, and has a log in --out. For each case, the script prints one
line, and writes a row to rows.json in --out. The exit status is 1 if a program was lost or had a wrong result. A
program that was refused and continues correctly is not an error.

Needs root, CRIU 4.1, systemd, and a user nobody who may read --programs. With --stand-ins CRIU, a host without
systemd suffices: the script installs /usr/sbin/busctl and /usr/sbin/criu, which executes CRIU, and removes them at
the end. The case `plugin` needs --plugin: a directory with `criu`, `cuda_plugin.so` and `cuda-checkpoint`. The case
`jupyter` needs jupyter_server and ipykernel. --driver uses the driver alone instead of PyTorch, for a simulated GPU.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures
import hibernate_host as host
import hibernate_servers as servers
import stage
from hibernate_stage import PROGRAMS, SAVE, Program, Refused, Stage, port, restore, save, tail

# The longest time of each case, in seconds.
CASES = {"plugin": 240, "train": 420, "reset": 180, "server": 150, "llama-server": 240, "jupyter": 300, "tree": 180}
CASES |= {"ranks": 240, "other-gpu": 300}
STEPS = 240
FAST = 2e9  # bytes a second of a disk that is fast enough for the figures


def training(stage_, gib, native=False, is_root=False, **environment):
    if stage_.options.driver:
        words = [stage_.programs / "cuda-program", "naps", "--mem", f"{gib * 16}M", "--seconds", 600, "--pause-ms", 5]
        return Program(stage_, list(map(str, words)), is_python=False, native=native, is_root=is_root, **environment)
    words = [sys.executable, stage_.programs / PROGRAMS.name, "train", gib, STEPS]
    return Program(stage_, list(map(str, words)), native=native, is_root=is_root, **environment)


def native_result(stage_, gib):
    """Returns the result of a training without nvshare. Cases with the same training share it."""
    if stage_.options.driver:
        return [True]
    path = stage_.options.out / f"native-{gib}.json"
    if not path.exists():
        path.write_text(json.dumps(training(stage_, gib, native=True).result()))
    return json.loads(path.read_text())


def cycle(stage_, gib, row, between=lambda: None, **environment):
    """Saves and restores a training. Returns true if its result is right."""
    expected = native_result(stage_, gib)
    program = training(stage_, gib, **environment)
    program.until_works()
    image = save(stage_, program, row)
    between()
    restore(stage_, program, image, row)
    row["where"] = places(stage_, program.pid)
    found = program.result()
    stage_.control("hibernated", "--delete", image)
    row |= {"expected": expected, "found": found}
    return found == expected


def places(stage_, pid):
    """Returns the indices of the GPUs that a program uses."""
    status = json.loads(stage_.control("--json", "status"))
    indices = {gpu["uuid"]: gpu["index"] for gpu in status["gpus"]}
    return [indices.get(gpu["uuid"]) for client in status["clients"] if client["pid"] == pid for gpu in client["gpus"]]


def plugin(stage_, row):
    tools = stage_.options.plugin
    if not tools:
        raise SystemExit("it needs --plugin")
    expected = native_result(stage_, stage_.options.gib)
    program = training(stage_, stage_.options.gib, native=True, is_root=True)
    program.until_works()
    images = stage_.options.images / "plugin"
    images.mkdir()
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def criu(*words):
        common = ["--images-dir", images, "--libdir", tools, "--manage-cgroups=ignore", "--file-locks", "-v1"]
        log = f"{words[0]}.log"
        command = [tools / "criu", *words, *common, "--log-file", log]
        begun = time.monotonic()
        done = subprocess.run(command, env=environment, timeout=SAVE)
        shutil.copyfile(images / log, stage_.path(log))
        if done.returncode:
            raise SystemExit(f"CRIU fails: {tail(images / log)}")
        return round(time.monotonic() - begun, 3)

    row["hibernate"] = criu("dump", "--tree", str(program.pid), "--timeout", str(SAVE))
    row["bytes"] = sum(path.stat().st_size for path in images.iterdir())
    program.until_gone()
    host.drop_caches()
    moment = time.time()
    row["restore-command"] = criu("restore", "--restore-detached")
    row["restore"] = round(program.first_step_after(moment), 3)
    row |= {"expected": expected, "found": program.result()}
    return row["found"] == expected


def train(stage_, row):
    stage_.begin()
    is_right = cycle(stage_, stage_.options.gib, row)
    wrote, read = host.copy_seconds(stage_.options.images, row["bytes"])
    several = host.copy_seconds(stage_.options.images, row["bytes"], threads=8)
    row |= {"write": wrote, "read": read, "write-8-threads": several[0], "read-8-threads": several[1]}
    return is_right


def reset(stage_, row):
    def end_everything():
        stage_.end()
        for path in stage_.directory.glob("*.sock"):
            path.unlink()
        for path in host.RUN.iterdir():
            path.unlink()
        row["driver-open-in"] = host.holders()
        stage_.begin()

    stage_.begin()
    return cycle(stage_, stage_.options.small, row, end_everything)


def other_gpu(stage_, row):
    def swap():
        stage_.end()
        stage_.begin(CUDA_VISIBLE_DEVICES="1,0")

    def drain():
        gpus = json.loads(stage_.control("--json", "status"))["gpus"]
        used = next(gpu for gpu in gpus if gpu["index"] == 0)
        row["drained"] = root_control(stage_, "drain", used["uuid"])

    stage_.begin()
    row["swapped"] = {}
    is_right = cycle(stage_, stage_.options.small, row["swapped"], swap)
    stage_.end()
    stage_.begin()
    return cycle(stage_, stage_.options.small, row, drain) and is_right


def root_control(stage_, *words):
    command = [stage_.programs / "nvsharectl", "--control", stage_.directory / "control.sock", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip()


def tree(stage_, row):
    stage_.begin()
    small = stage_.options.small
    command = [sys.executable, str(stage_.programs / PROGRAMS.name)]
    kernel, expected = [*command, "train", str(small), str(STEPS)], native_result(stage_, small)
    if stage_.options.driver:
        kernel = [str(stage_.programs / "cuda-program"), "naps", "--mem", "16M", "--seconds", "600", "--pause-ms", "5"]
    program = Program(stage_, [*command, "tree", *kernel], is_python=not stage_.options.driver)
    program.client = program.wait("the kernel", lambda: [line["kernel"] for line in program.lines() if "kernel" in line])[0]
    program.until_works()
    restore(stage_, program, save(stage_, program, row), row)
    row |= {"expected": expected, "found": program.result()}
    return row["found"] == row["expected"]


def ranks(stage_, row):
    stage_.begin()
    words = [sys.executable, str(stage_.programs / PROGRAMS.name), "ranks", str(stage_.options.small), str(STEPS)]
    expected = Program(stage_, [*words, str(port())], native=True).result()
    program = Program(stage_, [*words, str(port())])
    program.until_works()
    row["is-saved"] = True
    try:
        restore(stage_, program, save(stage_, program, row), row)
    except Refused as why:
        row |= {"is-saved": False, "said": str(why)}
    row |= {"expected": expected, "found": program.result()}
    return row["found"] == row["expected"]


WORK = {"plugin": plugin, "train": train, "reset": reset, "tree": tree, "ranks": ranks, "other-gpu": other_gpu}
WORK |= {"server": servers.server, "llama-server": servers.llama_server, "jupyter": servers.jupyter}


def carry_out(options, name):
    """In a process of its own: carries out a case, and writes its row."""
    row = {"case": name, "images": str(options.images)}
    host.adopt_orphans()
    stage_ = Stage(options, name)
    work = WORK[name]
    try:
        row["outcome"] = "right" if work(stage_, row) else "WRONG"
        if not row.get("is-saved", True) and row["outcome"] == "right":
            row["outcome"] = "refused, continued"
    except Refused as why:
        row |= {"outcome": "refused", "said": str(why)}
    except SystemExit as why:
        row |= {"outcome": "FAILED", "said": str(why)}
    except Exception as why:
        row |= {"outcome": "FAILED", "said": f"{type(why).__name__}: {why}"}
    finally:
        write_row(options, name, row)
        if stage_.daemon:
            stage_.end()
    shutil.rmtree(stage_.directory, ignore_errors=True)


def write_row(options, name, row):
    (options.out / f"{name}.row.json").write_text(json.dumps(row, default=str))


def run_case(options, name):
    """Runs a case within its time limit. Returns its row."""
    path = options.out / f"{name}.row.json"
    path.unlink(missing_ok=True)
    words = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--images", options.images]
    begun = time.monotonic()
    with open(options.out / f"{name}.log", "w") as log:
        of_process = {"start_new_session": True, "preexec_fn": stage.end_with_parent}
        child = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, **of_process)
        try:
            child.wait(CASES[name])
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    host.end_all()
    for image in options.images.iterdir():
        if image.is_dir():
            shutil.rmtree(image, ignore_errors=True)
    row = json.loads(path.read_text()) if path.exists() else None
    if row is None:
        said = tail(options.out / f"{name}.log")
        row = {"case": name, "outcome": "FAILED", "said": f"not done after {CASES[name]} s, or ended: {said}"}
    return row | {"wall": round(time.monotonic() - begun, 1)}


@contextlib.contextmanager
def image_directory(options):
    """Yields the directory of the images: on the disk if it is fast enough, otherwise in a new tmpfs."""
    if options.images:
        options.images.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield options.images, f"{options.images}, as requested"
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        path = Path(directory)
        rates = [host.GIB / seconds for seconds in host.copy_seconds(path, host.GIB)]
        shown = "writes {:.2f} GB/s, reads {:.2f} GB/s".format(*(rate / 1e9 for rate in rates))
        if min(rates) >= FAST and shutil.disk_usage(path).free > 3 * options.gib * host.GIB:
            yield path, f"a disk that {shown}"
            return
        size = 3 * options.gib + 16
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}G,mode=700", "tmpfs", path], check=True)
        try:
            yield path, f"a tmpfs, because the disk {shown}"
        finally:
            subprocess.run(["umount", "-l", path], check=False)


def print_host(options):
    """Prints what the outcome of the cases depends on."""
    own = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in own.splitlines() if ":\t" in line)
    print("host: " + ", ".join(f"{name} {fields.get(name)}" for name in ("CapBnd", "CapInh", "NoNewPrivs", "Seccomp")))
    print(f"host: kernel {os.uname().release}, control groups at {host.control_groups()}, systemd {host.has_systemd()}")
    flags = Path("/proc/cpuinfo").read_text()
    print(f"host: SHA instructions: {' sha_ni ' in flags}; {os.cpu_count()} processors")
    found = subprocess.run(["criu", "--version"], capture_output=True, text=True)
    print(f"host: criu {found.stdout.split()[1] if found.returncode == 0 else found.stderr}")
    try:
        subprocess.run([sys.executable, "-c", ""], check=True, **host.OWNER)
    except (OSError, subprocess.CalledProcessError) as why:
        print(f"host: the user nobody cannot run {sys.executable}: {why}")
    print(f"host: the driver is open in {host.holders()}", flush=True)


def figures_of(row, of_plugin, place):
    """Returns the figures of the training. `of_plugin`: the row of CRIU's own plugin, or `None`."""
    gib, size = row["bytes"] / host.GIB, row["bytes"]
    note = f"16 GiB on the GPU, image of {gib:.1f} GiB on {place}; once; {{}}"
    steps = ", ".join(f"{what} after {at} s" for what, at in row["save-steps"].items())
    own = "the bytes alone: {:.2f} s ({:.2f} GB/s), with 8 threads {:.2f} s"
    writes = own.format(row["write"], size / row["write"] / 1e9, row["write-8-threads"])
    reads = own.format(row["read"], size / row["read"] / 1e9, row["read-8-threads"])
    begins = f"CRIU begins after {row['restore-process-after']} s"
    if of_plugin:
        steps += f"; CRIU's own plugin as root: {of_plugin['hibernate']} s"
        begins += f"; CRIU's own plugin as root: {of_plugin['restore']} s"
    return [
        ("hibernate-16GiB", row["hibernate"], "s", note.format(steps)),
        ("restore-16GiB", row["restore"], "s", note.format(begins)),
        ("hibernate-16GiB-over-disk", row["hibernate"] / row["write"], "ratio", note.format(writes)),
        ("restore-16GiB-over-disk", row["restore"] / row["read"], "ratio", note.format(reads)),
    ]


def summary(row):
    keys = ("hibernate", "restore", "bytes", "found", "expected", "tries", "said", "said-first", "driver-open-in")
    words = [f"{key} {row[key]}" for key in keys if row.get(key) not in (None, "", {})]
    return f"case {row['case']}: {row['outcome']} ({row['wall']} s): {'; '.join(words)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    absolute = lambda path: Path(path).resolve()
    parser.add_argument("--programs", type=absolute, default=absolute("target/release"))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES)[1:])
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--small", type=int, default=2)
    parser.add_argument("--images", type=absolute)
    parser.add_argument("--warm", type=int, default=0, help="GiB of memory to use and free before the first case")
    parser.add_argument("--stand-ins", type=absolute, metavar="CRIU")
    parser.add_argument("--plugin", type=absolute)
    parser.add_argument("--llama-server", type=absolute)
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--out", type=absolute, default=absolute("out"))
    parser.add_argument("--json", type=absolute)
    parser.add_argument("--commit")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    if options.one:
        return carry_out(options, options.one)
    if os.geteuid() != 0:
        parser.error("it must run as root")
    if host.SOCKET.exists() and host.has_systemd():
        parser.error("nvshare-hibernate.socket is active. Run: systemctl stop nvshare-hibernate.socket")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.out.glob("native-*.json"):
        path.unlink()
    # So that the stand-ins are removed, and the programs are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.stand_ins:
        host.install_stand_ins(options.stand_ins)
    try:
        host.end_all()  # left by a killed run
        print_host(options)
        host.touch_memory(options.warm) if options.warm else None
        with image_directory(options) as (options.images, place):
            print(f"host: images on {place}", flush=True)
            sys.exit(measure(options, place))
    finally:
        host.end_all()
        host.remove_stand_ins()


def measure(options, place):
    """Runs the cases. Returns 1 if a program was lost or had a wrong result."""
    rows = []
    for name in options.cases:
        row = run_case(options, name)
        print(summary(row), flush=True)
        rows.append(row | {"place": place})
        (options.out / "rows.json").write_text(json.dumps(rows, indent=1))
    of_case = {row["case"]: row for row in rows if row["outcome"] == "right"}
    if "train" in of_case and options.json and options.gib == 16 and not options.driver:
        figures.add(options.json, figures_of(of_case["train"], of_case.get("plugin"), place), options.commit)
    return int(any(row["outcome"].isupper() for row in rows))


if __name__ == "__main__":
    main()
