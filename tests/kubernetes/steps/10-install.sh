# shellcheck shell=bash
# Installs nvshare according to kubernetes/README.md. The RuntimeClass and NVIDIA's CDI file are
# created late. Events name the missing class and file. After a `rollout restart`, the DaemonSet is
# ready.

kubectl apply -k /images/slots >/dev/null
has_event() { kubectl -n nvshare get events -o jsonpath='{.items[*].message}' | grep -q "$1"; }
until_true "the event that the README names" has_event 'RuntimeClass "nvidia" not found'
kubectl apply -f /images/examples/runtime-class.yaml >/dev/null
kubectl -n nvshare rollout restart daemonset/nvshare >/dev/null
if has_cdi; then
    until_true "the event that names the CDI file" has_event 'no NVIDIA CDI file in /etc/cdi or /var/run/cdi names a GPU'
    write_nvidia_cdi 1
fi
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"

slots_are() { [ "$(kubectl get node node -o jsonpath='{.status.allocatable.nvshare\.com/gpu}')" = "$1" ]; }
until_true "slots" slots_are 4

ctl() {
    kubectl -n nvshare exec daemonset/nvshare -c scheduler -- nvsharectl "$@"
}
restarts_of() { # container
    kubectl -n nvshare get pods -o jsonpath="{.items[0].status.containerStatuses[?(@.name=='$1')].restartCount}"
}
# The program of the pod `sleeper`.
client() { # what of it
    ctl --json status | jq -r ".clients[] | select(.\"pod-name\" == \"sleeper\") | .$1"
}
sleeps() { [ "$(client sleep)" = "$1" ]; }
ctl status | grep -q "Simulated GPU" || fail "the scheduler does not know the GPU"
