#!/bin/bash
# Tests nvshare on a real Kubernetes node: see README.md.
#
#   check.sh BUILT   BUILT: target/debug
#
# STEPS='[12]*' in the environment selects steps.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 BUILT" >&2; exit 2; }
built=$(realpath "$1") here=$(realpath "$(dirname "$0")")
project=$(realpath "$here/../..")
cache=${built%/*}/kubernetes
mkdir -p "$cache"

[ -d "$cache/kubernetes" ] || "$here/kubernetes.sh" "$cache/kubernetes"
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
cp -r "$project/kubernetes/base" "$project/kubernetes/examples" "$here/overlay" "$scratch/images/"
# The kustomize of this kubectl doesn't support components.
cp "$project/kubernetes/sleep/daemonset.yaml" "$scratch/images/overlay/sleep.yaml"
# Copies the chart, with its links replaced by files. The version check is removed, because this
# Kubernetes is old.
cp -rL "$project/kubernetes/helm/nvshare" "$scratch/images/chart"
sed -i '/^kubeVersion:/d' "$scratch/images/chart/Chart.yaml"

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
        "$here/node.sh" "$cache" "$scratch" "$scratch/images" "${steps[@]}"
) || code=$?
for group in "${groups[@]}"; do
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
done
exit $code
