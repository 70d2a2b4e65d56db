#!/bin/bash
# The CDI file for containers that share GPUs. nvshare writes the file, and rewrites it when
# NVIDIA's file changes. NVIDIA's file changes with each driver version.
. "$(dirname "$0")/../lib.sh"

nvidias() { # driver
    printf 'cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits:\n  env:\n  - DRIVER=%s\ndevices:\n- name: "0"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/null\n' "$1"
}
nvidias 1 >/tmp/nvidia.yaml
nvsharectl cdi generate --nvidia /tmp/nvidia.yaml >/dev/null 2>&1 || fail "the CDI file: $(nvsharectl cdi generate --nvidia /tmp/nvidia.yaml 2>&1)"
grep -q '"hostPath": "/usr/share/nvshare/ld.so.preload"' /etc/cdi/nvshare.json || fail "what containers get: $(cat /etc/cdi/nvshare.json)"
grep -q '"path": "/usr/bin/nvsharectl"' /etc/cdi/nvshare.json || fail "what runtimes call: $(cat /etc/cdi/nvshare.json)"
says "/usr/lib/nvshare/libnvshare.so" cat /usr/share/nvshare/ld.so.preload
rm /etc/cdi/nvshare.json

nvidias 2 >/etc/cdi/nvidia.yaml
systemctl enable --quiet --now nvshare-cdi.service || fail "nvshare-cdi.service: $(journalctl --no-pager -u nvshare-cdi.service)"
grep -q DRIVER=2 /etc/cdi/nvshare.json || fail "what containers get: $(cat /etc/cdi/nvshare.json)"
[ "$(systemctl is-enabled nvshare-cdi.path)" = enabled ] || fail "nvshare-cdi.path is $(systemctl is-enabled nvshare-cdi.path)"
nvidias 3 >/etc/cdi/nvidia.yaml
until_true "the file of the new driver" grep -q DRIVER=3 /etc/cdi/nvshare.json
# nvshare's file stays, so that a later step checks that the purge removes it.
rm /etc/cdi/nvidia.yaml
