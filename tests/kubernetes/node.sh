#!/bin/bash
# The nodes: all parts of a computer that Kubernetes sees. These parts are in namespaces that end
# with this script. The first node runs the steps. The second one is prepared in /second, and starts
# if a step needs it.
#
#   node.sh CACHE PROGRAMS SCRATCH STEP...
set -eu

cache=$1 programs=$2 scratch=$3
shift 3
here=$(realpath "$(dirname "$0")")
node=$scratch/node

# Uses version 1 of control groups, because Debian 12's kubelet supports no other version. The
# hierarchy `systemd` has no controller. The scheduler reads pods' names from this hierarchy.
mount_control_groups() { # directory
    mount -t tmpfs -o mode=755 tmpfs "$1"
    for controller in cpu,cpuacct cpuset memory devices freezer blkio pids name=systemd; do
        directory=$1/${controller#name=}
        mkdir -p "$directory"
        if ! mount -t cgroup -o "$controller" cgroup "$directory" 2>/dev/null; then
            rmdir "$directory"
            for one in ${controller//,/ }; do
                mkdir -p "$1/$one"
                mount -t cgroup -o "$one" cgroup "$1/$one"
            done
        fi
    done
}

mount_file_systems() { # directory, name
    mkdir -p "$1" "$scratch/$2.upper" "$scratch/$2.work" "$scratch/logs"
    mount -t overlay overlay -o "lowerdir=$cache/node,upperdir=$scratch/$2.upper,workdir=$scratch/$2.work" "$1"
    mount -t sysfs sysfs "$1/sys"
    mount_control_groups "$1/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 tmpfs "$1/dev"
    mkdir "$1/dev/pts" "$1/dev/shm" "$1/dev/mqueue"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$1/dev/pts"
    mount -t tmpfs tmpfs "$1/dev/shm"
    mount -t mqueue mqueue "$1/dev/mqueue"
    for device in null zero full random urandom kmsg; do
        touch "$1/dev/$device"
        mount --bind "/dev/$device" "$1/dev/$device" 2>/dev/null || ln -sf null "$1/dev/$device"
    done
    ln -s pts/ptmx "$1/dev/ptmx"
    ln -s /proc/self/fd "$1/dev/fd"
    mount -t tmpfs -o mode=755 tmpfs "$1/run"
    mount -t tmpfs tmpfs "$1/tmp"
    # These directories are not on the overlay, because containerd's own overlays would not work there.
    for directory in var/lib/containerd var/lib/kubelet var/lib/etcd; do
        mkdir -p "$scratch/$2.state/$directory" "$1/$directory"
        mount --bind "$scratch/$2.state/$directory" "$1/$directory"
    done
    for pair in "$scratch/images:images" "$here:steps" "$scratch/logs:logs" "$programs:opt/given" "$cache/tools:opt/tools" \
        "$scratch/images/gpu:opt/gpu"; do
        mkdir -p "$1/${pair#*:}"
        mount --bind "${pair%:*}" "$1/${pair#*:}"
    done
    mkdir -p "$1/opt/kubernetes" "$1/run/gpu" "$1/old"
    # Not every Debian has this program.
    cp "$(command -v pivot_root)" "$1/opt/pivot_root"
    chmod 1777 "$1/run/gpu"
    # Programs that are not given are Debian's.
    for name in kubelet kube-apiserver kube-controller-manager kube-scheduler kubectl etcd containerd \
        containerd-shim-runc-v2 ctr runc bridge host-local loopback portmap; do
        found=$(cd "$1" && find opt/given -name "$name" -type f -executable -print -quit)
        [ -z "$found" ] || ln -s "/$found" "$1/opt/kubernetes/$name"
    done
}

mount --make-rprivate /
mount_file_systems "$node" node
mount -t proc proc "$node/proc"
mkdir -p "$node/second"
mount_file_systems "$node/second" second

# ---- network
ip link set lo up
# The API server's address for pods, because nothing on this node forwards to services. The second
# node has the second address.
ip address add 10.96.0.1/32 dev lo
ip address add 10.96.0.2/32 dev lo
hostname node

# Uses pivot_root instead of chroot. With chroot, a process that enters a container's namespace
# would be at the container's old root.
cd "$node"
pivot_root . old
umount --lazy /old
mount --make-rshared /
exec /bin/bash /steps/inside.sh "$@"
