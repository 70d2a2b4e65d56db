# shellcheck shell=bash
# Installs nvshare according to kubernetes/README.md. The RuntimeClass is created late. An event
# names the missing class. After a `rollout restart`, the DaemonSet is ready.

kubectl apply -k /images/overlay >/dev/null
has_event() { kubectl -n nvshare get events -o jsonpath='{.items[*].message}' | grep -q "$1"; }
until_true "the event that the README names" has_event 'RuntimeClass "nvidia" not found'
kubectl apply -f /images/examples/runtime-class.yaml >/dev/null
kubectl -n nvshare rollout restart daemonset/nvshare >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"

slots_are() { [ "$(kubectl get node node -o jsonpath='{.status.allocatable.nvshare\.com/gpu}')" = "$1" ]; }
until_true "slots" slots_are 4

ctl() {
    kubectl -n nvshare exec daemonset/nvshare -c scheduler -- \
        nvsharectl --control /run/nvshare-control/control.sock "$@"
}
ctl status | grep -q "Simulated GPU" || fail "the scheduler does not know the GPU"
