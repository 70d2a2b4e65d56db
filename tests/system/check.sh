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

. "$here/bases.sh"

# Looks at the page for Cockpit in a browser. Chromium is larger than the rest of a system, so the
# page has a separate system.
look_at_page() { # suite
    echo "--- $1: the page in Cockpit"
    base "$1-cockpit" "$include,cockpit-ws,cockpit-bridge,cockpit-system,chromium,sudo,fonts-dejavu-core"
    root=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-system-XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf --one-file-system '$root'" EXIT
    tar -C "$root" -xf "$base"
    prepare "$root"
    cp -r "$bases/repository" "$root/opt/nvshare-test/repository"
    if [ -n "${PICTURES:-}" ]; then
        mkdir -p "$root/pictures"
    fi
    began=$SECONDS
    "$here/boot.sh" "$root" /opt/nvshare-test/cockpit.sh ${PICTURES:+/pictures} || { failed=1 && echo "--- $1: FAILED" >&2; }
    echo "--- $1: the page took $((SECONDS - began)) s"
    [ -z "${PICTURES:-}" ] || cp "$root"/pictures/*.png "$PICTURES"
    # In a system of its own, because the programs of the test have left records.
    if [ -n "${CPU:-}" ]; then
        rm -rf --one-file-system "$root" && mkdir "$root" && tar -C "$root" -xf "$base"
        prepare "$root"
        cp -r "$bases/repository" "$root/opt/nvshare-test/repository"
        "$here/boot.sh" "$root" /opt/nvshare-test/cockpit.sh cpu
    fi
    rm -rf --one-file-system "$root"
    trap - EXIT
}

# Moves programs between two hosts, which need ssh. Their systems are separate from the one whose files are compared.
move_between() { # suite
    echo "--- $1: two hosts"
    base "$1-nodes" "$include,$for_nodes"
    root=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-system-XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf --one-file-system '$root'" EXIT
    tar -C "$root" -xf "$base"
    prepare "$root"
    cp -r "$bases/repository" "$root/opt/nvshare-test/repository"
    began=$SECONDS
    "$here/nodes.sh" "$root" || { failed=1 && echo "--- $1: FAILED" >&2; }
    echo "--- $1: the two hosts took $((SECONDS - began)) s"
    rm -rf --one-file-system "$root"
    trap - EXIT
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
    # Debian 12's CRIU is too old.
    base "$suite" "$include$([ "$suite" = bookworm ] || echo ,criu)"
    root=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-system-XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf --one-file-system '$root'" EXIT
    tar -C "$root" -xf "$base"

    prepare "$root"
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
    # The oldest Cockpit that the page was tested with is Debian 13's.
    [ "$suite" != trixie ] || { move_between "$suite" && look_at_page "$suite"; }
done
exit $failed
