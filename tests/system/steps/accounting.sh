#!/bin/bash
# The GPU usage of users is recorded in a file of the scheduler, and outlives it. Users see their own usage.
. "$(dirname "$0")/../lib.sh"

tenant="user $(id -u $user)"
# The number of grants in total.
had() { # tenant
    nvsharectl report --json | jq "[.[] | select(.tenant == \"$1\").grants] | add // 0"
}
has_had() { [ "$(had "$1")" = "$2" ]; }
more() { [ "$(had "$1")" -gt "$2" ]; }

before=$(had root) before_of_user=$(had "$tenant")
program mix --mem 16M --rounds 4 --gpu-ms 50 >/dev/null || fail "a program ended with $?"
program_of_user mix --mem 16M --rounds 4 --gpu-ms 50 >/dev/null || fail "the user's program ended with $?"
until_true "both to be gone" is_so '.clients == []'
more root "$before" || fail "root's program is not recorded: $(nvsharectl report)"
more "$tenant" "$before_of_user" || fail "the user's program is not recorded: $(nvsharectl report)"
root=$(had root) of_user=$(had "$tenant")
says "$tenant" sh -c "runuser -u $user -- nvsharectl report --json | jq -r '.[].tenant'"

systemctl restart $unit
has_had root "$root" && has_had "$tenant" "$of_user" || fail "a restart has lost something: $(nvsharectl report)"
says "nvshare:nvshare 600" stat -c '%U:%G %a' /var/lib/nvshare/usage.sqlite
# A scheduler that is killed loses the last minute and no more, and the next one continues from there.
systemctl kill --signal=KILL --kill-who=main $unit
program mix --mem 16M --rounds 4 --gpu-ms 50 >/dev/null || fail "a program ended with $?"
until_true "the program to be recorded" more root "$root"
has_had "$tenant" "$of_user" || fail "what was saved is lost: $(nvsharectl report)"
systemctl reset-failed $unit
