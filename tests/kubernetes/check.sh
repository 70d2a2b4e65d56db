#!/bin/bash
# Tests nvshare on a real Kubernetes node: see README.md.
#
#   check.sh BUILT [PROGRAMS]   BUILT: target/debug
#
# PROGRAMS: a directory with kubelet, kube-apiserver, kube-controller-manager and kube-scheduler, and
# optionally with kubectl, etcd, containerd, runc and CNI plugins, at any depth.
#
# STEPS='[12]*' in the environment selects steps.
set -eu

[ $# -eq 1 ] || [ $# -eq 2 ] || { echo "usage: $0 BUILT [PROGRAMS]" >&2; exit 2; }
built=$(realpath "$1") here=$(realpath "$(dirname "$0")")
project=$(realpath "$here/../..")
cache=${built%/*}/kubernetes
mkdir -p "$cache"

if [ $# -eq 2 ]; then
    programs=$(realpath "$2")
    for program in kubelet kube-apiserver kube-controller-manager kube-scheduler; do
        [ -n "$(find "$programs" -name "$program" -type f -executable)" ] ||
            { echo "$programs contains no program $program" >&2; exit 2; }
    done
else
    programs=$cache/kubernetes
    [ -d "$programs" ] || "$here/kubernetes.sh" "$programs"
fi
[ -d "$cache/tools" ] || "$here/helm.sh" "$cache/tools" || echo "there is no helm, and nothing is tried with it" >&2
mkdir -p "$cache/tools"
if [ ! -d "$cache/node" ]; then
    echo "--- a Debian for the node"
    mkdir -p "$cache/node.new"
    mmdebstrap --quiet --format=tar --variant=minbase \
        --include=containerd,runc,etcd-server,containernetworking-plugins,iproute2,iptables,jq,openssl,procps trixie - |
        tar -C "$cache/node.new" --exclude='./dev/*' -xf -
    mv "$cache/node.new" "$cache/node"
fi

scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/nvshare-kubernetes.XXXXXX")
trap 'rm -rf --one-file-system "$scratch"' EXIT
"$here/images.sh" "$built" "$scratch/images"
for directory in base dra sleep read-only-etc examples; do cp -r "$project/kubernetes/$directory" "$scratch/images/"; done
# Copies the chart, with its links replaced by files.
cp -rL "$project/kubernetes/helm/nvshare" "$scratch/images/chart"
if [ $# -eq 2 ]; then
    cp -r "$here/slots" "$here/claims" "$scratch/images/"
else
    cp -r "$here/overlay" "$scratch/images/slots"
    # The kustomize of this kubectl doesn't support components.
    cp "$project/kubernetes/sleep/daemonset.yaml" "$scratch/images/slots/sleep.yaml"
    # This Kubernetes is older than the chart allows.
    sed -i '/^kubeVersion:/d' "$scratch/images/chart/Chart.yaml"
fi

# The node's processes run in separate control groups. All of these processes end together with the
# node's PID namespace, so the groups can then be removed.
groups=()
for hierarchy in /sys/fs/cgroup/*/; do
    [ -e "$hierarchy/cgroup.procs" ] || continue
    mkdir -p "$hierarchy/nvshare-kubernetes"
    groups+=("$hierarchy/nvshare-kubernetes")
done
steps=()
for step in "$here"/steps/${STEPS:-*}.sh; do steps+=("/steps/steps/${step##*/}"); done
code=0
(
    for group in "${groups[@]}"; do
        # A new cpuset group has no processors.
        for file in cpuset.cpus cpuset.mems; do
            [ ! -e "$group/$file" ] || cat "$group/../$file" >"$group/$file"
        done
        echo $BASHPID >"$group/cgroup.procs"
    done
    exec unshare --mount --pid --fork --kill-child --net --uts --ipc --cgroup \
        "$here/node.sh" "$cache" "$programs" "$scratch" "${steps[@]}"
) || code=$?
for group in "${groups[@]}"; do
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
done
exit $code
