#!/bin/bash
# The first call on the bus starts the scheduler. The first program does so too.
. "$(dirname "$0")/../lib.sh"

busctl set-property "${bus[@]}" TimeQuantum u 45 || fail "nothing is started by a call on the bus"
says "u 45" busctl get-property "${bus[@]}" TimeQuantum
[ "$(systemctl is-active $unit)" = active ] || fail "$unit is $(systemctl is-active $unit)"
nvsharectl reset

# systemd-analyze takes the threshold in tenths, so 7 means 0.7.
systemd-analyze security --no-pager --threshold=7 $unit >/tmp/said 2>&1 || fail "the service is exposed: $(tail -n 1 /tmp/said)"
# The scheduler stays far below its limits. The test reads the process's own figures, because
# containers seldom have the controllers.
says "1024 $((2 << 30))" echo "$(shown TasksMax) $(shown MemoryMax)"
of_process() { awk -v "field=$1:" '$1 == field { print $2 }' "/proc/$(shown MainPID)/status"; }
[ "$(of_process Threads)" -le 32 ] || fail "the scheduler has $(of_process Threads) threads"
[ "$(of_process VmRSS)" -le $((64 << 10)) ] || fail "an idle scheduler has $(of_process VmRSS) KiB"

# nvshare.socket controls the other units: the other sockets and the service stop and start together
# with it.
systemctl stop nvshare.socket
for stopped in nvshare.socket nvshare-control.socket nvshare-checkpoint.socket $unit; do
    until_true "$stopped to stop" sh -c "! systemctl is-active $stopped"
done
systemctl enable --quiet --now nvshare.socket
[ "$(systemctl is-active nvshare-control.socket)" = active ] || fail "there is no control socket"
[ "$(systemctl is-active nvshare-checkpoint.socket)" = active ] || fail "there is no socket for sleep"
says "nvshare:nvshare 600" stat -c '%U:%G %a' /run/nvshare-checkpoint/checkpoint.sock
[ "$(systemctl is-active $unit)" = inactive ] || fail "the scheduler runs before anybody wants it"
program mix --mem 16M --rounds 2 >/dev/null || fail "a program ended with $?"
[ "$(systemctl is-active $unit)" = active ] || fail "a program has not started the scheduler"
has_logged 1 'cuda-program connected$' || fail "the program has not connected"
