# shellcheck shell=bash
# Pods with claims hold up the removal of the driver, and are named. `helm uninstall` refuses
# likewise. After that, nothing is left.

has_claims || return 0

check_removal() { kubectl -n nvshare exec daemonset/nvshare -c device-plugin -- nvshare-device-plugin --check-removal 2>&1; }
claim stays "$(exactly 0 10)"
claim_pod stays "$endless" stays
until_true "a pod with a claim" is stays Running
! check_removal >/logs/removal || fail "the driver can be removed"
grep -q "default/stays" /logs/removal || fail "the pod is not named: $(cat /logs/removal)"
until_true "the event" tells stays "DRA driver is being removed"
forget
check_removal || fail "the driver cannot be removed"
kubectl delete -k /images/claims --timeout=60s >/dev/null
kubectl delete runtimeclass nvidia >/dev/null
no_slices() { [ -z "$(kubectl get resourceslices -o name)" ]; }
until_true "the slices to go" no_slices

[ -x /opt/tools/helm ] || { say "there is no helm"; return; }
values=(--set createRuntimeClass=true --set dra.enabled=true --wait --timeout 180s)
kubectl create namespace nvshare >/dev/null
helm install nvshare /images/chart "${values[@]}"
until_true "the slice" gpus_are 2
claim charted "$(exactly 64Mi 10)"
claim_pod charted "$endless" charted
until_true "a pod with a claim" is charted Running
for change in "uninstall nvshare" "upgrade nvshare /images/chart --set createRuntimeClass=true"; do
    # shellcheck disable=SC2086
    ! /opt/tools/helm --namespace nvshare $change >>/logs/helm 2>&1 || fail "helm $change leaves a pod with a claim"
done
is charted Running || fail "it ended"
forget
helm uninstall nvshare --wait
until_true "the slices to go" no_slices
[ -z "$(kubectl get clusterroles,clusterrolebindings,runtimeclasses,deviceclasses,validatingadmissionpolicies -o name | grep -e nvshare -e /nvidia)" ] ||
    fail "something is left"
