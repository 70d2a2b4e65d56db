# shellcheck shell=bash
# Pods request limits by annotations. Permitted limits apply. For every other limit, the log gives
# the reason why the limit does not apply.

idle="mix --mem 8M --reps 1 --rounds endless --cpu-ms 20"
pod modest "$idle" 'nvshare.com/memory-max: "64M", nvshare.com/weight: "20"'
pod greedy "$idle" 'nvshare.com/weight: "5000"'
pod wrong "$idle" 'nvshare.com/weight: "heavy"'
until_true "three pods to run" running 3
until_true "the modest pod's limit" eval 'ctl status | grep -q "may use 64 MiB"'
until_true "its weight" eval 'ctl status | grep -q "weight 20"'
agent() { kubectl -n nvshare logs daemonset/nvshare -c agent --tail=-1; }
until_true "the agent to refuse a weight" eval 'agent | grep "default/greedy" | grep -q "at most 100"'
until_true "the agent to report a mistake" eval 'agent | grep "default/wrong" | grep -q heavy'
pod large "mix --mem 96M --reps 1 --rounds 2" 'nvshare.com/memory-max: "64M"'
until_true "a pod to be refused memory" is large Failed
kubectl logs large | grep -q OUT_OF_MEMORY || fail "large: $(kubectl logs large)"
kubectl delete pods --all --grace-period=1 --timeout=180s >/dev/null
