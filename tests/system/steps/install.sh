#!/bin/bash
# Installs the packages by name from a signed repository. Afterwards nothing runs and nothing is
# preloaded: the administrator decides on both.
. "$(dirname "$0")/../lib.sh"

repository=$here/repository
install -m 644 "$repository/nvshare.sources" /etc/apt/sources.list.d/
# Without the key, or with a tampered index, apt accepts no package.
is_refused() { # why
    apt-get update -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/nvshare.sources -o Dir::Etc::sourceparts=- >/tmp/apt.log 2>&1 || true
    ! apt-cache show nvshare >/dev/null 2>&1 || fail "apt accepts a repository $1: $(cat /tmp/apt.log)"
}
is_refused "without its key"
install -m 644 "$repository/nvshare.gpg" /etc/apt/keyrings/
signed=$(cat "$repository/dists/stable/InRelease")
sed -i 's/^Origin: nvshare/Origin: others/' "$repository/dists/stable/InRelease"
rm "$repository/dists/stable/Release.gpg"
is_refused "that was changed after it was signed"
printf '%s\n' "$signed" >"$repository/dists/stable/InRelease"

apt_nvshare update
apt_nvshare install nvshare
! journalctl --quiet --boot --output=cat | grep 'Unknown username "nvshare"' || fail "the bus reads its policy before there is the user"
for socket in nvshare.socket nvshare-control.socket nvshare-metrics.socket nvshare-checkpoint.socket nvshare-cdi.service nvshare-cdi.path $unit; do
    case $socket in nvshare-control.socket | nvshare-checkpoint.socket) state=static ;; *) state=disabled ;; esac
    [ "$(systemctl is-enabled $socket)" = $state ] || fail "$socket is $(systemctl is-enabled $socket)"
    [ "$(systemctl is-active $socket)" = inactive ] || fail "$socket is $(systemctl is-active $socket)"
done
[ ! -e /etc/ld.so.preload ] || fail "something is preloaded: $(cat /etc/ld.so.preload)"
nvsharectl --version >/dev/null || fail "nvsharectl"
for page in nvsharectl nvshare.toml nvshare.service org.nvshare.Scheduler1 libnvshare; do
    man -w $page >/dev/null || fail "no man page $page"
done
