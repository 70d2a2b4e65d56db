#!/bin/bash
# Runs in the second node's namespaces. Enters its root, and starts its containerd and kubelet.
set -eu

mount -t proc proc /second/proc
cd /second
/opt/pivot_root . old
umount --lazy /old
mount --make-rshared /
hostname second
export PATH=/opt/kubernetes:$PATH
containerd >>/logs/containerd-second 2>&1 &
until ctr version >/dev/null 2>&1; do sleep 0.2; done
for image in /images/*.tar; do ctr -n k8s.io images import "$image" >/dev/null; done
exec kubelet --config=/etc/kubernetes/kubelet.yaml --kubeconfig=/etc/kubernetes/kubelet.conf --hostname-override=second \
    --node-ip=10.96.0.2 --node-labels=nvidia.com/gpu.present=true
