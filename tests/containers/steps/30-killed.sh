# shellcheck shell=bash
# A container is killed while it has memory on the GPU and in the host. The other container
# continues, and no memory of the killed container is left.

new=$(create bookworm "${mix[@]}")
old=$(create bullseye cuda-program mix --mem 160M --rounds endless --gpu-ms 40)
enter "$old" >/dev/null 2>&1 & two=$!
enter "$new" >"$scratch/new" 2>"$scratch/new.err" & one=$!
until_true "both containers" both
until_true "memory to be swapped" swapped
pod kill --signal KILL "$old" >/dev/null
wait $two && fail "it was not killed"
gone() { [ "$(status "all(c['container'] != '${old:0:12}' for c in s['clients'])")" = True ]; }
until_true "nothing of it to be left" gone
wait $one || fail "Debian 12: $(cat "$scratch/new" "$scratch/new.err")"
is_right "$scratch/new" || fail "a result is wrong"
