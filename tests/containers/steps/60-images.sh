# shellcheck shell=bash
# An image's own preloaded libraries are still loaded. Programs that cannot load nvshare's library
# run normally without it.

[ "$(run --env LD_PRELOAD=libm.so.6 bookworm sh -c 'echo "$LD_PRELOAD"')" = libm.so.6 ] || fail "LD_PRELOAD was lost"
maps=$(run --env LD_PRELOAD=libm.so.6 bookworm cat /proc/self/maps)
[[ $maps == *libm.so.6* && $maps == *libnvshare.so* ]] || fail "one of both is not loaded: $maps"

# An image may also have its own preload list. The runtime's hook merges the image's list with
# nvshare's list, even if the container cannot write.
mkdir -p "$scratch/own/etc"
echo libm.so.6 >"$scratch/own/etc/ld.so.preload"
cp "$bases/bookworm.tar" "$scratch/own.tar"
tar -C "$scratch/own" --owner=0 --group=0 -rf "$scratch/own.tar" ./etc/ld.so.preload
import own "$scratch/own.tar"
for option in --read-only=false --read-only; do
    maps=$(run $option own cat /proc/self/maps)
    [[ $maps == *libm.so.6* && $maps == *libnvshare.so* ]] || fail "$option: one of both is not loaded: $maps"
    [ "$(run $option own cat /etc/ld.so.preload)" = "libm.so.6
/usr/lib/nvshare/libnvshare.so" ] || fail "$option: the list is not merged"
done
run own sh -c '! echo x >>/etc/ld.so.preload' 2>/dev/null || fail "a container can change the list"
# If a list cannot be merged, the container doesn't start. crun doesn't report the reason.
ln -sf other "$scratch/own/etc/ld.so.preload"
echo libm.so.6 >"$scratch/own/etc/other"
cp "$bases/bookworm.tar" "$scratch/link.tar"
tar -C "$scratch/own" --owner=0 --group=0 -rf "$scratch/link.tar" ./etc/ld.so.preload ./etc/other
import link "$scratch/link.tar"
if said=$(run link true 2>&1); then fail "a list that is hidden is not said: $said"; fi
[[ $said == *nvsharectl*"exit code: 1"* ]] || fail "it is not said what failed: $said"

for image in static musl; do
    said=$(run $image /hello 2>&1) || fail "$image: ended with $?: $said"
    [ "$said" = hello ] || fail "$image: said «$said»"
done
