#!/bin/bash
# The scheduler records the GPU usage of users in a file, which outlives the scheduler. Users see
# their own usage.
. "$(dirname "$0")/../lib.sh"

tenant="user $(id -u $user)"
# Prints the number of grants to a tenant.
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
# If a scheduler is killed, only the usage of the last minute is lost. The next scheduler continues
# the record.
systemctl kill --signal=KILL --kill-who=main $unit
program mix --mem 16M --rounds 4 --gpu-ms 50 >/dev/null || fail "a program ended with $?"
until_true "the program to be recorded" more root "$root"
has_had "$tenant" "$of_user" || fail "what was saved is lost: $(nvsharectl report)"
systemctl reset-failed $unit
