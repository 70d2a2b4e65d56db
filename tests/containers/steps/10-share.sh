# shellcheck shell=bash
# Two containers of different systems take turns, because their memory does not fit together.
# `status` shows the containers.

mix=(cuda-program mix --mem 160M --rounds 60 --gpu-ms 40)
new=$(create bookworm "${mix[@]}")
old=$(create bullseye "${mix[@]}")
enter "$new" >"$scratch/new" 2>"$scratch/new.err" & one=$!
enter "$old" >"$scratch/old" 2>"$scratch/old.err" & two=$!
both() { [ "$(status "sorted(c['container'] for c in s['clients']) == sorted(['${new:0:12}', '${old:0:12}'])")" = True ]; }
until_true "both containers in what status says" both
swapped() { [ "$(status "s['gpus'][0]['swapped'] > 0")" = True ]; }
until_true "memory to be swapped" swapped
wait $one || fail "Debian 12: $(cat "$scratch/new" "$scratch/new.err")"
wait $two || fail "Debian 11: $(cat "$scratch/old" "$scratch/old.err")"
is_right "$scratch/new" && is_right "$scratch/old" || fail "a result is wrong"
[ ! -s "$scratch/new.err" ] && [ ! -s "$scratch/old.err" ] || fail "printed: $(cat "$scratch"/{new,old}.err)"
