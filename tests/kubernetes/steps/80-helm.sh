# shellcheck shell=bash
# The Helm chart is installed, changed and removed.

[ -x /opt/tools/helm ] || { say "there is no helm"; return; }
values=(--set slots=3 --set createRuntimeClass=true)
has_cdi || values+=(--set inject=mounts)

kubectl delete runtimeclass nvidia >/dev/null
kubectl create namespace nvshare >/dev/null
installed=$SECONDS
helm install nvshare /images/chart "${values[@]}"
until_true "slots" slots_are 3
say "the node offers slots $((SECONDS - installed)) s after the installation"
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"
values+=(--wait --timeout 180s)
pod charted "mix --mem 160M --reps 2 --rounds 4"
until_true "a pod to run" is charted Succeeded
kubectl logs charted | grep -q '"ok":true' || fail "charted: $(kubectl logs charted)"

# The chart has no value with this name.
! /opt/tools/helm --namespace nvshare upgrade nvshare /images/chart "${values[@]}" --set slot=2 >>/logs/helm 2>&1 ||
    fail "a misspelt value is taken"
helm upgrade nvshare /images/chart "${values[@]}" --set slots=2 --set sleep.enabled=true
until_true "other slots" slots_are 2
a_pod_sleeps_and_wakes
! /opt/tools/helm --namespace nvshare upgrade nvshare /images/chart "${values[@]}" --set slots=2 >>/logs/helm 2>&1 ||
    fail "what wakes programs is taken away"
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null

helm rollback nvshare 1 --wait --timeout 180s
until_true "the slots of before" slots_are 3
helm uninstall nvshare --wait
until_true "the slots to go" slots_are 0
[ -z "$(kubectl get clusterroles,clusterrolebindings,runtimeclasses -o name | grep -e nvshare -e /nvidia)" ] || fail "something is left"
