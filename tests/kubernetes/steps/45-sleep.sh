# shellcheck shell=bash
# The container with the necessary capabilities puts a pod's program to sleep and wakes it. The
# program can be woken even if that container and the scheduler were killed during the sleep. If the
# component is removed during the sleep, the program gets no turn, and other pods run.

a_pod_sleeps_and_wakes() {
    pod sleeper "mix --mem 64M --reps 1 --rounds endless --cpu-ms 20"
    until_true "the program to be a client" eval '[ "$(client pid)" -gt 0 ]'
    ctl pause default/sleeper || fail "it cannot be paused"
    until_true "it to sleep" sleeps sleeping
    ctl resume default/sleeper
    until_true "it to be awake" sleeps awake
}

a_pod_sleeps_and_wakes
ctl pause default/sleeper
until_true "it to sleep again" sleeps sleeping
for pair in checkpoint:nvshare-checkpo scheduler:nvshare-schedu; do
    before=$(restarts_of "${pair%%:*}")
    pkill -9 "${pair#*:}" || fail "${pair%%:*} does not run"
    until_true "the container ${pair%%:*}" eval '[ "$(restarts_of "${pair%%:*}")" -gt "$before" ]'
done
until_true "the scheduler" ctl status
until_true "it to be known as asleep" sleeps sleeping
# Administrators' orders outlive nvshare's pod: the program is still paused, and the GPU is still
# drained.
ctl drain 0
kubectl -n nvshare rollout restart daemonset/nvshare >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready again"
until_true "it to be known as asleep to the next pod" sleeps sleeping
[ "$(ctl --json status | jq -r '.clients[] | select(."pod-name" == "sleeper") | .paused')" = true ] || fail "it is no longer paused"
[ "$(ctl --json status | jq -r '.gpus[0].drained')" = true ] || fail "the GPU is no longer drained"
ctl undrain 0

# Nothing on the node can tell whether the program is asleep.
cp -r /images/slots /images/sleepless
sed -i '/^components:/d; /sleep/d' /images/sleepless/kustomization.yaml
kubectl apply -k /images/sleepless >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready without the component"
until_true "its state to be unknown" sleeps settling
until_true "the status to name it" eval 'ctl status | grep -q "may be asleep, and gets no turn"'
! ctl resume default/sleeper 2>/logs/resume || fail "it is resumed without the component"
grep -q "the component sleep/" /logs/resume || fail "resume: $(cat /logs/resume)"
pod neighbour "mix --mem 160M --reps 1 --rounds 2"
until_true "another pod to run" is neighbour Succeeded
kubectl apply -k /images/slots >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready with the component"
until_true "it to be known as asleep again" sleeps sleeping
ctl resume default/sleeper
until_true "it to be awake" sleeps awake
is sleeper Running || fail "it has not gone on: $(kubectl logs sleeper)"
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null

# The container has these two capabilities and no others.
main=$(pgrep -o nvshare-checkpo)
grep -q "^CapBnd:.0*80002$" "/proc/$main/status" || fail "its capabilities are $(grep CapBnd "/proc/$main/status")"
grep -q "^NoNewPrivs:.1$" "/proc/$main/status" || fail "it can gain privileges"
mounts=$(kubectl -n nvshare get pods -o jsonpath="{.items[0].spec.containers[?(@.name=='checkpoint')].volumeMounts[*].mountPath}")
[ "$mounts" = "/run/nvshare-checkpoint /tmp" ] || fail "it mounts $mounts"
