# shellcheck shell=bash
# Pods share the GPU, although together they need more memory than the GPU has. If no slot is left,
# a pod waits.

# Without CDI, NVIDIA's runtime gives the GPU to the pod.
runtime="runtimeClassName: nvidia"
! has_cdi || runtime=
command_of() { printf '["cuda-program", %s]' "$(printf '%s' "$1" | sed 's/[^ ]*/"&"/g; s/ /, /g')"; }
pod() { # name, words of the program, annotations
    kubectl apply -f - <<POD >/dev/null
apiVersion: v1
kind: Pod
metadata:
  name: $1
  annotations: {${3:-}}
spec:
  restartPolicy: Never
  $runtime
  containers:
    - name: main
      image: nvshare.test/program:1
      command: $(command_of "$2")
      resources: {limits: {nvshare.com/gpu: 1}}
POD
}
phase() { kubectl get pod "$1" -o jsonpath='{.status.phase}'; }
is() { [ "$(phase "$1")" = "$2" ]; }

# Each pod needs more than half of the 256 MiB.
for number in 1 2; do pod share-$number "mix --mem 160M --reps 4 --rounds 12"; done
for number in 1 2; do
    until_true "share-$number" is share-$number Succeeded
    kubectl logs share-$number | grep -q '"ok":true' || fail "share-$number: $(kubectl logs share-$number)"
done

for number in 1 2 3 4 5; do pod slot-$number "mix --mem 8M --reps 1 --rounds endless --cpu-ms 20"; done
running() { [ "$(kubectl get pods -o jsonpath='{.items[?(@.status.phase=="Running")].metadata.name}' | wc -w)" = "$1" ]; }
until_true "four pods to run" running 4
[ "$(kubectl get pods --field-selector=status.phase=Pending -o name | wc -l)" = 1 ] || fail "the fifth pod has no slot"
ctl status | grep -q "default/slot-" || fail "pods are shown by their names"
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
