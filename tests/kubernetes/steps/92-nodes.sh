# shellcheck shell=bash
# There are two nodes. nvshare of one node cannot change the slice of the other, and `kubectl drain`
# moves a pod with a claim.

has_claims || return 0

start_second_node
until_true "the second slice" gpus_are 2 second
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"

# ---- the driver of the first node
uid=$(kubectl -n nvshare get pods --field-selector spec.nodeName=node -o jsonpath='{.items[0].metadata.name} {.items[0].metadata.uid}')
token=$(kubectl -n nvshare create token nvshare --bound-object-kind Pod --bound-object-name "${uid% *}" --bound-object-uid "${uid#* }")
replace() { # slice, filter
    kubectl get resourceslice "$1" -o json | jq "$2" |
        kubectl --kubeconfig=/dev/null --server=https://$address --certificate-authority=/etc/kubernetes/ca.crt --token="$token" replace -f - 2>&1
}
replace node-gpu.nvshare.com '.metadata.labels = {"test": "own"}' | grep -q replaced || fail "it cannot change its own slice"
for change in '.metadata.labels = {"test": "other"}' '.spec.devices = []'; do
    replace second-gpu.nvshare.com "$change" | grep -q "nvshare may change ResourceSlices of its own node only" ||
        fail "it can change another node's slice"
done
kubectl --kubeconfig=/dev/null --server=https://$address --certificate-authority=/etc/kubernetes/ca.crt --token="$token" \
    delete resourceslice second-gpu.nvshare.com 2>&1 | grep -q "of its own node only" || fail "it can delete another node's slice"
gpus_are 2 second || fail "the second slice has changed"

# ---- a pod moves to the other node
kubectl apply -f - >/dev/null <<DEPLOYMENT
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: moves}
spec: {spec: {devices: {requests: [$(exactly 200Mi 50)]}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: moves}
spec:
  selector: {matchLabels: {app: moves}}
  template:
    metadata: {labels: {app: moves}}
    spec:
      terminationGracePeriodSeconds: 3
      resourceClaims: [{name: gpu, resourceClaimTemplateName: moves}]
      containers:
        - name: main
          image: nvshare.test/program:1
          command: $(command_of "mix --mem 160M --reps 2 --rounds endless")
          resources: {claims: [{name: gpu}]}
DEPLOYMENT
node_of() { kubectl get pods -l app=moves --field-selector=status.phase=Running -o jsonpath='{.items[*].spec.nodeName}'; }
until_true "a pod to run" eval '[ -n "$(node_of)" ]'
from=$(node_of)
kubectl drain "$from" --ignore-daemonsets --timeout=60s >/logs/drain 2>&1 || fail "drain: $(cat /logs/drain)"
until_true "it to run on the other node" eval '[ -n "$(node_of)" ] && [ "$(node_of)" != "$from" ]'
kubectl -n nvshare wait --for=condition=Ready pods --all --timeout=60s >/dev/null || fail "nvshare does not stay"
until_true "one claim" eval '[ "$(kubectl get resourceclaims -o name | wc -l)" = 1 ]'
kubectl uncordon "$from" >/dev/null
kubectl delete deployment moves >/dev/null
kubectl delete resourceclaimtemplate moves >/dev/null
forget
