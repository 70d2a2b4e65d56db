#!/bin/bash
# Two programs of two users share a GPU that is too small for both.
. "$(dirname "$0")/../lib.sh"

nvsharectl set time-quantum 1
program mix --mem 160M --rounds 8 --gpu-ms 50 >/tmp/share.root 2>&1 &
first=$!
program_of_user mix --mem 160M --rounds 8 --gpu-ms 50 >/tmp/share.user 2>&1 &
second=$!
until_true "both to be served" sh -c 'nvsharectl --json | tr , "\n" | grep -c "\"grants\": *[1-9]" | grep -qx 2'
wait $first || fail "root's program ended with $?: $(cat /tmp/share.root)"
wait $second || fail "the user's program ended with $?: $(cat /tmp/share.user)"
until_true "both to be gone" sh -c '! nvsharectl --json | grep -q cuda-program'
nvsharectl reset
