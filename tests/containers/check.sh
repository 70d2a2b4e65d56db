#!/bin/bash
# Containers share a simulated GPU by CDI, under a real podman. The containers contain Debian 12,
# Debian 11, another C library, or no C library. See README.md.
#
#   check.sh BUILT   BUILT: target/debug
set -eu

[ $# -eq 1 ] || { echo "usage: $0 BUILT" >&2; exit 2; }
built=$(realpath "$1") here=$(realpath "$(dirname "$0")")
bases=${built%/*}/containers
mkdir -p "$bases"

for suite in bookworm bullseye; do
    [ -e "$bases/$suite.tar" ] && continue
    echo "--- $suite: making a base system"
    # old-glibc.sh links with these packages of the oldest suite.
    include=$([ $suite = bookworm ] || echo --include=libc6-dev,libgcc-s1)
    # shellcheck disable=SC2086
    mmdebstrap --quiet --format=tar --variant=essential $include $suite "$bases/$suite.tar.new"
    mv "$bases/$suite.tar.new" "$bases/$suite.tar"
done
if [ ! -e "$bases/bullseye" ]; then
    mkdir -p "$bases/bullseye.new"
    tar -C "$bases/bullseye.new" -xf "$bases/bullseye.tar" ./lib ./usr/lib
    mv "$bases/bullseye.new" "$bases/bullseye"
fi
echo "--- programs and a simulated GPU for an old glibc"
programs=$("$here/old-glibc.sh" "$bases/bullseye" "$bases/target")

# The mounts are private to this check. The mounts include the control groups of version 2, which
# podman needs.
exec unshare --mount "$here/inside.sh" "$built" "$programs" "$bases"
