# shellcheck shell=bash
# The node is rebooted: all processes end, and the contents of /run are lost.

stop kubelet
stop containerd
pkill -9 -f containerd-shim || true
# All processes outside the control plane are in containers.
for group in /sys/fs/cgroup/pids/kubepods/*/ /sys/fs/cgroup/pids/kubepods/*/*/ /sys/fs/cgroup/pids/kubepods/*/*/*/; do
    [ ! -e "$group/cgroup.procs" ] || xargs -r kill -9 <"$group/cgroup.procs" 2>/dev/null || true
done
sleep 1
grep -o ' /run/[^ ]*' /proc/mounts | sort -r | xargs -r -n 1 umount -l
rm -rf /run/nvshare /run/containerd /run/cdi /run/gpu/*
mkdir -p /run/gpu && chmod 1777 /run/gpu
rm -rf /var/lib/kubelet/device-plugins/*.sock
start_containerd
start_kubelet
until_true "the node" node_is_ready
until_true "nvshare" kubectl -n nvshare wait --for=condition=Ready pods --all --timeout=1s
until_true "slots" slots_are 4
# Until the plugin has registered again, the kubelet still offers its former slots, but cannot
# allocate them. A pod that starts too early fails, and the pod's owner, such as a Job, creates
# another pod.
work="mix --mem 96M --reps 2 --rounds 4"
pod rebooted "$work"
has_run() {
    ! is rebooted Failed || { kubectl delete pod rebooted && pod rebooted "$work"; }
    is rebooted Succeeded
}
until_true "a pod to run" has_run
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
