#!/bin/bash
# Members of the group nvshare take the lock of a GPU whose device file they may open. They keep the
# lock during a restart of the scheduler. An administrator may end the lock, and nvsharectl reports
# this to the lock's owner.
. "$(dirname "$0")/../lib.sh"

refused "without a password" as_user nvsharectl lock -- true
gpasswd --add $user nvshare >/dev/null
says "with the lock" as_user nvsharectl lock -- echo "with the lock"
chmod 660 $simulated/nvidia0
refused "may not read and write $simulated/nvidia0" as_user nvsharectl lock -- true
chmod 666 $simulated/nvidia0

resumed=$(logged '^sleep continues')
as_user nvsharectl lock --on-loss terminate -- sleep 600 >/tmp/lock.log 2>&1 &
owner=$!
locked() { nvsharectl --json | grep -q '"sleep"'; }
until_true "the lock to be shown" locked
systemctl restart $unit
until_true "the lock to outlive a restart" has_logged $((resumed + 1)) '^sleep continues'
systemctl kill --signal=KILL --kill-who=main $unit
until_true "the lock to outlive SIGKILL" has_logged $((resumed + 2)) '^sleep continues'
locked || fail "the lock is not shown"
kill -0 $owner || fail "the lock was lost: $(cat /tmp/lock.log)"

id=$(nvsharectl --json | grep -o '"id": *[0-9]*' | grep -o '[0-9]*$')
refused "ccess denied" as_user busctl call "${bus[@]}" TerminateLock t "$id"
says "" busctl call "${bus[@]}" TerminateLock t "$id"
ended=0
wait $owner || ended=$?
grep -q "the lock was lost" /tmp/lock.log || fail "its owner is not told: $(cat /tmp/lock.log)"
[ $ended = 5 ] || fail "nvsharectl lock ended with $ended"
until_true "nothing to be kept" kept 0
rm /tmp/lock.log
gpasswd --delete $user nvshare >/dev/null
# Resets the counter of starts. Several steps start the scheduler repeatedly, and would together
# reach its start limit.
systemctl reset-failed $unit
