# shellcheck shell=bash
# nvshare's pod has the permissions that the README lists. Other pods have only the permissions that
# they need.

account=system:serviceaccount:nvshare:nvshare
may() { kubectl auth can-i "$@" --all-namespaces --as=$account --as-group=system:serviceaccounts >/dev/null; }
may list pods && may watch pods || fail "the agent may not see pods"
for what in "get secrets" "list secrets" "create pods" "patch pods" "delete pods" "create pods/exec" "list configmaps" "patch nodes"; do
    # shellcheck disable=SC2086
    if may $what; then fail "nvshare may $what"; fi
done
for container in scheduler device-plugin; do
    mounts=$(kubectl -n nvshare get pods -o jsonpath="{.items[0].spec.containers[?(@.name=='$container')].volumeMounts[*].mountPath}")
    case $mounts in *serviceaccount*) fail "$container has a token" ;; esac
done

pod looks "naps --seconds 600"
until_true "a pod to run" running 1
main=$(pgrep -n cuda-program)
for file in /run/nvshare/scheduler.sock "/proc/$main/root/run/nvshare/scheduler.sock"; do
    [ -S "$file" ] || fail "$file is missing"
done
if touch "/proc/$main/root/run/nvshare/file" 2>/dev/null && [ ! -w "/proc/$main/root/run/nvshare" ]; then fail "it can write there"; fi
[ ! -e "/proc/$main/root/run/nvshare-control" ] || fail "a pod sees the control socket"

# A user's pod has no control socket, and nvsharectl says who can run it.
kubectl run asks --image=nvshare:0.1.0 --restart=Never --command -- nvsharectl status >/dev/null
until_true "nvsharectl to end" is asks Failed
kubectl logs asks | grep -q 'an administrator runs `kubectl -n nvshare exec' || fail "nvsharectl: $(kubectl logs asks)"
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
