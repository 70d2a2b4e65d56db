#!/bin/sh
# Makes the file system of the image: the programs, and of the system what they load. There is no shell in it, and no
# package manager.
#
#   image.sh BUILT DIR   BUILT: target/release, with libnvshare.so
set -eu

[ $# -eq 2 ] || { echo "usage: $0 BUILT DIR" >&2; exit 2; }
built=$1 root=$2
here=$(dirname "$0")
mkdir -p "$root/usr/bin" "$root/usr/lib/nvshare" "$root/usr/share/nvshare" "$root/etc/nvshare" "$root/run" \
    "$root/tmp" "$root/var/lib/nvshare"
chmod 1777 "$root/tmp"

programs="nvshare-scheduler nvsharectl nvshare-checkpoint nvshare-device-plugin nvshare-agent"
for program in $programs; do install -m 755 "$built/$program" "$root/usr/bin"; done
install -m 644 "$built/libnvshare.so" "$root/usr/lib/nvshare"
install -m 644 "$here/../etc/ld.so.preload" "$root/usr/share/nvshare"

# Each library by its whole path, as the loader finds it; the loader itself among them. libdl and what follows are for NVML and the
# driver, which the container runtime brings.
for program in $programs; do
    ldd "$built/$program" 2>/dev/null || true # a static one has none
done | grep -o '/[^ ]*' | sort -u >"$root/tmp/libraries"
for library in $(cat "$root/tmp/libraries"); do
    mkdir -p "$root${library%/*}"
    cp -L "$library" "$root$library"
    case $library in
    */libc.so.*)
        for other in libdl.so.2 libpthread.so.0 librt.so.1 libm.so.6; do cp -L "${library%/*}/$other" "$root${library%/*}"; done
        ;;
    esac
done
rm "$root/tmp/libraries"
