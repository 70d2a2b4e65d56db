#!/bin/bash
# A first call on the bus starts the scheduler, and so does a first program.
. "$(dirname "$0")/../lib.sh"

busctl set-property "${bus[@]}" TimeQuantum u 45 || fail "nothing is started by a call on the bus"
says "u 45" busctl get-property "${bus[@]}" TimeQuantum
[ "$(systemctl is-active $unit)" = active ] || fail "$unit is $(systemctl is-active $unit)"
nvsharectl reset

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
