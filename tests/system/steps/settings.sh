#!/bin/bash
# Only administrators may change settings. All users may read them.
. "$(dirname "$0")/../lib.sh"

busctl set-property "${bus[@]}" TimeQuantum u 46 || fail "root may not change a setting"
says "u 46" busctl get-property "${bus[@]}" TimeQuantum
nvsharectl set max-wait 2min
says "u 120" as_user busctl get-property "${bus[@]}" MaxWait

refused "from 1 to 3600" busctl set-property "${bus[@]}" TimeQuantum u 0
refused "expected u" busctl set-property "${bus[@]}" TimeQuantum s soon
refused "auto" busctl set-property "${bus[@]}" AntiThrash s sometimes
refused "may not" as_user busctl set-property "${bus[@]}" TimeQuantum u 5
# busctl shows its own text for this error, as for all errors that D-Bus defines.
refused "ccess denied" as_user busctl call "${bus[@]}" Reload
refused "may not" as_user nvsharectl set time-quantum 5
refused "denied" as_user busctl call "${bus[@]}" NoSuchMethod
says "u 46" busctl get-property "${bus[@]}" TimeQuantum

nvsharectl set-rule batch slice=batch.slice weight=idle
as_user nvsharectl get | grep -q '^slice = "batch.slice"$' || fail "a user sees no rules: $(as_user nvsharectl get 2>&1)"
refused "may not" as_user nvsharectl set-rule mine user=1000 priority=100
nvsharectl unset-rule batch

as_user nvsharectl | grep -q "Simulated" || fail "a user sees nothing: $(as_user nvsharectl 2>&1)"
# A user sees the command lines of the user's own programs, but not those of root's programs.
program persistent --seconds 600 >/dev/null 2>&1 &
program=$!
until_true "a program of root" sh -c 'nvsharectl --json | grep -q cuda-program'
as_user nvsharectl --json | grep -q -e '--seconds 600' && fail "a user sees the command line of root's program"
nvsharectl --json | grep -q -e '--seconds 600' || fail "root does not see its command line"
pkill -x cuda-program
wait $program || true

# A rule for a user also applies to the user's subordinate IDs.
first=$(sed -n "s/^$user:\([0-9]*\):.*/\1/p" /etc/subuid)
[ -n "$first" ] || fail "$user has no subordinate user IDs"
nvsharectl set-rule own user=$user memory-max=64M
(umask 0 && exec setpriv --reuid $((first + 7)) --clear-groups env "${gpu[@]}" nvsharectl run -- \
    cuda-program persistent --seconds 600) >/dev/null 2>&1 &
program=$!
until_true "the rule to apply" sh -c "nvsharectl --json | grep -Eq '\"rule\": ?\"own\"'"
pkill -x cuda-program
wait $program || true
nvsharectl unset-rule own

# A changed setting survives a restart. After a reset, the file's value applies.
systemctl restart $unit
says "u 46" busctl get-property "${bus[@]}" TimeQuantum
nvsharectl reset
says "u 30" busctl get-property "${bus[@]}" TimeQuantum
