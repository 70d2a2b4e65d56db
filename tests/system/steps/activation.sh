#!/bin/bash
# A first call on the bus starts the scheduler, and so does a first program.
. "$(dirname "$0")/../lib.sh"

busctl set-property "${bus[@]}" TimeQuantum u 45 || fail "nothing is started by a call on the bus"
says "u 45" busctl get-property "${bus[@]}" TimeQuantum
[ "$(systemctl is-active $unit)" = active ] || fail "$unit is $(systemctl is-active $unit)"
nvsharectl reset

# In tenths: 0.7.
systemd-analyze security --no-pager --threshold=7 $unit >/tmp/said 2>&1 || fail "the service is exposed: $(tail -n 1 /tmp/said)"
# Far from its limits.
tasks=$(shown TasksCurrent) memory=$(shown MemoryCurrent)
[ "$(shown TasksMax)" = 64 ] && [ "$tasks" -le 32 ] || fail "$tasks tasks of $(shown TasksMax)"
[ "$(shown MemoryMax)" = $((2 << 30)) ] || fail "MemoryMax is $(shown MemoryMax)"
case $memory in
    '[not set]') echo "there is no memory controller here: MemoryMax= not looked at" >&2 ;;
    *) [ "$memory" -le $((64 << 20)) ] || fail "an idle scheduler has $memory bytes" ;;
esac

# One unit for everything: the other socket and the service stop and start with it.
systemctl stop nvshare.socket
for stopped in nvshare.socket nvshare-control.socket $unit; do
    [ "$(systemctl is-active $stopped)" = inactive ] || fail "$stopped is $(systemctl is-active $stopped)"
done
systemctl enable --quiet --now nvshare.socket
[ "$(systemctl is-active nvshare-control.socket)" = active ] || fail "there is no control socket"
[ "$(systemctl is-active $unit)" = inactive ] || fail "the scheduler runs before anybody wants it"
program mix --mem 16M --rounds 2 >/dev/null || fail "a program ended with $?"
[ "$(systemctl is-active $unit)" = active ] || fail "a program has not started the scheduler"
has_logged 1 'cuda-program connected$' || fail "the program has not connected"
