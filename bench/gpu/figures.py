#!/usr/bin/env python3
"""Computes figures, and writes them to a file with the format of bench/results.json, which
bench/support/src/results.rs defines.

  figures.py FROM INTO                          copies the figures of one file into another
  figures.py --add FILE NAME VALUE UNIT NOTE   writes a figure of the checked-out commit
"""

import datetime
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def percentile(values, part):
    """Returns the smallest value that at least a fraction `part` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def summary(values):
    if not values:
        return None
    names = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}
    return {"n": len(values)} | {name: round(value, 4) for name, value in names.items()}


def add(file, figures, commit=None):
    """Writes figures, tuples (name, value, unit, note), to the file. A figure replaces an existing
    figure of the same name."""
    common = {"hardware": hardware(), "commit": commit or checked_out(), "date": today()}
    fields = ("name", "value", "unit", "note")
    rows = [common | dict(zip(fields, figure)) for figure in figures]
    put(file, [row | {"value": round(float(row["value"]), 4)} for row in rows])


def put(file, rows):
    names = {row["name"] for row in rows}
    before = json.loads(file.read_text()) if file.exists() else []
    rows = sorted(rows + [row for row in before if row["name"] not in names], key=lambda row: row["name"])
    lines = [json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n")


def today():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def checked_out():
    """Returns the checked-out commit, or "unknown" without git. Appends "-dirty" if tracked files
    other than the results differ from the commit."""

    def git(*words):
        return subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True)

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":!bench/results.json", ":!bench/*.md").returncode
    except OSError:
        return "unknown"
    return commit.stdout.strip() + ("-dirty" if changed else "") if commit.returncode == 0 else "unknown"


def hardware():
    fields = ["name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max"]
    try:
        words = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        gpus = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        name, driver, generation, width = [field.strip() for field in gpus[0].split(",")]
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        models = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        return f"{os.cpu_count()} × {(models or ['CPU'])[0]}"
    return f"{len(gpus)} × {name} (PCIe {generation} ×{width}, driver {driver}), {os.cpu_count()} CPU cores"


def measured_files(programs):
    """Returns the first digits of the SHA-256 of each measured binary; None if it is missing."""
    said = {}
    for name in ("nvshare-scheduler", "libnvshare.so"):
        path = programs / name
        said[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else None
    return said


if __name__ == "__main__":
    if sys.argv[1:2] == ["--add"] and len(sys.argv) == 7:
        file, name, value, unit, note = sys.argv[2:]
        add(Path(file), [(name, float(value), unit, note)])
    elif len(sys.argv) == 3:
        put(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
    else:
        sys.exit(__doc__)
