# shellcheck shell=bash
# The scheduler is killed while both containers run. The next scheduler creates a new socket in the
# same directory.

new=$(create bookworm "${mix[@]}")
old=$(create bullseye "${mix[@]}")
enter "$new" >"$scratch/new" 2>"$scratch/new.err" & one=$!
enter "$old" >"$scratch/old" 2>"$scratch/old.err" & two=$!
until_true "both containers" both
until_true "memory to be swapped" swapped
stop_scheduler KILL
start_scheduler
until_true "both containers at the new scheduler" both
wait $one || fail "Debian 12: $(cat "$scratch/new" "$scratch/new.err")"
wait $two || fail "Debian 11: $(cat "$scratch/old" "$scratch/old.err")"
is_right "$scratch/new" && is_right "$scratch/old" || fail "a result is wrong"
