# shellcheck shell=bash
# `kubectl drain` ends the programs of a node, also a paused one. nvshare stays, and the programs
# that the pods' owners create later start from the beginning.

kubectl create deployment moves --image=nvshare.test/program:1 --dry-run=client -o json |
    jq --argjson command "$(command_of "mix --mem 160M --reps 2 --rounds endless")" --arg runtime "${runtime#*: }" \
        '.spec.template.spec |= (.terminationGracePeriodSeconds = 3 | .containers[0].command = $command |
            .containers[0].resources.limits = {"nvshare.com/gpu": "1"} |
            if $runtime == "" then . else .runtimeClassName = $runtime end)' |
    kubectl apply -f - >/dev/null
pod sleeper "mix --mem 64M --reps 1 --rounds endless --cpu-ms 20"
until_true "two pods to run" running 2
until_true "the program to be a client" eval '[ "$(client pid)" -gt 0 ]'
ctl pause default/sleeper
until_true "it to sleep" sleeps sleeping
before=$(kubectl get pods -l app=moves -o name)

# The pod of nvshare belongs to a DaemonSet, and `sleeper` to nobody.
! kubectl drain node --dry-run=server >/logs/drain 2>&1 || fail "drain does not refuse"
grep -q "ignore-daemonsets" /logs/drain || fail "drain: $(cat /logs/drain)"
kubectl drain node --ignore-daemonsets --delete-emptydir-data --force --grace-period=3 --timeout=60s >/logs/drain 2>&1 ||
    fail "drain: $(cat /logs/drain)"
! pgrep cuda-program >/dev/null || fail "programs outlive their pods"
kubectl -n nvshare wait --for=condition=Ready pods --all --timeout=5s >/dev/null || fail "nvshare does not stay"
slots_are 4 || fail "the node has lost its slots"
until_true "the scheduler to forget the programs" eval '[ "$(ctl --json status | jq ".clients | length")" = 0 ]'
[ "$(kubectl get pods -l app=moves --field-selector=status.phase=Pending -o name | wc -l)" = 1 ] || fail "no pod waits for a node"
kubectl uncordon node >/dev/null
until_true "another pod to run" running 1
[ "$(kubectl get pods -l app=moves -o name)" != "$before" ] || fail "the pod is the same"
until_true "its program to be a client" eval 'ctl status | grep -q default/moves'
kubectl delete deployment moves >/dev/null
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
