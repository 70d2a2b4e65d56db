#!/bin/bash
# Follows the steps of CONTRIBUTING.md for new contributors, on a fresh Debian. Installs the
# packages that CONTRIBUTING.md names, clones the project, and runs `make demo` and `make check` as
# an ordinary user. Needs root, mmdebstrap, systemd-nspawn, and the registries of Debian and of
# crates.
#
#   fresh.sh SUITE            FRESH=demo: without `make check`, which builds and tests everything once more; FRESH=no: nothing
set -eu

[ $# -eq 1 ] || { echo "usage: $0 SUITE" >&2; exit 2; }
[ "${FRESH:-}" != no ] || exit 0
suite=$1
here=$(realpath "$(dirname "$0")")
tree=$(realpath "$here/../..")
packages=$(sed -n 's/^sudo apt install \(make .*\)/\1/p' "$tree/CONTRIBUTING.md")
[ "$(wc -l <<<"$packages")" = 1 ] || { echo "CONTRIBUTING.md does not have one line of packages" >&2; exit 1; }

root=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-fresh-XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT
mmdebstrap --quiet --variant=apt "$suite" "$root"
# The fresh system needs this machine's certificate authorities too, for example to reach the
# registries through a proxy.
mkdir -p "$root/usr/local/share/ca-certificates"
cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates" 2>/dev/null || true
inside() {
    systemd-nspawn --quiet --directory="$root" --register=no --keep-unit --as-pid2 --pipe --resolv-conf=copy-host --timezone=off \
        --setenv=LANG=C.UTF-8 --setenv=DEBIAN_FRONTEND=noninteractive "$@"
}

echo "--- fresh $suite: apt install $packages"
# The names are meant to be split.
# shellcheck disable=SC2086
inside sh -ec 'apt-get -qq update && apt-get -qq -y install "$@" >/tmp/apt.log 2>&1 || { tail -n 30 /tmp/apt.log; exit 1; }' sh $packages
inside useradd --create-home --shell /bin/sh newcomer

# The clone includes uncommitted changes.
clone=$root/home/newcomer/nvshare
git clone --quiet "$tree" "$clone"
git -C "$tree" ls-files -z --deleted | (cd "$clone" && xargs -0 rm -f)
git -C "$tree" ls-files -z --cached --others --exclude-standard | tar -C "$tree" --ignore-failed-read --null -cT - 2>/dev/null | tar -C "$clone" -x
inside chown -R newcomer: /home/newcomer
as_newcomer() { inside runuser -l newcomer -c "cd nvshare && $*"; }

began=$SECONDS
echo "--- fresh $suite: make demo"
as_newcomer make demo
[ -s "$clone/target/quick/demo.svg" ] || { echo "the demo has drawn no picture" >&2; exit 1; }
echo "--- fresh $suite: the demo took $((SECONDS - began)) s"
[ "${FRESH:-}" != demo ] || exit 0

began=$SECONDS
echo "--- fresh $suite: make check"
as_newcomer make check
echo "--- fresh $suite: the check took $((SECONDS - began)) s"
