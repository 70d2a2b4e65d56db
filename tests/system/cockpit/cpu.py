"""Measures the processor time that the page costs with one viewer and 100 programs: of the page's
process in the browser and of the scheduler, in percent of a core. cockpit.sh starts it.

Chromium and Cockpit use processor time for any page, and the scheduler for the programs. So times at
which the page reads and times at which it stands still alternate, and the difference counts. The other
processes on the way are listed too."""

import argparse
import json
import os
import statistics
import subprocess
import time

import machine
from browser import Browser

parser = argparse.ArgumentParser()
parser.add_argument("--user", required=True)
parser.add_argument("--programs", type=int, default=100)
parser.add_argument("--seconds", type=int, default=30)
parser.add_argument("--rounds", type=int, default=5)
options = parser.parse_args()

TICKS = os.sysconf("SC_CLK_TCK")


def ticks(stat):
    """Processor time in the text of a file /proc/…/stat."""
    fields = stat.rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def nvml_ticks(pid):
    """Processor time of the scheduler's thread for NVML. The simulated NVML reads a file of each program,
    whether anybody looks at the page or not."""
    threads = [open(f"/proc/{pid}/task/{thread}/stat").read() for thread in os.listdir(f"/proc/{pid}/task")]
    return sum(ticks(stat) for stat in threads if "(nvml)" in stat)


def times():
    """Processor seconds of all processes, by the name that the result has for them."""
    found = {}
    kinds = [
        ("page", "--type=renderer"), ("browser", "chromium"), ("bridge", "cockpit-bridge"), ("cockpit-ws", "/cockpit-ws"),
        ("scheduler", "/usr/bin/nvshare-scheduler"), ("bus", "dbus-daemon --system"),
    ]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\0", b" ").decode(errors="replace")
            kind = next((kind for kind, text in kinds if text in words), None)
            used = ticks(open(f"/proc/{pid}/stat").read()) - (nvml_ticks(pid) if kind == "scheduler" else 0)
        except OSError:
            continue  # it has just ended
        if kind:
            found[kind] = found.get(kind, 0) + used / TICKS
    return found


def shares():
    """Percent of a core of each kind of process, over the measured time."""
    before, begin = times(), time.monotonic()
    time.sleep(options.seconds)
    after, took = times(), time.monotonic() - begin
    return {kind: 100 * (after[kind] - before.get(kind, 0)) / took for kind in after}


machine.GPU.update(CUDA_SIM_MEMORY="8G")
machine.run("systemctl", "enable", "--now", "--quiet", "nvshare.socket")
environment = [f"{name}={value}" for name, value in machine.GPU.items()]
command = ["runuser", "-u", options.user, "--", "env", *environment, "nvsharectl", "run", "--", "cuda-program", "naps",
           "--mem", "16M", "--seconds", "3600", "--pause-ms", "10000"]
started = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, umask=0)
           for _ in range(options.programs)]
machine.is_so("all programs", lambda: sum(len(one["gpus"]) for one in machine.status()["clients"]) == options.programs, patience=400)
still, watched = [], []
try:
    for _ in range(options.rounds):
        browser = Browser(machine.URL)
        browser.log_in(options.user, f"secret-{options.user}")
        browser.wait("the list", "page.querySelectorAll('#programs tbody tr').length === 25")
        time.sleep(5)
        watched.append(shares())
        browser.run("!(view.setTimeout = () => 0)")  # the page reads no more, once a running timer has ended
        time.sleep(6)
        still.append(shares())
        browser.close()
finally:
    subprocess.run(["pkill", "-x", "cuda-program"], check=False)


def mean(rounds, kind):
    return statistics.mean(each.get(kind, 0) for each in rounds)


def more(kind):
    return [one[kind] - other[kind] for one, other in zip(watched, still)]


page, scheduler = statistics.mean(more("page")), statistics.mean(more("scheduler"))
print(json.dumps({
    "page": round(page, 2), "scheduler": round(scheduler, 2), "sum": round(page + scheduler, 2),
    "each": {kind: [round(each, 2) for each in more(kind)] for kind in ("page", "scheduler")},
    "reading": {kind: round(mean(watched, kind), 2) for kind in watched[0]},
    "still": {kind: round(mean(still, kind), 2) for kind in still[0]},
}))
