#!/bin/sh
# Runs lintian on packages, or on a source package. Fails on errors, on warnings, and on an override
# without a comment above the override. Uses a Debian system without booting or changing the system.
# Needs root and systemd-nspawn.
#
#   mmdebstrap --variant=apt --include=lintian bookworm DIR
#   tests/system/lintian.sh DIR PACKAGE.deb… | SOURCE.dsc
set -eu

if [ ! -d /packages ]; then
    [ $# -ge 2 ] || { echo "usage: $0 DIR PACKAGE…" >&2; exit 2; }
    root=$1
    shift
    # The packages may be in different directories. The container sees them in one directory.
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    cp "$@" "$packages"
    chmod -R a+rX "$packages"
    systemd-nspawn --quiet --directory="$root" --volatile=overlay --private-network --register=no --keep-unit --as-pid2 --pipe \
        --bind-ro="$packages:/packages" --bind-ro="$(realpath "$0"):/lintian.sh" --setenv=LC_ALL=C.UTF-8 /bin/sh /lintian.sh
    exit
fi

lintian --version
cd /packages
subjects=$(ls ./*.dsc 2>/dev/null || ls ./*.deb)
# shellcheck disable=SC2086
setpriv --reuid=nobody --regid=nogroup --clear-groups lintian --fail-on error,warning --tag-display-limit 0 $subjects
for deb in ./*.deb; do
    [ -e "$deb" ] || continue
    dpkg-deb --fsys-tarfile "$deb" | tar -xO --wildcards './usr/share/lintian/overrides/*' 2>/dev/null | awk -v deb="$deb" '
        /^#/ { explained = 1; next }
        /^[^ ]/ && !explained { print deb ": no comment explains the override " $0; bad = 1 }
        /^$/ { explained = 0 }
        END { exit bad }'
done
