# shellcheck shell=bash
# nvshare's containers are killed while pods compute, the kubelet is restarted, and the DaemonSet is
# deployed again. Pods continue and have correct results.

is_back() { # container, how often it had been restarted
    [ "$(restarts_of "$1")" -gt "$2" ] && kubectl -n nvshare wait --for=condition=Ready pods --all --timeout=1s
}

work="mix --mem 160M --reps 4 --rounds endless"
for number in 1 2; do pod long-$number "$work"; done
until_true "two pods to run" running 2
for pair in scheduler:nvshare-schedu device-plugin:nvshare-device- agent:nvshare-agent; do
    before=$(restarts_of "${pair%%:*}")
    pkill -9 "${pair#*:}" || fail "${pair%%:*} does not run"
    killed=$SECONDS
    until_true "the container ${pair%%:*}" is_back "${pair%%:*}" "$before"
    say "${pair%%:*} was killed and is ready after $((SECONDS - killed)) s"
done
until_true "slots" slots_are 4
running 2 || fail "pods did not outlive the containers of nvshare"
until_true "the programs to be clients again" eval 'ctl status | grep -q long-1 && ctl status | grep -q long-2'

stop kubelet
start_kubelet
until_true "the node" node_is_ready
until_true "slots" slots_are 4

kubectl -n nvshare rollout restart daemonset/nvshare >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare --timeout=180s >/dev/null || fail "the DaemonSet is not ready again"
until_true "slots" slots_are 4
until_true "the programs to be clients of the next scheduler" eval 'ctl status | grep -q long-1 && ctl status | grep -q long-2'
running 2 || fail "pods did not outlive the DaemonSet's pod"

# The pods have run all the time. Only programs that end by themselves report whether their results
# were correct.
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
for number in 1 2; do pod after-$number "mix --mem 160M --reps 4 --rounds 12"; done
sleep 1
pkill -9 nvshare-schedu
for number in 1 2; do
    until_true "after-$number" eval "is after-$number Succeeded || is after-$number Failed"
    kubectl logs after-$number | grep -q '"ok":true' || fail "after-$number: $(kubectl logs after-$number)"
done
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
until_true "the scheduler" ctl status
