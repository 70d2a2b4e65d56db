# shellcheck shell=bash
# no-bypass.yaml refuses pods that would use GPUs without nvshare. A pod under the Pod Security level
# `restricted` can use a slot.

[ "$minor" -ge 30 ] || { say "this Kubernetes has no ValidatingAdmissionPolicy"; return; }
kubectl apply -f /images/examples/no-bypass.yaml >/dev/null
plain() { # a field of the pod's specification, fields of the container
    kubectl apply --dry-run=server -f - 2>&1 <<POD
{apiVersion: v1, kind: Pod, metadata: {name: plain},
 spec: {$1 containers: [{name: main, image: "nvshare.test/program:1"${2:+, $2}}]}}
POD
}
refuses() { plain "${@:2}" | grep -q "$1"; }
until_true "the policy" refuses "runtime class gives GPUs past nvshare" "runtimeClassName: nvidia,"
refuses "NVIDIA_VISIBLE_DEVICES gives GPUs past nvshare" "" "env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]" || fail "the variable is admitted"
refuses "privileged container" "" "securityContext: {privileged: true}" || fail "a privileged container is admitted"
for path in /run/nvshare /run/nvshare-claims /var/run/nvshare-claims/x /run//nvshare-claims/ /run; do
    refuses "sockets on the node" "volumes: [{name: v, hostPath: {path: $path}}]," || fail "the volume $path is admitted"
done
plain "volumes: [{name: v, hostPath: {path: /run/other}}]," | grep -q created || fail "another volume is refused"

kubectl create namespace restricted >/dev/null
kubectl label namespace restricted pod-security.kubernetes.io/enforce=restricted >/dev/null
until_true "the service account" kubectl -n restricted get serviceaccount default
kubectl -n restricted apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata: {name: restricted}
spec:
  restartPolicy: Never
  securityContext: {runAsNonRoot: true, runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: main
      image: nvshare.test/program:1
      command: $(command_of "mix --mem 64M --reps 1 --rounds 2")
      resources: {limits: {nvshare.com/gpu: 1}}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
POD
restricted() { kubectl -n restricted get pod restricted -o jsonpath='{.status.phase}'; }
until_true "the restricted pod" eval '[ "$(restricted)" = Succeeded ] || [ "$(restricted)" = Failed ]'
kubectl -n restricted logs restricted | grep -q '"ok":true' || fail "restricted: $(kubectl -n restricted logs restricted)"
kubectl delete namespace restricted --timeout=60s >/dev/null
kubectl delete -f /images/examples/no-bypass.yaml >/dev/null
