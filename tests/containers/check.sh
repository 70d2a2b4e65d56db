#!/bin/bash
# Containers share a simulated GPU by CDI, under a real podman. The containers contain Debian 12,
# Debian 11, another C library, or no C library. Then a container is saved and restored. See README.md.
#
#   check.sh BUILT   BUILT: target/debug
set -eu

[ $# -eq 1 ] || { echo "usage: $0 BUILT" >&2; exit 2; }
built=$(realpath "$1") here=$(realpath "$(dirname "$0")")
bases=${built%/*}/containers
mkdir -p "$bases"

base() { # name, packages
    [ ! -e "$bases/$1.tar" ] || return 0
    echo "--- $1: making a base system"
    mmdebstrap --quiet --format=tar --variant=essential ${2:+--include="$2"} "${1%%-*}" "$bases/$1.tar.new"
    mv "$bases/$1.tar.new" "$bases/$1.tar"
}
base bookworm ''
# old-glibc.sh links with these packages of the oldest suite.
base bullseye libc6-dev,libgcc-s1
base trixie-podman podman,crun,criu,libcriu2,iproute2,iptables,mount,python3
if [ ! -e "$bases/bullseye" ]; then
    mkdir -p "$bases/bullseye.new"
    tar -C "$bases/bullseye.new" -xf "$bases/bullseye.tar" ./lib ./usr/lib
    mv "$bases/bullseye.new" "$bases/bullseye"
fi
echo "--- programs and a simulated GPU for an old glibc"
programs=$("$here/old-glibc.sh" "$bases/bullseye" "$bases/target")

# The mounts are private to this check. The mounts include the control groups of version 2, which
# podman needs.
unshare --mount "$here/inside.sh" "$built" "$programs" "$bases"
"$here/checkpoint.sh" "$built" "$programs" "$bases"
