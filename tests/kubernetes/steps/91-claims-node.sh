# shellcheck shell=bash
# Programs with claims sleep and wake, GPUs with claims are drained and fail, and nvshare's
# containers, the kubelet and the DaemonSet are restarted below them.

has_claims || return 0

# ---- sleep
claim sleeper "$(exactly 64Mi 25)"
claim_pod sleeper "mix --mem 40M --reps 1 --rounds endless --cpu-ms 20" sleeper
until_true "the program to be a client" eval '[ "$(client pid)" -gt 0 ]'
ctl pause default/sleeper || fail "it cannot be paused"
until_true "it to sleep" sleeps sleeping
for name in nvshare-checkpo nvshare-schedu nvshare-device-; do pkill -9 "$name" || fail "$name does not run"; done
until_true "nvshare" kubectl -n nvshare wait --for=condition=Ready pods --all --timeout=1s
until_true "the scheduler" ctl status
until_true "it to be known as asleep" sleeps sleeping
ctl resume default/sleeper
until_true "it to be awake" sleeps awake
until_true "its part" eval 'ctl status | grep -q "may use 64 MiB"'
stop kubelet
start_kubelet
until_true "the node" node_is_ready
until_true "the slice" gpus_are 2
until_true "the scheduler" ctl status
is sleeper Running || fail "it has not gone on: $(kubectl logs sleeper)"

# A pod can be deleted while its program sleeps.
ctl pause default/sleeper
until_true "it to sleep again" sleeps sleeping
forget
[ -z "$(find /run/nvshare-claims -mindepth 1 -type d)" ] || fail "claims are left: $(ls /run/nvshare-claims)"
! ls /var/run/cdi/nvshare-claim-*.json >/dev/null 2>&1 || fail "CDI files of claims are left"

# ---- a drained GPU
taints() { slice '{.spec.devices[*].taints[*].key}'; }
ctl drain 0
until_true "the taint" eval '[ "$(taints)" = gpu.nvshare.com/drained ]'
kubectl -n nvshare rollout restart daemonset/nvshare >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready again"
until_true "the slice" gpus_are 2
[ "$(taints)" = gpu.nvshare.com/drained ] || fail "the GPU is no longer drained"
drained=$(kubectl get resourceslice node-gpu.nvshare.com -o json | jq -r '.spec.devices[] | select(.taints) | .name')
for number in 1 2; do
    claim "other-$number" "$(exactly 0 10)"
    claim_pod "other-$number" "$endless" "other-$number"
    until_true "other-$number" is "other-$number" Running
    [ "$(device_of "other-$number")" != "$drained" ] || fail "a claim has the drained GPU"
done
ctl undrain 0
until_true "no taint" eval '[ -z "$(taints)" ]'

# ---- a failed GPU
status_of() { # pod, field
    kubectl get pod "$1" -o jsonpath="{.status.containerStatuses[0].allocatedResourcesStatus[*].resources[*].$2}"
}
for gpu in 0 1; do echo "$gpu 8 79" >>/run/gpu/nvml-events; done
until_true "the taints" eval '[ "$(taints)" = "gpu.nvshare.com/unhealthy gpu.nvshare.com/unhealthy" ]'
if [ "$minor" -ge 36 ]; then
    until_true "the pod's status to have it" eval '[ "$(status_of other-1 health)" = Unhealthy ]'
    status_of other-1 message | grep -q "XID 79" || fail "the reason is missing: $(kubectl get pod other-1 -o yaml)"
fi
sleep 2
for gpu in 0 1; do printf 0 >"/run/gpu/gpu-$gpu.recovery"; done
until_true "no taint" eval '[ -z "$(taints)" ]'
forget
