# shellcheck shell=bash
# Pods claim parts of two GPUs, also by selectors. Claims get at most their parts, Kubernetes counts the
# parts, and a claim that cannot be served says why.

has_claims || { say "this Kubernetes has no claims"; return; }

sed -i 's/"CUDA_SIM_MEMORY=256M"/"CUDA_SIM_GPUS=2", &/' /opt/gpu/edits.json
write_nvidia_cdi 2
kubectl apply -f /images/examples/runtime-class.yaml >/dev/null
kubectl apply -k /images/claims >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready"
slice() { kubectl get resourceslice "${2:-node}-gpu.nvshare.com" -o jsonpath="$1"; }
gpus_are() { [ "$(slice '{.spec.devices[*].name}' "${2:-}" | wc -w)" = "$1" ]; }
until_true "a slice with two GPUs" gpus_are 2
for example in half shared gang class; do
    kubectl apply --dry-run=server -f "/images/examples/dra/$example.yaml" >/dev/null || fail "$example.yaml is refused"
done

claim() { # name, requests, configuration
    kubectl apply -f - >/dev/null <<CLAIM
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: $1},
 spec: {devices: {requests: [$2]${3:+, $3}}}}
CLAIM
}
exactly() { # memory, time
    echo "{name: gpu, exactly: {deviceClassName: gpu.nvshare.com, capacity: {requests: {memory: $1, time: \"$2\"}}}}"
}
rule() { # keys
    echo "config: [{opaque: {driver: gpu.nvshare.com, parameters: {apiVersion: nvshare.com/v1, kind: Rule, $1}}}]"
}
claim_pod() { # name, words of the program, claim…
    local name=$1 words=$2
    shift 2
    kubectl apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata: {name: $name}
spec:
  restartPolicy: Never
  resourceClaims: [$(printf '{name: %s, resourceClaimName: %s}, ' "$1" "$1" "${@:2}" "${@:2}" | sed 's/, $//')]
  containers:
    - name: main
      image: nvshare.test/program:1
      command: $(command_of "$words")
      resources: {claims: [$(printf '{name: %s}, ' "$@" | sed 's/, $//')]}
POD
}
ends() { is "$1" Succeeded || is "$1" Failed; }
tells() { kubectl get events --field-selector "involvedObject.name=$1" -o jsonpath='{.items[*].message}' | grep -q "$2"; }
forget() { kubectl delete pods,resourceclaims --all --grace-period=1 --timeout=180s >/dev/null; }
device_of() { kubectl get resourceclaim "$1" -o jsonpath='{.status.allocation.devices.results[*].device}'; }
endless="mix --mem 8M --reps 1 --rounds endless --cpu-ms 20"

# ---- parts
claim part "$(exactly 64Mi 25)"
claim_pod fits "mix --mem 40M --reps 1 --rounds 2" part
until_true "a pod with a claim" ends fits
kubectl logs fits | grep -q '"ok":true' || fail "fits: $(kubectl logs fits)"
claim_pod exceeds "mix --mem 96M --reps 1 --rounds 2" part
until_true "a pod that exceeds its claim" ends exceeds
kubectl logs exceeds | grep -q OUT_OF_MEMORY || fail "exceeds: $(kubectl logs exceeds)"

for number in 1 2 3; do
    claim "most-$number" "$(exactly 0 60)"
    claim_pod "most-$number" "$endless" "most-$number"
    [ $number = 3 ] || until_true "most-$number" is "most-$number" Running
done
until_true "the event of a claim without a GPU" tells most-3 "cannot allocate all claims"
[ "$(device_of most-1)" != "$(device_of most-2)" ] || fail "both have one GPU"
kubectl delete pod most-1 --grace-period=1 --timeout=60s >/dev/null
until_true "most-3" is most-3 Running
forget

# ---- selectors, by attributes that NVIDIA's DRA driver has too
selected() { # expression
    echo "{name: gpu, exactly: {deviceClassName: gpu.nvshare.com, selectors: [{cel: {expression: '$1'}}]}}"
}
of='device.attributes["gpu.nvshare.com"]'
claim hopper "$(selected "$of.architecture == \"Hopper\" && $of.driverVersion.isGreaterThan(semver(\"500.0.0\"))")"
claim_pod hopper "$endless" hopper
claim ampere "$(selected "$of.architecture == \"Ampere\"")"
claim_pod ampere "$endless" ampere
until_true "a pod with a matching selector" is hopper Running
until_true "the event of a selector that matches no GPU" tells ampere "cannot allocate all claims"
forget

# ---- two GPUs, the first suitable part, and an administrator's access
claim pair '{name: gpus, exactly: {deviceClassName: gpu.nvshare.com, count: 2}}' \
    "constraints: [{requests: [gpus], distinctAttribute: gpu.nvshare.com/uuid}], $(rule 'gang: true')"
claim_pod pair "$endless" pair
until_true "a pod with two GPUs" is pair Running
[ "$(device_of pair | tr ' ' '\n' | sort -u | wc -l)" = 2 ] || fail "it has $(device_of pair)"

alternative() { echo "{name: $1, deviceClassName: gpu.nvshare.com, capacity: {requests: {memory: $2}}}"; }
claim list "{name: gpu, firstAvailable: [$(alternative large 1Gi), $(alternative small 48Mi)]}" "$(rule 'weight: 50')"
claim_pod list "$endless" list
until_true "a pod with the second alternative" is list Running
[ "$(kubectl get resourceclaim list -o jsonpath='{.status.allocation.devices.results[*].request}')" = gpu/small ] ||
    fail "it has $(kubectl get resourceclaim list -o yaml)"
until_true "its part" eval 'ctl status | grep -q "may use 48 MiB"'
until_true "its weight" eval 'ctl status | grep -q "weight 50"'

monitor='{name: gpu, exactly: {deviceClassName: gpu.nvshare.com, allocationMode: All, adminAccess: true}}'
! claim monitor "$monitor" 2>/logs/refused || fail "anyone can have an administrator's access"
grep -q "admin-access" /logs/refused || fail "$(cat /logs/refused)"
claim all "$(exactly 0 100)"
claim_pod all "$endless" all
until_true "a pod with all of the time" is all Running
kubectl label namespace default resource.kubernetes.io/admin-access=true >/dev/null
claim monitor "$monitor"
claim_pod monitor "$endless" monitor
until_true "a monitor" is monitor Running
until_true "its program to be a client" eval 'ctl status | grep -q default/monitor'
[ "$(device_of monitor | wc -w)" = 2 ] || fail "it has $(device_of monitor)"
kubectl label namespace default resource.kubernetes.io/admin-access- >/dev/null
forget

# ---- reasons
claim wrong "$(exactly 0 0)" "$(rule 'weight: 5000')"
claim_pod wrong "$endless" wrong
until_true "the event of a weight that is not permitted" tells wrong "weight is not allowed"
for number in 1 2; do claim "of-two-$number" "$(exactly "${number}6Mi" 0)"; done
claim_pod both "$endless" of-two-1 of-two-2
until_true "the event of two claims in one container" tells both "the container has several claims of nvshare"
kubectl delete pod both --grace-period=1 --timeout=60s >/dev/null
claim_pod both "$endless" of-two-2 of-two-1
until_true "the same event in the other order" tells both "the container has several claims of nvshare"
forget
