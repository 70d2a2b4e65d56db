"""What hibernate.py needs from a host: helpers of the scheduler, scopes, memory and disks. On a host without
systemd, stand-ins for its parts."""

import contextlib
import mmap
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import stage

USER = 65534  # nobody
OWNER = {"user": USER, "group": USER, "extra_groups": []}
RUN = Path("/run/nvshare")
SOCKET = Path("/run/nvshare-hibernate/hibernate.sock")
STAND_INS = Path("/usr/sbin")
# While this file exists, the stand-in for CRIU writes detailed logs.
VERBOSE = Path("/run/nvshare-hibernate/verbose")
MARK = "# A stand-in of nvshare's bench/gpu/hibernate.py"
GIB = 1 << 30
PIECE = 16 << 20

# Creates a scope as systemd does: moves a process into a control group. `Scope::start` in scope.rs has the arguments.
BUSCTL = f"""#!/bin/sh
{MARK}
[ "$8" = StartTransientUnit ] || {{ echo "only StartTransientUnit, not $8" >&2; exit 1; }}
shift 9
scope=$1 slice=$9
while [ "$1" != PIDs ]; do shift; done
mkdir -p "@MOUNT@/user.slice/$slice/$scope" && echo "$4" >"@MOUNT@/user.slice/$slice/$scope/cgroup.procs"
"""
CRIU = f"""#!/bin/sh
{MARK}
[ ! -e {VERBOSE} ] || set -- "$@" -v4
exec "@CRIU@" "$@"
"""


def adopt_orphans():
    """Makes this process the parent of the programs whose parents have ended. In some virtual machines, the first
    process does not wait for such processes, and then their IDs stay in use."""
    set_child_subreaper = 36
    stage.LIBC.prctl(set_child_subreaper, 1)


def reap():
    """Waits for adopted processes that have ended."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ChildProcessError):
            state, parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                os.waitpid(int(process.name), os.WNOHANG)


def has_systemd():
    return Path("/run/systemd/system").is_dir()


def control_groups():
    """Returns the directory of the control groups of version 2, or `None`."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(mount.split()[4])
    return None


def install_stand_ins(criu):
    """Installs stand-ins for busctl and for the package criu, and mounts the control groups.

    Raises SystemExit if the host has systemd or a program of its own in the place of a stand-in."""
    if has_systemd():
        raise SystemExit("this host has systemd. Install the package criu, and leave out --stand-ins")
    if not control_groups():
        mount = Path("/sys/fs/cgroup/unified")
        with contextlib.suppress(OSError):
            mount.mkdir(parents=True, exist_ok=True)
        if not mount.is_dir():  # nothing can be created in /sys/fs/cgroup
            mount = Path("/run/nvshare-cgroup2")
            mount.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "cgroup2", "none", mount], check=True)
    for name, text in (("busctl", BUSCTL), ("criu", CRIU)):
        path = STAND_INS / name
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise SystemExit(f"{path} exists. Remove it, or leave out --stand-ins")
        path.write_text(text.replace("@MOUNT@", str(control_groups())).replace("@CRIU@", str(criu.resolve())))
        path.chmod(0o755)


def remove_stand_ins():
    for name in ("busctl", "criu"):
        path = STAND_INS / name
        if path.exists() and MARK in path.read_text(errors="replace"):
            path.unlink()


def slice_():
    return control_groups() / f"user.slice/user-{USER}.slice"


def end_all():
    """Ends all processes in the slice of the programs' user, and removes its empty control groups."""
    with contextlib.suppress(OSError):
        (slice_() / "cgroup.kill").write_text("1")
        until = time.monotonic() + 20
        while "populated 1" in (slice_() / "cgroup.events").read_text() and time.monotonic() < until:
            time.sleep(0.05)
    if not has_systemd():
        for path in sorted(slice_().glob("**/"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()


def create_scope(name, pid):
    """Moves a process into a new scope in the slice of the programs' user."""
    manager = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"]
    words = ["busctl", "--system", "--quiet", "--timeout=10", "call", *manager]
    words += ["StartTransientUnit", "ssa(sv)a(sa(sv))", name, "replace", "4", "Description", "s", "nvshare's benchmark"]
    words += ["Slice", "s", f"user-{USER}.slice", "CollectMode", "s", "inactive-or-failed"]
    words += ["PIDs", "au", "1", str(pid), "0"]
    subprocess.run(words, check=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 10
    while name not in Path(f"/proc/{pid}/cgroup").read_text():
        if time.monotonic() > until:
            raise SystemExit(f"process {pid} is not in {name}")
        time.sleep(0.01)


class Helpers:
    """Listens on the helper's socket, and starts a helper for each connection, as nvshare-hibernate.socket does."""

    def __init__(self, programs, images, log):
        self.words = [programs / "nvshare-hibernate", "--scheduler", str(USER), "--images", images]
        self.log, self.children = open(log, "a"), []
        RUN.mkdir(exist_ok=True)
        os.chown(RUN, USER, USER)
        SOCKET.parent.mkdir(exist_ok=True)
        SOCKET.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(SOCKET))
        os.chown(SOCKET, USER, USER)
        self.socket.listen(64)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "NVSHARE_DISABLE": "1"}
            child = subprocess.Popen(self.words, stdin=connection, stdout=self.log, stderr=self.log, env=environment)
            self.children.append(child)
            connection.close()

    def stop(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        SOCKET.unlink(missing_ok=True)
        for child in self.children:
            child.kill()
            child.wait()


class Watch(threading.Thread):
    """Watches the directory of the images while a program is saved. Notes the times of the steps, and keeps
    CRIU's logs, because the helper deletes an image that is not complete."""

    def __init__(self, images, logs):
        super().__init__(daemon=True)
        self.images, self.logs, self.known = images, logs, set(os.listdir(images))
        self.times, self.bytes, self.is_over = {}, 0, threading.Event()

    def note(self, what):
        self.times.setdefault(what, time.monotonic())

    def run(self):
        while not self.is_over.wait(0.02):
            with contextlib.suppress(OSError):  # the image may be deleted at any time
                for name in set(os.listdir(self.images)) - self.known - {"key"}:
                    if not name.startswith("."):
                        self.look(self.images / name)

    def look(self, image):
        self.note("checked")
        for log in (image / "work").glob("*.log"):
            shutil.copyfile(log, f"{self.logs}.{log.name}")
        size = sum(path.stat().st_size for path in (image / "criu").iterdir())
        if size > self.bytes:
            self.note("criu-writes")
            self.bytes = size
        if (image / "criu").stat().st_uid == 0:
            self.note("written")
        if (image / "manifest").exists():
            self.note("signed")

    def stop(self, begun):
        """Returns the seconds from `begun` to each step."""
        self.is_over.set()
        self.join()
        return {what: round(at - begun, 2) for what, at in self.times.items()}


def holders():
    """Returns the processes that have a GPU's device file open."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            files = {os.readlink(path) for path in (process / "fd").iterdir()}
            if any(file.startswith("/dev/nvidia") for file in files):
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def touch_memory(gib):
    """Uses this much memory and frees it: the memory of some virtual machines is slow when it is first used."""
    with mmap.mmap(-1, gib * GIB) as memory:
        zeros = bytes(PIECE)
        for at in range(0, gib * GIB, PIECE):
            memory[at : at + PIECE] = zeros


def copy_seconds(directory, size, threads=1):
    """Returns the seconds for writing this many bytes to a new file and for reading them, past the page cache
    where the file system can."""
    path, buffer = directory / "speed", mmap.mmap(-1, PIECE)
    buffer.write(os.urandom(PIECE))
    places = range(0, size - size % PIECE, PIECE)
    direct = os.O_DIRECT
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | direct))
    except OSError:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR))
        direct = 0
    file = os.open(path, os.O_RDWR | direct)

    def timed(work):
        begun = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, places))
        os.fsync(file)
        return time.monotonic() - begun

    try:
        into = [mmap.mmap(-1, PIECE) for _ in range(threads)]
        free = list(into)

        def read(at):
            target = free.pop()
            os.preadv(file, [target], at)
            free.append(target)

        wrote = timed(lambda at: os.pwrite(file, buffer, at))
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return wrote, timed(read)
    finally:
        os.close(file)
        path.unlink()


def drop_caches():
    subprocess.run(["sync"], check=True)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
