#!/bin/bash
# Boots Debian systems as containers, installs the packages with apt, and tests them: see README.md.
#
#   check.sh BUILT PACKAGES   BUILT: target/debug; PACKAGES: a directory with .debs of two versions
set -eu

[ $# -eq 2 ] || { echo "usage: $0 BUILT PACKAGES" >&2; exit 2; }
built=$(realpath "$1") packages=$(realpath "$2")
here=$(realpath "$(dirname "$0")")
bases=${built%/*}/system
mkdir -p "$bases"

# The systems have no network, so the packages' dependencies are preinstalled. The steps need the
# packages after adduser.
include=systemd,systemd-sysv,dbus,dbus-user-session,polkitd,libpam-systemd,libc6,adduser
include=$include,procps,diffutils,man-db,bash-completion,jq,gamemode-daemon,python3

# Creates the base system of a suite, unless a base system with these packages already exists.
base() { # name, packages
    base=$bases/$1.tar
    [ ! -e "$base" ] || [ "$(cat "$base.packages" 2>/dev/null)" != "$2" ] || return 0
    echo "--- $1: making a base system"
    mmdebstrap --quiet --format=tar --variant=apt --include="$2" "${1%%-*}" "$base.new"
    mv "$base.new" "$base"
    echo "$2" >"$base.packages"
}

# Makes a source package of the tree.
source_package() { # directory
    mkdir -p "$1/nvshare"
    git -C "$here/../.." ls-files -z --cached --others --exclude-standard | tar -C "$here/../.." --null -cT - | tar -x -C "$1/nvshare"
    (cd "$1" && dpkg-source --build nvshare >/dev/null && rm -r nvshare)
}

failed=0
for suite in ${SUITES:-bookworm trixie}; do
    began=$SECONDS
    base "$suite" $include
    root=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-system-XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf --one-file-system '$root'" EXIT
    tar -C "$root" -xf "$base"

    # NVIDIA's packages put their libraries in this directory.
    "$here/../cuda-sim/install.sh" "$root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || cc -print-multiarch)" "$built"
    install "$built/cuda-program" "$root/usr/local/bin"
    mkdir -p "$root/opt/nvshare-test"
    cp -r "$here"/*.sh "$here/steps" "$here/recipes" "$root/opt/nvshare-test"
    cp -r "$here/../../docs/recipes" "$root/opt/nvshare-test/pages"
    cp -r "$here/../../debian/tests" "$root/opt/nvshare-test/autopkgtests"
    versions=$(for deb in "$packages"/nvshare_*.deb; do dpkg-deb -f "$deb" Version; done | sort -V)
    # Creates a repository as it was before the newer version was published, and a repository with
    # that version. Both are served at the same URL.
    older=$(mktemp -d)
    cp "$packages"/*_"$(head -n 1 <<<"$versions")"_*.deb "$older"
    URL=file:/opt/nvshare-test/repository "$here/../../debian/apt-repository.sh" "$older" "$bases/repository" >/dev/null
    cp -r "$bases/repository" "$root/opt/nvshare-test/repository"
    URL=file:/opt/nvshare-test/repository "$here/../../debian/apt-repository.sh" "$packages" "$bases/repository" >/dev/null
    cp -r "$bases/repository" "$root/opt/nvshare-test/repository.newer"
    rm -r "$older"

    # lintian and its dependencies are larger than the rest of a system, so lintian has a separate
    # system.
    base "$suite-lintian" lintian
    echo "--- $suite: what lintian says"
    mkdir "$root/opt/lintian"
    tar -C "$root/opt/lintian" -xf "$base"
    # debhelper creates the -dbgsym packages, which cannot contain overrides.
    subjects=()
    for deb in "$packages"/*_"$(head -n 1 <<<"$versions")"_*.deb; do
        [[ $deb == *-dbgsym_* ]] || subjects+=("$deb")
    done
    "$here/lintian.sh" "$root/opt/lintian" "${subjects[@]}" || { failed=1 && echo "--- $suite: FAILED" >&2; }
    # The source follows only the newest policy, which an older lintian doesn't know.
    if [ "$suite" != bookworm ]; then
        source_package "$root/opt/source"
        "$here/lintian.sh" "$root/opt/lintian" "$root"/opt/source/nvshare_* || { failed=1 && echo "--- $suite: FAILED" >&2; }
    fi
    rm -rf --one-file-system "$root/opt/lintian" "$root/opt/source"

    echo "--- $suite: what dpkg does with the packages"
    "$here/packages.sh" "$root" "$packages" || { failed=1 && echo "--- $suite: FAILED" >&2; }
    echo "--- $suite: booting"
    booted=$SECONDS
    if "$here/boot.sh" "$root" /opt/nvshare-test/inside.sh; then
        echo "--- $suite: all right ($((SECONDS - booted)) s, with its installation $((SECONDS - began)) s)"
    else
        echo "--- $suite: FAILED" >&2
        failed=1
    fi
    rm -rf --one-file-system "$root"
    trap - EXIT
done
exit $failed
