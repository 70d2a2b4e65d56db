#!/bin/sh
# Creates the image's file system: the programs and the system libraries that they load, without a shell or a package
# manager.
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

# Copies each library, including the loader, to the path at which the loader finds it. The container
# runtime adds NVML and the driver, which need libdl and the other libraries named below.
for program in $programs; do
    ldd "$built/$program" 2>/dev/null || true # a static program has no libraries
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
