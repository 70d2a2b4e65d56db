#!/usr/bin/python3
"""Writes the part of debian/copyright that is about the crates linked into the programs and the library, from what cargo knows of
them and from the licence files in their sources.

    debian/crates.py            rewrites debian/copyright
    debian/crates.py --check    fails if that would change it
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "debian/copyright"
BEGIN = "# From here on written by debian/crates.py.\n"
# The contents of the packages: both programs and the library. proc-macro crates run during the build and are not linked.
MANIFESTS = [["-p", "nvshare"], ["--manifest-path", str(ROOT / "preload/Cargo.toml")]]
TARGETS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]
# The licences of Cargo.toml in the notation of debian/copyright. If one choice includes another, the larger one is left out.
LICENSES = {
    "MIT OR Apache-2.0": "MIT or Apache-2.0",
    "Apache-2.0 OR MIT": "MIT or Apache-2.0",
    "MIT/Apache-2.0": "MIT or Apache-2.0",
    "Apache-2.0/MIT": "MIT or Apache-2.0",
    "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT": "MIT or Apache-2.0",
    "(MIT OR Apache-2.0) AND Unicode-3.0": "(MIT or Apache-2.0) and Unicode-3.0",
    "(Apache-2.0 OR MIT) AND BSD-3-Clause": "(MIT or Apache-2.0) and BSD-3-Clause",
    "Apache-2.0 OR BSD-3-Clause": "Apache-2.0 or BSD-3-Clause",
    "Unlicense OR MIT": "Unlicense or MIT",
    "MIT": "MIT",
    "Apache-2.0": "Apache-2.0",
    "ISC": "ISC",
    "BSD-3-Clause": "BSD-3-Clause",
    "Zlib": "Zlib",
    "Apache-2.0 OR BSL-1.0": "Apache-2.0 or BSL-1.0",
    "Apache-2.0 OR GPL-2.0-only": "Apache-2.0 or GPL-2",
    "BSL-1.0": "BSL-1.0",
}
# Third-party sources in a crate: their folder, their authors and their licence. The last paragraph about a file counts.
INCLUDED = {"libsqlite3-sys": ("sqlite3", "the authors of SQLite, who disclaim it", "public-domain")}
# The files of a crate that may name copyright holders.
NAMES = re.compile(r"^(licen[cs]e|copying|copyright|notice|unlicense)", re.I)
HOLDER = re.compile(r"^\W*copyright\s+(?:(?:\(c\)|©)\s*)?(?=.*[A-Za-z]{3})(.*\d{4}.*|.+)$", re.I)
# Lines of the licences' own texts and of their templates.
NOBODY = re.compile(
    r"\[yyyy\]|<|free software foundation|notice|license|owner|holder|statement|law|interest|permission|infring|this software|\bor\b|disclaim", re.I
)


def tree(manifest, target, form):
    command = ["cargo", "tree", "--locked", "--offline", "--prefix", "none", "--edges", "normal,no-proc-macro"]
    command += [*manifest, "--target", target, "--format", form]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env={**os.environ, "CARGO_TERM_COLOR": "never"})
    return [line.removesuffix(" (*)") for line in output.stdout.splitlines()]


def sources():
    """Where the crates' sources are, by name and version."""
    found = {}
    for manifest, target in itertools.product([[], MANIFESTS[1]], TARGETS):
        command = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", target, *manifest]
        output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        for package in json.loads(output.stdout)["packages"]:
            found[package["name"], package["version"]] = (Path(package["manifest_path"]).parent, package["authors"])
    return found


def holders(directory, authors):
    """Who has the copyright, as the licence files say, or else as Cargo.toml does."""
    found = []
    for path in sorted(directory.iterdir()):
        if not path.is_file() or not NAMES.match(path.name):
            continue
        for line in path.read_text(errors="replace").splitlines():
            match = HOLDER.match(line.strip())
            if match and not NOBODY.search(match[1]):
                holder = re.sub(r"\s*all rights reserved\.?\s*$", "", match[1], flags=re.I).strip(" .,")
                if holder and holder not in found:
                    found.append(holder)
    return found or authors or [f"the authors of {re.sub(r'-[0-9].*', '', directory.name)}"]


def paragraphs():
    crates = {}
    for manifest in MANIFESTS:
        for target in TARGETS:
            for line in tree(manifest, target, "{p}\t{l}"):
                package, license = line.split("\t")
                name, version, *where = package.split(" ")
                if not where:
                    crates[name, version.removeprefix("v")] = license
    known = sources()
    # For a crate that is linked in several versions, only the newest counts: it names the most people.
    newest = {name: (version, license) for (name, version), license in sorted(crates.items())}
    for name, (version, license) in newest.items():
        if license not in LICENSES:
            sys.exit(f"{name} {version}: what debian/copyright is to say of the licence {license!r} is not known: add it to LICENSES")
        directory, authors = known[name, version]
        yield (
            f"Files: vendor/{name}/*\nCopyright:\n"
            + "".join(f" {holder}\n" for holder in holders(directory, authors))
            + f"License: {LICENSES[license]}\n"
        )
        if name in INCLUDED:
            where, holder, license = INCLUDED[name]
            yield f"Files: vendor/{name}/{where}/*\nCopyright:\n {holder}\nLicense: {license}\n"


def main():
    before = FILE.read_text()
    own = before.split(BEGIN)[0]
    text = own + BEGIN + "\n" + "\n".join(paragraphs())
    if sys.argv[1:] == ["--check"]:
        if text != before:
            sys.exit("debian/copyright does not match the crates in Cargo.lock: run debian/crates.py")
    else:
        FILE.write_text(text)


main()
