#!/bin/sh
# Installs the project's dependencies if run by root on Debian. Otherwise prints the names of the
# packages and fails.
#
#   needs.sh cargo|cc|libc.a|readelf|dbus-daemon|man|dh…
set -eu

# The oldest cargo that builds the workspace.
oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "$0")/../Cargo.toml")

# Prints a version such as "1.96.0", or nothing if cargo is missing.
version_of_cargo() { "${CARGO:-cargo}" --version 2>/dev/null | cut -d ' ' -f 2; }

is_recent_cargo() {
    version=$(version_of_cargo)
    [ -n "$version" ] && [ "$(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest" ]
}

missing=
packages=
lacks() { # what, the Debian packages that have it
    missing="$missing, $1"
    packages="$packages, $2"
}

has_library() { # its file name, where the loader searches
    ldconfig -p 2>/dev/null | grep -q "$1" || /sbin/ldconfig -p | grep -q "$1"
}

for what; do
    case $what in
    # Debian 12 (in its security updates) and Debian 13 have a current cargo as cargo-web. Later
    # releases have a current cargo as cargo.
    cargo)
        if is_recent_cargo; then continue; fi
        if [ -n "${CARGO:-}" ] && [ "$CARGO" != cargo ]; then
            echo "CARGO=$CARGO is not cargo $oldest or newer" >&2
            exit 1
        fi
        lacks "cargo $oldest or newer" "cargo-web (>= $oldest) | cargo (>= $oldest)"
        ;;
    cc) command -v cc >/dev/null && [ -e /usr/include/stdio.h ] || lacks cc 'gcc, libc6-dev' ;;
    libc.a) [ -e "$(cc -print-file-name=libc.a 2>/dev/null)" ] || lacks libc.a libc6-dev ;;
    readelf) command -v readelf >/dev/null || lacks readelf binutils ;;
    ip) command -v ip >/dev/null || lacks ip iproute2 ;;
    man) command -v man >/dev/null || lacks man man-db ;;
    dpkg-buildpackage) command -v dpkg-buildpackage >/dev/null || lacks dpkg-buildpackage dpkg-dev ;;
    dh) command -v dh_installsysusers >/dev/null || lacks dh debhelper ;;
    apt-ftparchive) command -v apt-ftparchive >/dev/null || lacks apt-ftparchive apt-utils ;;
    dpkg-deb) command -v dpkg-deb >/dev/null || lacks dpkg-deb dpkg ;;
    gpg) command -v gpg >/dev/null || lacks gpg gpg ;;
    mmdebstrap) command -v mmdebstrap >/dev/null || lacks mmdebstrap mmdebstrap ;;
    systemd-nspawn) command -v systemd-nspawn >/dev/null || lacks systemd-nspawn systemd-container ;;
    musl-gcc) command -v musl-gcc >/dev/null || lacks musl-gcc musl-tools ;;
    perl | podman | crun | python3 | tmux) command -v "$what" >/dev/null || lacks "$what" "$what" ;;
    apparmor_parser) command -v apparmor_parser >/dev/null || [ -x /usr/sbin/apparmor_parser ] || lacks apparmor_parser apparmor ;;
    libeatmydata) has_library libeatmydata.so.1 || lacks libeatmydata libeatmydata1 ;;
    libjemalloc) has_library libjemalloc.so.2 || lacks libjemalloc libjemalloc2 ;;
    setpriv) command -v setpriv >/dev/null || lacks setpriv util-linux ;;
    dbus-daemon) command -v dbus-daemon >/dev/null || lacks dbus-daemon dbus-daemon ;;
    *) lacks "$what" "$what" ;;
    esac
done

[ -n "$missing" ] || exit 0
packages=${packages#, }
if ! command -v apt-get >/dev/null; then
    echo "these are missing: ${missing#, }. (Without libc.a: make build STATIC=)" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "these are missing: ${missing#, }. As root: apt-get update && apt-get satisfy '$packages'" >&2
    exit 1
fi
echo "installing $packages" >&2
install() { DEBIAN_FRONTEND=noninteractive apt-get satisfy -qq -y --no-install-recommends "$packages" >/dev/null; }
# The lists may be older than the packages.
install 2>/dev/null || { apt-get update -qq && install; }
case $missing in
*cargo*)
    hash -r
    is_recent_cargo || {
        echo "cargo is still $(command -v cargo), $(version_of_cargo): it comes before Debian's in PATH" >&2
        exit 1
    }
    ;;
esac
