# shellcheck shell=bash
# What an image preloads itself stays; programs that cannot load the library run on as if nothing were there.

[ "$(run --env LD_PRELOAD=libm.so.6 bookworm sh -c 'echo "$LD_PRELOAD"')" = libm.so.6 ] || fail "LD_PRELOAD was lost"
maps=$(run --env LD_PRELOAD=libm.so.6 bookworm cat /proc/self/maps)
[[ $maps == *libm.so.6* && $maps == *libnvshare.so* ]] || fail "one of both is not loaded: $maps"

for image in static musl; do
    said=$(run $image /hello 2>&1) || fail "$image: ended with $?: $said"
    [ "$said" = hello ] || fail "$image: said «$said»"
done
