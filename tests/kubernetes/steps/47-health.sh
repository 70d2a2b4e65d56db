# shellcheck shell=bash
# A GPU fails. The node offers no slots of it, the pod that uses it has the failure in its status, and
# another pod waits. When the driver recommends no action, the slots are back, the waiting pod runs, and
# the first pod's status is healthy again.

health_of() { # pod
    kubectl get pod "$1" -o jsonpath='{.status.containerStatuses[0].allocatedResourcesStatus[*].resources[*].health}'
}
pod fails "mix --mem 8M --reps 1 --rounds endless --cpu-ms 20"
until_true "a pod to run" is fails Running
echo 0 8 79 >>/run/gpu/nvml-events
until_true "the slots to go" slots_are 0
until_true "the event with the reason" has_event "the driver reported XID 79"
# The first version that shows health by default.
[ "$minor" -lt 36 ] || until_true "the pod's status to have it" eval '[ "$(health_of fails)" = Unhealthy ]'
is fails Running || fail "the pod ended"
pod waits "mix --mem 64M --reps 1 --rounds 2"
until_true "the event of a pod without a slot" eval 'kubectl get events --field-selector involvedObject.name=waits -o jsonpath="{.items[*].message}" |
    grep -q "Insufficient nvshare.com/gpu"'
printf 0 >/run/gpu/gpu-0.recovery
until_true "slots" slots_are 4
until_true "the waiting pod to run" is waits Succeeded
kubectl logs waits | grep -q '"ok":true' || fail "waits: $(kubectl logs waits)"
[ "$minor" -lt 36 ] || until_true "the pod's status to be healthy again" eval '[ "$(health_of fails)" = Healthy ]'
is fails Running || fail "the pod ended"
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
