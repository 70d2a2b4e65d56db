# shellcheck shell=bash
# Functions that the steps share. inside.sh sources this file.

sockets=$scratch/nvshare
control=$scratch/nvshare-control/control.sock
# The simulated machine. All processes of the machine have these variables, including the scheduler
# and the containers.
gpu=(CUDA_SIM_DIR="$scratch/gpu" NVSHARE_DEVICES="$scratch/gpu" CUDA_SIM_MEMORY=256M CUDA_SIM_CONTEXT=4M)
mkdir -p "$sockets" "$scratch/gpu" "$scratch/driver"
# Turns are short.
echo 'time-quantum = "1s"' >"$scratch/nvshare.toml"

pod() {
    podman --root "$scratch/store" --runroot "$scratch/run" --tmpdir "$scratch/tmp" --cgroup-manager=cgroupfs \
        --events-backend=file --storage-driver=vfs "$@"
}

fail() {
    echo "FAILED: $*" >&2
    tail -n 30 "$scratch/scheduler.log" >&2 || true
    exit 1
}

finish() {
    code=$?
    trap - EXIT
    pod rm --all --force --time 0 >/dev/null 2>&1 || true
    [ -z "${scheduler:-}" ] || kill -9 "$scheduler" 2>/dev/null || true
    wait
    find /sys/fs/cgroup/nvshare-test -depth -type d -exec rmdir {} + 2>/dev/null || true
    rm -rf --one-file-system "$scratch"
    exit $code
}

. "$here/../until-true.sh"

# ---- images

import() { # name, tar
    pod import --quiet "$2" "$1" >/dev/null
}

import_directory() { # name, directory
    tar -C "$2" -cf "$scratch/$1.tar" .
    import "$1" "$scratch/$1.tar"
}

hello='#include <stdio.h>
int main(void) { puts("hello"); return 0; }'

import_static() {
    mkdir -p "$scratch/static/etc"
    printf '%s\n' "$hello" | cc -static -x c - -o "$scratch/static/hello"
    import_directory static "$scratch/static"
}

# Imports a program with another C library, and the loader of that library.
import_musl() {
    mkdir -p "$scratch/musl/lib" "$scratch/musl/etc"
    printf '%s\n' "$hello" | musl-gcc -x c - -o "$scratch/musl/hello"
    loader=$(echo /lib/ld-musl-*.so.1)
    cp -L "$loader" "$scratch/musl/lib/${loader##*/}"
    import_directory musl "$scratch/musl"
}

# ---- the scheduler

start_scheduler() {
    env "${gpu[@]}" LD_LIBRARY_PATH="$scratch/driver" "$built/nvshare-scheduler" --no-bus --socket "$sockets/scheduler.sock" \
        --control-socket "$control" --config "$scratch/nvshare.toml" >>"$scratch/scheduler.log" 2>&1 &
    scheduler=$!
    until_true "the scheduler" ctl get
}

stop_scheduler() { # signal
    kill -s "$1" "$scheduler"
    wait "$scheduler" 2>/dev/null || true
}

ctl() { "$built/nvsharectl" --control "$control" "$@"; }

# Prints the value of a Python expression. In the expression, `s` is the status.
status() { ctl --json status | python3 -c "import json,sys; s = json.load(sys.stdin); print($1)"; }

# ---- the CDI file

# Writes NVIDIA's CDI file for this GPU, with its driver and device nodes. The file also has the
# mounts and variables of a simulated GPU.
write_nvidia_file() {
    libraries=/usr/lib/$(uname -m)-linux-gnu
    cat >/etc/cdi/nvidia.yaml <<EOF
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/zero
      hostPath: /dev/zero
containerEdits:
  env:
$(printf -- '  - %s\n' "${gpu[@]}")
  mounts:
$(for library in libcuda.so.1 libnvidia-ml.so.1; do
    printf -- '  - {hostPath: %s, containerPath: %s, options: [ro, nosuid, nodev, bind]}\n' \
        "$scratch/driver/$library" "$libraries/$library"
done)
  - {hostPath: $scratch/gpu, containerPath: $scratch/gpu, options: [rw, bind]}
EOF
}

write_cdi_file() {
    write_nvidia_file
    ctl cdi generate --library "$built/libnvshare.so" --preload-list "$here/../../etc/ld.so.preload" --sockets "$sockets"
}

# ---- containers

# Creates a container that sees the GPU, and prints its ID. The containers need no network. Their
# limits are low, because root may not raise limits on every machine. podman creates no control
# groups: `enter` creates a group with the name that podman would use.
create() { # option… image command…
    pod create --network=none --cgroups=disabled --ulimit nofile=1000:1000 --ulimit nproc=1000:1000 \
        --device nvshare.com/gpu=0 --volume "$programs/cuda-program:/usr/local/bin/cuda-program:ro" "$@"
}

# Runs a created container in its control group, and returns the container's exit status.
enter() { # id
    group=/sys/fs/cgroup/nvshare-test/libpod-$1
    mkdir -p "$group"
    (
        echo $BASHPID >"$group/cgroup.procs"
        pod start --attach "$1"
    )
}

# Creates and runs a container.
run() { # option… image command…
    id=$(create "$@")
    enter "$id"
}

is_right() { grep -q '"ok":true' "$1"; }
