#!/bin/bash
# A program migrates to another GPU while it runs, and leaves a GPU that is drained. For this test
# the simulated machine has two GPUs.
. "$(dirname "$0")/../lib.sh"

mkdir -m 777 $simulated/two
one=("${gpu[@]}")
gpu=("${gpu[@]/%=$simulated/=$simulated/two}" CUDA_SIM_GPUS=2)
simulate "${gpu[@]}"
systemctl restart $unit

program naps --mem 16M --seconds 600 --pause-ms 5 >/tmp/naps 2>&1 &
program=$!
until_true "the program to be served" is_so '.clients[].gpus[].grants > 0'
pid=$(status '.clients[].pid')
mapfile -t gpus < <(status '.gpus | sort_by(.index)[].uuid')
[ "${#gpus[@]}" = 2 ] || fail "there are ${#gpus[@]} GPUs"
is_on() { is_so ".clients[] | .sleep == \"awake\" and .gpus[].uuid == \"${gpus[$1]}\""; }
from=0
is_on 0 >/dev/null || from=1
to=$((1 - from))

refused "may not" as_user nvsharectl migrate "$pid" --to $to
nvsharectl migrate "$pid" --to $to >/dev/null || fail "it is not moved: $(nvsharectl migrate "$pid" --to $to 2>&1)"
is_on $to >/dev/null || fail "it is not there: $(nvsharectl)"
nvsharectl drain $to >/dev/null || fail "the GPU is not drained: $(nvsharectl drain $to 2>&1)"
is_on $from >/dev/null || fail "it has not left the GPU that is drained: $(nvsharectl)"
systemctl restart $unit
until_true "the GPU to be drained still" is_so ".gpus[] | select(.uuid == \"${gpus[$to]}\").drained"
nvsharectl undrain $to >/dev/null || fail "undrain ended with $?"
until_true "it to be connected again" is_on $from
kill -USR1 "$pid"
wait $program || fail "the program ended with $?: $(cat /tmp/naps)"
until_true "nothing to be kept" kept 0
rm /tmp/naps

simulate "${one[@]}"
systemctl restart $unit
rm -r $simulated/two
systemctl reset-failed $unit
