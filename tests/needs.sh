#!/bin/sh
# Sees to it that what the project needs is there. Root on Debian has it installed; anybody else is told its name.
#
#   needs.sh cargo|cc|libc.a|readelf|dbus-daemon|man|dh…
set -eu

# The oldest cargo that builds the workspace: rust-version in Cargo.toml.
oldest=$(sed -n 's/^rust-version = "1\.\([0-9]*\).*/\1/p' "$(dirname "$0")/../Cargo.toml")
packages=
missing=
lacks() { # what, the Debian package that has it
    missing="$missing $1"
    packages="$packages $2"
}

has_library() { # its file name, where the loader searches
    ldconfig -p 2>/dev/null | grep -q "$1" || /sbin/ldconfig -p | grep -q "$1"
}

for what; do
    case $what in
    cargo)
        if ! version=$("${CARGO:-cargo}" --version 2>/dev/null); then
            echo "nvshare needs cargo 1.$oldest or newer: https://rustup.rs installs it" >&2
            exit 1
        fi
        minor=${version#cargo 1.}
        if [ "${minor%%.*}" -lt "$oldest" ]; then
            echo "nvshare needs cargo 1.$oldest or newer, and this is $version: https://rustup.rs installs a newer one" >&2
            exit 1
        fi
        ;;
    cc) command -v cc >/dev/null && [ -e /usr/include/stdio.h ] || lacks cc 'gcc libc6-dev' ;;
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
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$packages" >&2
    # Some lists are older than the packages that they name.
    # shellcheck disable=SC2086
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >/dev/null; }
    install || { apt-get update -qq && install; }
elif ! command -v apt-get >/dev/null; then
    echo "these are missing:$missing. (Without libc.a: make build STATIC=)" >&2
    exit 1
else
    echo "these are missing:$missing. As root: apt-get install$packages" >&2
    exit 1
fi
