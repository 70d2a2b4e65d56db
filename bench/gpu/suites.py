#!/usr/bin/env python3
"""Runs test suites of other projects natively and under nvshare, and finds tests whose outcome
differs.

  suites.py [--programs target/release]
            [--suites cupy,numba,kvcached,torch_memory_saver,torch_memory_saver-nvml,warp,drjit]
            [--modes native,nvshare,swapped] [--tests target/dev/suites] [--budget 330] [--free 24]
            [--processes 4] [--json bench/results.json] [--commit ID] [--out DIRECTORY]

The modes are:
  native   without nvshare; runs the tests for which its time suffices
  nvshare  under nvshare; runs the same tests
  swapped  under nvshare; runs the same tests beside a competing program that causes evictions. Once
           a second, this program allocates all available memory, sets and checks it, and then frees
           the memory that CUDA contexts of new processes need.

In every mode, a ballast process holds all of the GPU except --free GiB, so that the tests find the
same GPU. Tests run in several concurrent processes.

A test whose outcome differs from `native` runs once more in both modes. The result is one of:
  changed  the native outcome is the same again, and the outcome of the other mode differs again
  flaky    the native outcome differs from the first native outcome
  once     both outcomes are now the same as the first native outcome

If the process of a test crashes, or prints no outcome for --patience seconds, the test has the
outcome "crashed" or "timed out". Another process then runs the remaining tests.

Prints JSON lines:
  skipped  a suite that is not installed
  run      one suite in one mode: the number of tests for each outcome, the seconds, and the number
           of tests for which the time did not suffice; under nvshare also the swapped bytes, and in
           `swapped` the rounds of the competing program
  compared one suite in one mode: the number of compared tests, and the tests that differ, with both
           outcomes and the reason
  summary  the figure foreign-suites-outcomes-changed, and the tests and suites that were not run

The suites are Python packages. numba-cuda and warp-lang include their tests. The tests of the other
suites are in folders of --tests, which have the names of the packages. NAME=PATH in --suites also
runs the tests at PATH. --out/suites.tar.gz contains all output of the tests. Needs a GPU and
pytest.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import figures
import stage

GIB, MIB = 2**30, 2**20
MODES = {"native": 1, "nvshare": 1.3, "swapped": 2.2}  # the part of a suite's time for each mode
AGAIN = 0.5  # the part of a suite's time in which differing tests run once more
RESTARTS = 20  # maximum number of restarts after crashes, for one process
# Timeout in seconds of the competing program's first round, and minimum of the time in which
# differing tests run once more.
START = 30
MEASURED = 1.5  # seconds until the scheduler has measured the GPU memory of other processes
OUT_OF_MEMORY = 2
WORK, PAUSE = 0.3, 0.7  # seconds of the competing program's rounds
NAMED = 40  # maximum number of tests that an output line names


@dataclass
class Suite:
    package: str  # package that must be installed
    files: list[str]  # test files in order; files that the installed version lacks are left out
    inside: str = ""  # package that contains the tests, if the tests are installed
    processes: int = 0  # number of test processes; 0: the value of --processes
    weight: float = 1  # part of the budget, relative to the other suites
    options: list[str] = field(default_factory=list)  # options of pytest


# Tests of torch_memory_saver that compare NVML's figures, and therefore assume that no other
# program allocates on the GPU.
MEASURING = "simple or cuda_graph or nested_region or training_engine"

SUITES = {
    "cupy": Suite(
        "cupy",
        [f"tests/cupy_tests/cuda_tests/{name}" for name in ("test_[!c]*.py", "test_compiler*.py", "test_cu[!t]*.py", "memory_hooks_tests")]
        + [f"tests/cupy_tests/core_tests/test_{name}.py" for name in ("dlpack", "multithreading", "ndarray_get", "ndarray", "userkernel")]
        + [f"tests/cupy_tests/core_tests/test_{name}.py" for name in ("ndarray_copy_and_view", "ndarray_owndata", "reduction", "raw")]
        + [f"tests/cupy_tests/{name}" for name in ("test_cublas.py", "io_tests", "creation_tests", "fft_tests/test_cache.py")],
        weight=3,
    ),
    "numba": Suite(
        "numba_cuda",
        ["cudadrv/test_*.py", "nrt/test_*.py"]
        + [f"cudapy/test_{name}.py" for name in ("ipc", "stream_api", "multithreads", "multiprocessing", "cuda_array_interface")]
        + [f"cudapy/test_{name}.py" for name in ("sm", "constmem", "cooperative_groups", "array", "device_array_capture", "dispatcher")]
        + [f"cudapy/test_{name}.py" for name in ("exception", "userexc", "print", "gufunc", "reduction", "random", "sync", "nondet")]
        + [f"cudapy/test_{name}.py" for name in ("retrieve_autoconverted_arrays", "record_dtype", "localmem", "laplace", "matmul", "atomics")],
        inside="numba.cuda.tests",
        weight=3,
        # test_managed_alloc asks for more managed memory than is free, which can hang a GPU.
        options=["-o", "consider_namespace_packages=true", "-k", "not managed_alloc"],
    ),
    "kvcached": Suite("kvcached", ["tests/test_vmm_transaction.py", "tests/test_*.py"], processes=1, weight=1.5),
    "torch_memory_saver": Suite("torch_memory_saver", ["test/test_[!m]*.py"], weight=2.5, options=["-k", f"not ({MEASURING})"]),
    "torch_memory_saver-nvml": Suite("torch_memory_saver", ["test/test_examples.py"], processes=1, weight=2, options=["-k", MEASURING]),
    # Most tests run for each type of array; those for the CPU don't use the GPU.
    "drjit": Suite(
        "drjit",
        [f"tests/test_{name}.py" for name in ("event", "green_context", "texture", "memop", "reduction", "coop_vec", "batched_gemm")]
        + [f"tests/test_{name}.py" for name in ("hashgrid", "nn", "opt", "rand", "conversion", "wrap", "init", "tensor")]
        + [f"tests/test_{name}.py" for name in ("while_loop", "switch", "freeze")],
        weight=3,
        options=["-k", "cuda"],
    ),
    "warp": Suite("warp", ["cuda/test_*.py", "test_array.py", "test_copy.py", "test_launch.py", "test_*.py"], inside="warp.tests", weight=3),
}


# Roles of child processes.


def ballast(free, gpu=0):
    stage.end_with_parent()
    driver = stage.Driver(gpu)
    at, size = ctypes.c_uint64(), max(0, driver.free() - int(free * GIB))
    if size:
        driver.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
    print(json.dumps({"held-gib": round(size / GIB, 2), "free-gib": round(driver.free() / GIB, 2)}), flush=True)
    sys.stdin.read()


class Competitor:
    def __init__(self, spared):
        self.driver, self.spared, self.held = stage.Driver(), spared, []

    def fill(self):
        """Allocates all available memory."""
        for size in (256 * MIB, 16 * MIB, 2 * MIB):
            while True:
                at = ctypes.c_uint64()
                if self.driver.library.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)):
                    break
                self.held.append((at, size))

    def set(self, value):
        for at, size in list(self.held):
            code = self.driver.library.cuMemsetD32_v2(at, ctypes.c_uint(value), ctypes.c_size_t(size // 4))
            if code == OUT_OF_MEMORY:  # memory is first needed when it is used
                self.free(at, size)
            elif code:
                raise SystemExit(f"cuMemsetD32_v2 failed with {code}")
        self.driver.call("cuCtxSynchronize")

    def wrong(self, value):
        """Returns the number of allocations whose first or last word differs from `value`."""
        word, wrong = ctypes.c_uint(), 0
        for at, size in self.held:
            seen = set()
            for offset in (0, size - 4):
                self.driver.call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(at.value + offset), ctypes.c_size_t(4))
                seen.add(word.value)
            wrong += seen != {value}
        return wrong

    def spare(self):
        until = sum(size for _, size in self.held) - self.spared
        while self.held and sum(size for _, size in self.held) > until:
            self.free(*self.held[0])

    def free(self, at, size):
        self.driver.call("cuMemFree_v2", at)
        self.held.remove((at, size))

    def round(self, number):
        wrong = self.wrong(number - 1)
        self.fill()
        until = time.monotonic() + WORK
        self.set(number)
        while time.monotonic() < until:
            self.set(number)
        taken = sum(size for _, size in self.held)
        self.spare()
        return {"rounds": number, "gib": round(taken / GIB, 2), "wrong": wrong}


def compete(spared):
    stage.end_with_parent()
    competitor, number, wrong = Competitor(int(spared * GIB)), 0, 0
    time.sleep(MEASURED)
    while True:
        number += 1
        said = competitor.round(number)
        wrong += said["wrong"]
        print(json.dumps(said | {"wrong": wrong}), flush=True)
        time.sleep(PAUSE)


# One suite in one mode.


def last_line(file):
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1]) if lines else None


class Part:
    """A process with a part of the tests, and its replacements after crashes."""

    def __init__(self, words, folder, environment, where, patience):
        self.words, self.folder, self.patience = words, folder, patience
        self.file, self.log = where.with_suffix(".jsonl"), where.with_suffix(".log")
        self.environment = os.environ | environment | {"OUTCOMES_FILE": str(self.file)}
        self.starts, self.trouble, self.process = 0, None, None
        self.start()

    def start(self):
        self.starts += 1
        self.size, self.heard = -1, time.monotonic()
        with open(self.log, "a") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            life = {"start_new_session": True, "preexec_fn": stage.end_with_parent}
            self.process = subprocess.Popen(self.words, cwd=self.folder, env=self.environment, **streams, **life)

    def lines(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def running(self):
        """Returns the running test; None if no test is running."""
        lines = [line for line in self.lines() if "began" in line or "test" in line]
        return lines[-1].get("began") if lines else None

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def is_done(self):
        status = self.process.poll()
        size = self.file.stat().st_size if self.file.exists() else 0
        if size != self.size:
            self.size, self.heard = size, time.monotonic()
        if status is None and time.monotonic() - self.heard < self.patience:
            return False
        self.kill()  # also kills processes that its tests have left
        test = self.running()
        if status in (0, 1, 5) and self.lines():  # pytest: all passed, some failed, no tests
            return True
        what = "timed out" if status is None else "crashed"
        if test is None or self.starts > RESTARTS:
            self.trouble = {"what": what, "status": status, "log": self.log.read_text(errors="replace")[-1000:]}
            return True
        with self.file.open("a") as file:
            print(json.dumps({"test": test, "outcome": what, "why": f"status {status}"}), file=file)
        self.start()
        return False


@dataclass
class Outcomes:
    tests: dict = field(default_factory=dict)  # for each test, the line that the plugin wrote
    collected: int = 0
    cut: bool = False
    troubles: list = field(default_factory=list)

    def of(self, test):
        return self.tests[test]["outcome"] if test in self.tests else None

    @classmethod
    def of_parts(cls, parts, cut):
        said = cls(cut=cut, troubles=[part.trouble for part in parts if part.trouble])
        for part in parts:
            lines = part.lines()
            said.tests |= {line["test"]: line for line in lines if "test" in line}
            said.collected += next((line["collected"] for line in lines if "collected" in line), 0)
        return said


class Run:
    def __init__(self, arguments, directory):
        self.arguments, self.programs, self.directory = arguments, arguments.programs.resolve(), directory
        self.logs = directory / "logs"
        self.logs.mkdir()
        self.deadline = time.monotonic() + (arguments.budget or float("inf"))
        self.suites, self.places = {}, {}
        self.compared, self.differing, self.notes = Counter(), {"changed": [], "flaky": [], "once": []}, []

    @contextlib.contextmanager
    def mode(self, mode, case, processes):
        """Prepares a mode for `processes` test processes. Yields their environment variables."""
        if mode == "native":
            yield {}
            return
        metrics = self.directory / "metrics.sock"
        metrics.unlink(missing_ok=True)
        settings = 'time-quantum = "1s"\n' if mode == "swapped" else ""
        settings += f"{self.arguments.settings}\n[metrics]\nlisten = {json.dumps(str(metrics))}\n"
        with contextlib.ExitStack() as stack:
            daemon = stage.scheduler(self.programs, self.directory, settings)
            stack.callback(stage.end, daemon)
            environment = stage.under_nvshare(self.programs, self.directory)
            time.sleep(MEASURED)
            rounds = self.directory / "rounds.jsonl"
            if mode == "swapped":
                # Each test process can start another process, as tests of IPC do. One more process
                # can still be ending.
                spared = self.arguments.context * (2 * processes + 1)
                with rounds.open("w") as file:
                    words = [sys.executable, __file__, "--compete", str(spared)]
                    competitor = subprocess.Popen(words, stdout=file, env=os.environ | environment)
                stack.callback(stage.end, competitor)
                until = time.monotonic() + START
                while last_line(rounds) is None and competitor.poll() is None and time.monotonic() < until:
                    time.sleep(0.05)
            yield environment
            with contextlib.suppress(OSError):
                case["swapped-gib"] = [round(count / GIB, 2) for count in stage.swapped(metrics)]
            case["clients"] = len({line["pid"] for line in stage.events(self.directory / "record.jsonl") if line["what"] == "attach"})
            if mode == "swapped":
                case["competitor"] = last_line(rounds) or {"rounds": 0, "wrong": 0}
                if competitor.poll() is not None:
                    self.notes.append(f"{case['label']}: the competing program ended with status {competitor.returncode}")
                if case["competitor"]["wrong"]:
                    self.notes.append(f"{case['label']}: {case['competitor']['wrong']} allocations of the competing program had wrong contents")
            (self.directory / "scheduler.log").rename(self.logs / f"{case['label']}-scheduler.log")

    def tests_of(self, name, suite):
        """Returns the folder in which the suite's tests run, and the test files. If the suite is
        not installed, there are no files."""
        find = "import importlib.util as u; "
        find += f"print(u.find_spec({suite.package!r}) and u.find_spec({suite.inside or suite.package!r}).submodule_search_locations[0])"
        found = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True).stdout.strip()
        if found in ("", "None"):
            return None, []
        folder = Path(found) if suite.inside else self.arguments.tests.resolve() / suite.package
        files = [file for pattern in suite.files for file in sorted(folder.glob(pattern))]
        return folder, list(dict.fromkeys(files))

    def run(self, name, mode, seconds, only=None, again=""):
        """Runs the tests of a suite, or only the tests in `only`, for at most `seconds`."""
        suite, (folder, files) = self.suites[name], self.places[name]
        begun, label = time.monotonic(), f"{name}-{mode}{again}"
        case = {"kind": "run", "label": label}
        common = {"CUPY_CACHE_DIR": str(self.directory / "cupy"), "PYTHONDONTWRITEBYTECODE": "1"}
        common["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parent)]))
        if only is not None:
            (self.directory / "only").write_text("".join(f"{test}\n" for test in only))
            common["OUTCOMES_TESTS"] = str(self.directory / "only")
            files = [file for file in files if any(file.name in test for test in only)]
        words = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, "--continue-on-collection-errors"]
        words += ["-p", "outcomes", "-p", "no:cacheprovider", *suite.options, *files]
        count, parts, left = suite.processes or self.arguments.processes, [], []
        count = min(count, len(only)) if again else count
        with self.mode(mode, case, count) as environment:
            try:
                for i in range(count):
                    own = common | environment | {"OUTCOMES_SHARE": f"{i}/{count}"}
                    parts.append(Part(words, folder, own, self.logs / f"{label}-{i}", self.arguments.patience))
                left = parts
                while left and time.monotonic() < begun + seconds:
                    time.sleep(0.1)
                    left = [part for part in left if not part.is_done()]
            finally:
                for part in parts:
                    part.kill()
        said = Outcomes.of_parts(parts, cut=bool(left))
        case |= {"outcomes": Counter(line["outcome"] for line in said.tests.values()), "seconds": round(time.monotonic() - begun, 1)}
        of = len(only) if only is not None else said.collected
        if left:
            case["not-run"] = max(0, of - len(said.tests))
            self.notes.append(f"{label}: {case['not-run']} of {of} not run in {seconds:.0f} s")
        if restarts := sum(part.starts - 1 for part in parts):
            case["restarts"] = restarts
        if said.troubles:
            case["troubles"] = said.troubles
            self.notes += [f"{label}: a process {trouble['what']} outside of tests" for trouble in said.troubles]
        say(case)
        return said

    def compare(self, name, mode, native, other, seconds):
        """Runs the tests that differ once more, and classifies them. This can take longer than
        `seconds`; later suites then have less time."""
        tests = [test for test in {**native.tests, **other.tests} if test in other.tests or not other.cut]
        differing = [test for test in tests if native.of(test) != other.of(test)]
        self.compared[mode] += len(tests)
        kinds = {"changed": differing, "flaky": [], "once": []}
        if differing:
            least = min(START, (self.deadline - time.monotonic()) / 2)
            natively = self.run(name, "native", max(seconds / 2, least), differing, f"-again-for-{mode}")
            again = self.run(name, mode, max(seconds / 2, least), differing, "-again")
            kinds["changed"] = []
            for test in differing:
                is_flaky = test in natively.tests and natively.of(test) != native.of(test)
                is_once = test in again.tests and again.of(test) == native.of(test)
                kinds["flaky" if is_flaky else "once" if is_once else "changed"].append(test)
        said = {"kind": "compared", "suite": name, "mode": mode, "tests": len(tests)}
        for kind, those in kinds.items():
            self.differing[kind] += [f"{name} {mode}: {test}" for test in those]
            said[kind] = len(those)
            named = [{"test": test, "native": native.of(test), mode: other.of(test) or "not reported"} for test in those[:NAMED]]
            if named:
                said[f"{kind}-tests"] = [line | {"why": (other.tests.get(line["test"]) or {}).get("why", "")} for line in named]
        say(said)

    def suite(self, name, deadline):
        modes = [mode for mode in MODES if mode in self.arguments.modes and mode != "native"]
        left = MODES["native"] + sum(MODES[mode] + AGAIN for mode in modes)

        def seconds(part):
            nonlocal left
            given = (deadline - time.monotonic()) * part / left
            left -= part
            return given

        native = self.run(name, "native", min(seconds(MODES["native"]), self.arguments.seconds))
        slow = [test for test in native.tests if native.of(test) == "timed out"]
        if slow:
            self.notes.append(f"{name}: not compared, timed out natively: {', '.join(slow)}")
        native.tests = {test: line for test, line in native.tests.items() if test not in slow}
        if not native.tests:
            self.notes.append(f"{name}: no test ran natively")
            return
        for mode in modes:
            other = self.run(name, mode, seconds(MODES[mode]), list(native.tests))
            self.compare(name, mode, native, other, seconds(AGAIN))

    def run_all(self):
        say({"kind": "measured", "files": figures.measured_files(self.programs), "hardware": figures.hardware()})
        named = [text.partition("=")[::2] for text in self.arguments.suites]
        self.suites = {name: Suite("", []) if path else SUITES[name] for name, path in named}
        self.places = {name: self.tests_of(name, self.suites[name]) for name, path in named if not path}
        self.places |= {name: (Path(path).resolve().parent, [Path(path).resolve()]) for name, path in named if path}
        for name, (folder, files) in list(self.places.items()):
            if not files:
                say({"kind": "skipped", "suite": name, "why": f"no tests in {folder}" if folder else "not installed"})
                self.notes.append(f"{name}: not installed")
                del self.suites[name]
        with stage.ballast(self.arguments.free) as left:
            say({"kind": "ballast"} | left)
            for i, name in enumerate(self.suites):
                now = time.monotonic()
                if now + 5 > self.deadline:
                    self.notes.append(f"{name}: not run")
                    continue
                part = self.suites[name].weight / sum(self.suites[other].weight for other in list(self.suites)[i:])
                self.suite(name, now + (self.deadline - now) * part)

    def report(self):
        changed = self.differing["changed"]
        said = {"kind": "summary", "compared": self.compared, "figure": "foreign-suites-outcomes-changed", "value": len(changed)}
        said |= {kind: tests[:NAMED] for kind, tests in self.differing.items()} | {"notes": self.notes}
        say(said)
        if self.arguments.json and self.compared:
            note = ", ".join(f"{count} tests compared {mode}" for mode, count in self.compared.items())
            note += f"; {len(self.differing['flaky'])} flaky natively, {len(self.differing['once'])} differed once only; "
            note += "; ".join([f"suites: {', '.join(self.suites)}", *self.notes])
            figures.add(self.arguments.json, [("foreign-suites-outcomes-changed", len(changed), "count", note)], self.arguments.commit)


def say(what):
    print(json.dumps(what, ensure_ascii=False), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of nvshare-scheduler and libnvshare.so")
    parser.add_argument("--suites", type=lambda text: text.split(","), default=list(SUITES))
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--tests", type=Path, default=Path("target/dev/suites"), help="folder with the tests of each suite")
    parser.add_argument("--budget", type=float, default=330, help="seconds; 0: no limit")
    parser.add_argument("--seconds", type=float, default=25, help="maximum seconds of a native run")
    parser.add_argument("--patience", type=float, default=40, help="timeout of a test, in seconds")
    parser.add_argument("--processes", type=int, default=4, help="number of concurrent test processes")
    parser.add_argument("--free", type=float, default=24, help="GiB that the ballast leaves free")
    parser.add_argument("--context", type=float, default=0.7, help="GiB that the competing program leaves free for each new process")
    parser.add_argument("--settings", default="", help="additional lines of the scheduler's configuration")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit of the measured programs (default: the checked-out commit)")
    arguments = parser.parse_args()
    known = {*SUITES, *MODES, *(text for text in arguments.suites if "=" in text)}
    if unknown := [text for text in arguments.suites + arguments.modes if text not in known]:
        parser.error(f"unknown suite or mode: {unknown[0]}")
    # Turns signals into an exit, so that all started processes are killed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        run = Run(arguments, Path(directory))
        try:
            run.run_all()
        finally:
            run.report()
            if arguments.out:
                shutil.make_archive(arguments.out / "suites", "gztar", run.logs)
    sys.exit(1 if run.differing["changed"] else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ballast"]:
        ballast(float(sys.argv[2]), *map(int, sys.argv[3:]))
    elif sys.argv[1:2] == ["--compete"]:
        compete(float(sys.argv[2]))
    else:
        main()
