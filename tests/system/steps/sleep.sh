#!/bin/bash
# A user's program is put to sleep and woken by the helper, which systemd starts with its sandbox
# and its capabilities. The program also sleeps during a restart of the scheduler. Other users may
# not put the program to sleep.
. "$(dirname "$0")/../lib.sh"

program_of_user naps --mem 16M --seconds 600 --pause-ms 5 >/tmp/naps 2>&1 &
program=$!
until_true "the program to be served" is_so '.clients[].gpus[].grants > 0'
pid=$(status '.clients[].pid')
sleeps() { is_so ".clients[] | .sleep == \"$1\" and .paused == $2"; }
# Prints the bytes of the GPU that any program uses.
used() { status '.gpus[] | .overhead + .resident'; }
helpers() { journalctl -o cat -u 'nvshare-checkpoint@*' | grep -c '^Started' || true; }
before=$(used)

refused "may not" runuser -u nobody -- nvsharectl pause "$pid"
as_user nvsharectl pause "$pid" >/dev/null || fail "its owner may not pause it"
until_true "the program to sleep" sleeps sleeping true
[ "$(helpers)" = 1 ] || fail "systemd has started $(helpers) helpers"
until_true "its context to be gone" sh -c "[ $before -gt \$(nvsharectl --json | jq '.gpus[] | .overhead + .resident') ]"

# The helper runs only on demand, and no other service has its capabilities.
systemd-analyze security --no-pager --threshold=24 nvshare-checkpoint@.service >/tmp/said 2>&1 || fail "the helper is exposed: $(tail -n 1 /tmp/said)"
until_true "the helper to end" sh -c '! systemctl --plain --no-legend list-units "nvshare-checkpoint@*" | grep -q .'
systemctl restart $unit
until_true "the program to be connected again" sleeps sleeping true
kill -0 $program || fail "the program has ended: $(cat /tmp/naps)"

as_user nvsharectl resume "$pid" >/dev/null || fail "its owner may not resume it"
until_true "the program to be awake" sleeps awake false
had=$(status '.clients[].gpus[]."lock-time"')
until_true "it to go on" is_so ".clients[].gpus[].\"lock-time\" > $had"
kill -USR1 "$pid"
wait $program || fail "the program ended with $?: $(cat /tmp/naps)"
until_true "nothing to be kept" kept 0
rm /tmp/naps
