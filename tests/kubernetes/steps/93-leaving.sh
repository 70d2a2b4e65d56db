# shellcheck shell=bash
# Pods with claims hold up the removal of the driver, and are named. The nodes then offer slots instead
# of slices. `helm uninstall` refuses like the driver. After that, nothing is left.

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
no_slices() { [ -z "$(kubectl get resourceslices -o name)" ]; }
nothing_is_left() {
    [ -z "$(kubectl get clusterroles,clusterrolebindings,runtimeclasses,deviceclasses,validatingadmissionpolicies -o name |
        grep -e nvshare -e /nvidia)" ] || fail "something is left"
}

# ---- from claims to slots
kubectl apply -k /images/slots >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"
until_true "slots of two GPUs" slots_are 8
until_true "the slices to go" no_slices
kubectl delete -f /images/dra/access.yaml -f /images/dra/device-class.yaml -f /images/dra/own-slices.yaml >/dev/null
pod switched "mix --mem 64M --reps 1 --rounds 2"
until_true "a pod with a slot to run" is switched Succeeded
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
kubectl delete -k /images/slots --timeout=60s >/dev/null
kubectl delete runtimeclass nvidia >/dev/null
nothing_is_left

# ---- with Helm
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
nothing_is_left
