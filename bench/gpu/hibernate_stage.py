"""The parts that the cases of hibernate.py share: a scheduler with its helpers, programs, saving and restoring."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import hibernate_host as host
import stage

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "hibernate_programs.py"
SETTINGS = 'time-quantum = 30\nsleep-after = "never"\n'
START, SAVE = 150, 200
BEFORE = 20


class Refused(Exception):
    """nvsharectl refuses, with these words."""


class Stage:
    """A scheduler of the user nobody, helpers, and commands to the scheduler."""

    def __init__(self, options, name):
        self.options, self.name = options, name
        self.directory = Path(tempfile.mkdtemp(prefix="nvshare-hibernate-"))
        os.chown(self.directory, host.USER, host.USER)
        self.directory.chmod(0o755)
        # The programs' user may not be able to enter the repository.
        self.programs = self.directory / "programs"
        shutil.copytree(options.programs, self.programs, ignore=lambda _, names: set(names) - KEPT)
        for file in ("hibernate_programs.py", "stage.py"):
            shutil.copy(HERE / file, self.programs)
        self.daemon = None

    def begin(self, **environment):
        """Starts the scheduler, with these variables, and the listener for helpers."""
        self.helpers = host.Helpers(self.programs, self.options.images, self.path("helper.log"))
        notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = self.directory / "notify"
        address.unlink(missing_ok=True)
        notes.bind(str(address))
        os.chown(address, host.USER, host.USER)
        threading.Thread(target=lambda: all(iter(lambda: notes.recv(4096), b"")), daemon=True).start()
        environment = os.environ | {"NOTIFY_SOCKET": str(address)} | environment
        self.daemon = stage.scheduler(self.programs, self.directory, SETTINGS, env=environment, **host.OWNER)

    def end(self):
        """Ends the scheduler and all helpers."""
        self.daemon.terminate()
        self.daemon.wait()
        self.helpers.stop()
        shutil.copyfile(self.directory / "scheduler.log", self.path("scheduler.log"))

    def path(self, name):
        return self.options.out / f"{self.name}.{name}"

    def control(self, *words, limit=SAVE):
        command = [self.programs / "nvsharectl", "--control", self.directory / "control.sock", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **host.OWNER)
        if done.returncode:
            raise Refused((done.stderr or done.stdout).strip())
        return done.stdout

    def clients(self):
        return json.loads(self.control("--json", "status"))["clients"]


# The files of --programs that are used.
KEPT = {"nvshare-scheduler", "nvsharectl", "nvshare-checkpoint", "nvshare-hibernate", "cuda-program", "libnvshare.so"}


class Program:
    """A program of the user nobody, in a scope of its slice, without a terminal."""

    def __init__(self, stage_, words, is_python=True, native=False, is_root=False, **environment):
        self.stage, self.is_python = stage_, is_python
        kind = "native" if native else "program"
        # Root without capabilities cannot write where nobody can.
        directory = Path(tempfile.mkdtemp(dir=stage_.directory)) if is_root else stage_.directory
        self.log = directory / f"{kind}-{time.monotonic_ns()}.log"
        self.kept = stage_.path(f"{kind}.log")
        variables = os.environ | {"NVSHARE_SOCKET": f"{stage_.directory}/scheduler.sock", "HOME": str(stage_.directory)}
        variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVSHARE_DISABLE": "1" if native else ""} | environment
        if stage_.options.driver:
            variables["HIBERNATE_DRIVER"] = "1"
        run = [stage_.programs / "nvsharectl", "run", f"--portable={self.log}", "--", *words]
        user = ["setpriv", "--inh-caps=-all"]
        if is_root:
            user += ["--bounding-set=-all"]  # CRIU fails to restore capabilities where it lacks some
        else:
            user += ["--reuid", str(host.USER), "--regid", str(host.USER), "--clear-groups"]
        # Waits until it is in its scope.
        words = ["sh", "-c", 'read go; exec "$@"', "sh", *user, *map(str, run)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        starter = subprocess.Popen(words, env=variables, cwd="/", **pipes)
        host.create_scope(f"bench-{starter.pid}.scope", starter.pid)
        said, _ = starter.communicate("go\n", timeout=START)
        found = re.search(r"runs as process (\d+),", said)
        if not found:
            raise SystemExit(f"the program was not started: {said}")
        # The process that is saved, with its descendants, and the one of them that uses the GPU.
        self.pid = self.client = int(found[1])

    def lines(self):
        found = []
        with contextlib.suppress(OSError):
            shutil.copyfile(self.log, self.kept)
            for line in self.log.read_text(errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def lives(self):
        host.reap()
        with contextlib.suppress(OSError):
            return "\nState:\tZ" not in Path(f"/proc/{self.pid}/status").read_text()
        return False

    def until_gone(self):
        """Waits until another process may have the process ID: the parent of the program waits for it, too."""
        is_gone = lambda: not self.lives() and not Path(f"/proc/{self.pid}").exists()
        self.wait("the process ID is free", is_gone, 30, lives=False)

    def wait(self, what, is_done, limit=START, lives=True):
        until = time.monotonic() + limit
        while not (found := is_done()):
            if lives and not self.lives():
                raise SystemExit(f"the program has ended: {tail(self.log)}")
            if time.monotonic() > until:
                raise SystemExit(f"not within {limit} s: {what}. The program: {tail(self.log)}")
            time.sleep(0.01)
        return found

    def until_works(self, more=BEFORE):
        """Waits until the program has completed more steps."""
        if not self.is_python:
            served = lambda client: client["pid"] == self.client and any(gpu["grants"] for gpu in client["gpus"])
            return self.wait("the program is served", lambda: any(map(served, self.stage.clients())))
        before = len(self.lines())
        return self.wait(f"{more} more steps", lambda: len(self.lines()) >= before + more)

    def first_step_after(self, moment):
        """Waits for a step that the program completes after this time. Returns the seconds between."""
        if not self.is_python:
            begun = time.time()
            self.until_works()
            return time.time() - moment if begun > moment else 0
        after = lambda: [line["at"] for line in self.lines() if line.get("at", 0) > moment]
        return self.wait("a step after the restore", after)[0] - moment

    def result(self, limit=START):
        """Waits for the end of the program. Returns its result."""
        if not self.is_python:
            os.kill(self.client, signal.SIGUSR1)
        self.wait("the program's end", lambda: not self.lives(), limit, lives=False)
        lines = self.lines()
        if not self.is_python:
            return [line["ok"] for line in lines if "ok" in line]
        return next((line["sum"] for line in lines if line.get("done")), f"none: {tail(self.log)}")


def tail(path):
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[-300:].replace("\n", " | ")
    return "no output"

def save(stage_, program, row, *options):
    """Saves a program to disk, with these options of `nvsharectl hibernate`. Returns the image, and notes the
    times."""
    for attempt in range(2):
        if attempt:
            program.wait("the program is back", lambda: is_back(stage_, program.client), 30)
            host.VERBOSE.touch()
        watch = host.Watch(stage_.options.images, stage_.path(f"criu-{attempt}"))
        watch.start()
        begun = time.monotonic()
        try:
            said = stage_.control("hibernate", *options, str(program.pid))
        except Refused as why:
            # Once more, with detailed logs.
            if attempt or "CRIU fails" not in str(why):
                raise
            row["said-first"] = str(why)
            continue
        finally:
            times = watch.stop(begun)
            row["save-steps"], row["bytes"] = times, watch.bytes
            host.VERBOSE.unlink(missing_ok=True)
        row["hibernate"] = round(time.monotonic() - begun, 3)
        if program.lives():
            raise SystemExit("the program runs after it was saved")
        program.until_gone()
        return re.search(r"nvsharectl restore (\S+)", said)[1]


def is_back(stage_, pid):
    """Returns true if a program runs again that could not be saved."""
    return any(client["pid"] == pid and not client["paused"] for client in stage_.clients())


def order_restore(stage_, image, row):
    """Restores an image. If this fails, tries once more with detailed logs, and keeps both logs."""
    try:
        stage_.control("restore", image)
    except Refused as why:
        for log in (stage_.options.images / image / "work").glob("*.log"):
            shutil.copyfile(log, stage_.path(log.name))
        host.VERBOSE.touch()
        with contextlib.suppress(Refused):
            stage_.control("restore", image)
            row["second-restore"] = "succeeded"
        host.VERBOSE.unlink()
        for log in (stage_.options.images / image / "work").glob("*.log"):
            shutil.copyfile(log, stage_.path(f"detailed-{log.name}"))
        raise SystemExit(f"the restore failed: {why}") from None


def restore(stage_, program, image, row):
    host.drop_caches()
    moment, begun = time.time(), time.monotonic()
    appeared = []
    is_over = threading.Event()

    def look():
        while not is_over.wait(0.01) and not appeared:
            if Path(f"/proc/{program.pid}").exists():
                appeared.append(round(time.monotonic() - begun, 2))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        order_restore(stage_, image, row)
    finally:
        is_over.set()
        watcher.join()
    row["restore-command"] = round(time.monotonic() - begun, 3)
    row["restore-process-after"] = appeared[0] if appeared else None
    row["restore"] = round(program.first_step_after(moment), 3)


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
