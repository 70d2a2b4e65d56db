# shellcheck shell=bash
# nvshare is removed: no slots are left, and pods run as before.

kubectl delete -k /images/slots --timeout=60s >/dev/null
until_true "the slots to go" eval '[ "$(kubectl get node node -o jsonpath="{.status.allocatable.nvshare\.com/gpu}")" = 0 ]'
pod plain "mix --mem 8M --reps 1 --rounds 2" 2>/dev/null
until_true "a pod that wants a slot to wait" is plain Pending
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
