#!/bin/bash
# The node: all parts of a computer that Kubernetes sees. These parts are in namespaces that end
# with this script.
#
#   node.sh CACHE SCRATCH IMAGES STEP...
set -eu

cache=$1 scratch=$2 images=$3
shift 3
here=$(realpath "$(dirname "$0")")
node=$scratch/node

# ---- file systems
mount --make-rprivate /
mkdir -p "$node" "$scratch/upper" "$scratch/work" "$scratch/logs"
mount -t overlay overlay -o "lowerdir=$cache/node,upperdir=$scratch/upper,workdir=$scratch/work" "$node"
mount -t proc proc "$node/proc"
mount -t sysfs sysfs "$node/sys"
mount -t tmpfs -o mode=755 tmpfs "$node/sys/fs/cgroup"
# Uses version 1 of control groups, because Debian 12's kubelet supports no other version. The
# hierarchy `systemd` has no controller. The scheduler reads pods' names from this hierarchy.
for controller in cpu,cpuacct cpuset memory devices freezer blkio pids name=systemd; do
    directory=$node/sys/fs/cgroup/${controller#name=}
    mkdir -p "$directory"
    if ! mount -t cgroup -o "$controller" cgroup "$directory" 2>/dev/null; then
        rmdir "$directory"
        for one in ${controller//,/ }; do
            mkdir -p "$node/sys/fs/cgroup/$one"
            mount -t cgroup -o "$one" cgroup "$node/sys/fs/cgroup/$one"
        done
    fi
done
mount -t tmpfs -o mode=755 tmpfs "$node/dev"
mkdir "$node/dev/pts" "$node/dev/shm" "$node/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$node/dev/pts"
mount -t tmpfs tmpfs "$node/dev/shm"
mount -t mqueue mqueue "$node/dev/mqueue"
for device in null zero full random urandom kmsg; do
    touch "$node/dev/$device"
    mount --bind "/dev/$device" "$node/dev/$device" 2>/dev/null || ln -sf null "$node/dev/$device"
done
ln -s pts/ptmx "$node/dev/ptmx"
ln -s /proc/self/fd "$node/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$node/run"
mount -t tmpfs tmpfs "$node/tmp"
# These directories are not on the overlay, because containerd's own overlays would not work there.
for directory in var/lib/containerd var/lib/kubelet var/lib/etcd; do
    mkdir -p "$scratch/state/$directory" "$node/$directory"
    mount --bind "$scratch/state/$directory" "$node/$directory"
done
mkdir -p "$node/images" "$node/steps" "$node/logs" "$node/opt/kubernetes" "$node/opt/tools" "$node/opt/gpu" "$node/run/gpu"
chmod 1777 "$node/run/gpu"
mount --bind "$images/gpu" "$node/opt/gpu"
mount --bind "$images" "$node/images"
mount --bind "$here" "$node/steps"
mount --bind "$scratch/logs" "$node/logs"
mount --bind "$cache/kubernetes" "$node/opt/kubernetes"
mount --bind "$cache/tools" "$node/opt/tools"

# ---- network
ip link set lo up
# The API server's address for pods, because nothing on this node forwards to services.
ip address add 10.96.0.1/32 dev lo
hostname node

# Uses pivot_root instead of chroot. With chroot, a process that enters a container's namespace
# would be at the container's old root.
mkdir -p "$node/old"
cd "$node"
pivot_root . old
umount --lazy /old
mount --make-rshared /
exec /bin/bash /steps/inside.sh "$@"
