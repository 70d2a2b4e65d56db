#!/bin/bash
# Saves a container with `podman container checkpoint --export`, and restores it on the same host, and
# on another one with another scheduler and another GPU. Each time, the program's results are right.
#
#   checkpoint.sh BUILT PROGRAMS BASES   BASES has the images, and a Debian 13 as trixie-podman.tar
#
# Both hosts are mount namespaces with a Debian 13, because Debian 12's crun is built without CRIU.
# They share the kernel, the processes and the network.
set -eu

[ $# -eq 3 ] || { echo "usage: $0 BUILT PROGRAMS BASES" >&2; exit 2; }
built=$1 programs=$2 bases=$3
here=$(realpath "$(dirname "$0")")
repository=$(realpath "$here/../..")
hosts=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-checkpoint-XXXXXX")
export built programs bases here repository hosts

# Runs an action of checkpoint-host.sh on a host.
on() { # host, action, argument…
    holder=$(cat "$hosts/$1.pid")
    nsenter --target "$holder" --mount --root --wd -- env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        HOME=/root "$here/checkpoint-host.sh" "$built" "$programs" "$bases" "${@:2}"
}

# Creates a host, whose own files are in $hosts/NAME and seen there as /srv.
create_host() { # name
    mkdir -p "$hosts/$1" "$hosts/$1.root"
    tar -C "$hosts/$1.root" -xf "$bases/trixie-podman.tar"
    # shellcheck disable=SC2016
    name=$1 setsid unshare --mount bash -euc '
        root=$hosts/$name.root
        mount --make-rprivate /
        mount --bind "$root" "$root"
        mount --rbind /proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t sysfs none "$root/sys"
        mount -t cgroup2 none "$root/sys/fs/cgroup"
        mount -t tmpfs none "$root/run"
        mount --bind "$hosts/$name" "$root/srv"
        for shared in "$repository" "$built" "$programs" "$bases"; do
            mkdir -p "$root$shared"
            mount --bind "$shared" "$root$shared"
        done
        mkdir "$root/old"
        cd "$root"
        pivot_root . old
        cd /
        umount -l /old
        touch /run/is-ready
        exec sleep infinity' </dev/null &
    echo $! >"$hosts/$1.pid"
    for _ in $(seq 100); do
        ! nsenter --target "$(cat "$hosts/$1.pid")" --mount --root test -e /run/is-ready 2>/dev/null || return 0
        sleep 0.1
    done
    echo "FAILED: there is no host $1" >&2
    return 1
}

finish() {
    code=$?
    trap - EXIT
    for host in a b; do
        [ ! -e "$hosts/$host.pid" ] || { on $host clean_up && kill "$(cat "$hosts/$host.pid")"; } >/dev/null 2>&1 || true
    done
    wait
    rm -rf --one-file-system "$hosts"
    exit $code
}
trap finish EXIT

# A shared file system for the files of programs is simulated: the files of the simulated GPU that
# the program has open are copied. The other GPU's own files stay.
copy_files() {
    cp -a "$hosts/a/gpu/processes" "$hosts/a/gpu/pids" "$hosts/b/gpu/"
    for file in "$hosts"/a/gpu/*; do
        copy=$hosts/b/gpu/${file##*/}
        [ ! -f "$file" ] || [ -e "$copy" ] || { truncate -s "$(stat -c %s "$file")" "$copy" && chmod 666 "$copy"; }
    done
    mv "$hosts/a/checkpoint.tar" "$hosts/b/checkpoint.tar"
}

began=$SECONDS
for host in a b; do
    create_host $host
    on $host set_up
done
[ "$(on a uuid)" != "$(on b uuid)" ] || { echo "FAILED: both hosts have the same GPU" >&2; exit 1; }
echo "--- a container is saved, and restored on the same host"
id=$(on a begin)
on a save "$id"
on a restore "$id"
echo "--- a container is saved, and restored on another host"
on a save "$id"
copy_files
on b restore "$id"
on b ends_well "$id"
echo "--- containers are saved and restored ($((SECONDS - began)) s)"
