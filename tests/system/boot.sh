#!/bin/sh
# Boots the system in a directory as a container, runs a command in the container as root, and shuts
# it down. Returns the command's exit status. Needs root, systemd-nspawn and nsenter.
#
#   mmdebstrap --variant=apt --include=systemd,systemd-sysv,dbus bookworm DIR
#   tests/system/boot.sh DIR COMMAND…
set -eu

[ $# -ge 2 ] || { echo "usage: $0 DIR COMMAND…" >&2; exit 2; }
root=$1
shift

console=$(mktemp)
# CRIU saves no process with a filter of system calls, which the container manager gives all processes,
# and needs the capability to choose process IDs.
export SYSTEMD_SECCOMP=0
# Timers are masked. Otherwise, if midnight passed during the test, Debian's daily jobs would change
# files while inside.sh compares them.
setsid systemd-nspawn --quiet --capability=CAP_CHECKPOINT_RESTORE --directory="$root" --keep-unit --register=no --private-network --boot \
    systemd.mask=timers.target </dev/null >"$console" 2>&1 &
container=$!

init=
finish() {
    code=$?
    trap - EXIT INT TERM
    # SIGRTMIN+3 asks systemd to halt.
    [ -z "$init" ] || kill -s RTMIN+3 "$init" 2>/dev/null || true
    for _ in $(seq 100); do
        kill -0 "$container" 2>/dev/null || break
        sleep 0.1
    done
    kill -9 "$container" 2>/dev/null || true
    rm -f "$console"
    exit $code
}
trap finish EXIT INT TERM

inside() {
    nsenter --all --target "$init" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb \
        ${HIBERNATIONS:+"HIBERNATIONS=$HIBERNATIONS"} "$@"
}

for _ in $(seq 600); do
    # The process is looked up each time, because the first child of systemd-nspawn only prepares
    # the container.
    init=$(pgrep -P "$container" | head -n 1)
    case $([ -z "$init" ] || inside systemctl is-system-running 2>/dev/null) in
        running | degraded) booted=1 && break ;;
    esac
    kill -0 "$container" 2>/dev/null || break
    sleep 0.1
done
[ -n "${booted:-}" ] || { cat "$console" >&2; echo "$root does not boot" >&2; exit 1; }

inside "$@"
