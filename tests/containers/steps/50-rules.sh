# shellcheck shell=bash
# A rule about one container applies to that container only, even if the container is already
# running.

new=$(create bookworm cuda-program mix --mem 100M --rounds endless --gpu-ms 40)
enter "$new" >/dev/null 2>&1 & one=$!
there() { [ "$(status "any(c['container'] == '${new:0:12}' and c['gpus'] for c in s['clients'])")" = True ]; }
until_true "the container" there
ctl set-rule small container="${new:0:12}" memory-max=150M
limit() { status "[u.get('memory-max') for c in s['clients'] if c['container'] == '${new:0:12}' for u in c['gpus']]"; }
[ "$(limit)" = "[$((150 << 20))]" ] || fail "its limit is $(limit)"
pod kill --signal KILL "$new" >/dev/null
wait $one || true
ctl unset-rule small

old=$(create bullseye cuda-program mix --mem 200M --rounds 2)
ctl set-rule small container="$old" memory-max=150M
said=$(enter "$old" || true)
[[ $said == *CUDA_ERROR_OUT_OF_MEMORY* ]] || fail "it had more than its limit: $said"
ctl unset-rule small
