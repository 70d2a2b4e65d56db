#!/bin/bash
# Removes the packages while the library is preloaded and programs run. Then purges them.
. "$(dirname "$0")/../lib.sh"

program mix --mem 16M --rounds 100 --gpu-ms 50 >/dev/null 2>&1 &
program=$!
until_true "a connection" kept 1
apt-get remove -qq -y nvshare libnvshare-preload >/tmp/apt.log 2>&1 || { cat /tmp/apt.log >&2; fail "apt-get remove"; }
[ ! -e /etc/ld.so.preload ] || fail "something is still preloaded: $(cat /etc/ld.so.preload)"
says "" /bin/true
[ "$(systemctl is-active nvshare.socket)" != active ] || fail "the socket is still there"
wait $program || fail "a program that ran meanwhile ended with $?"
[ -e /etc/cdi/nvshare.json ] || fail "the CDI file is gone before it is purged"
[ -e /etc/nvshare/nvshare.toml ] || fail "the configuration is gone before it is purged"
mkdir -p /etc/nvshare/nvshare.toml.d
touch /etc/nvshare/nvshare.toml.d/mine.toml
apt-get purge -qq -y nvshare libnvshare-preload >/tmp/apt.log 2>&1 || { cat /tmp/apt.log >&2; fail "apt-get purge"; }
[ ! -e /etc/nvshare/nvshare.toml ] || fail "the configuration is there after it was purged"
[ -e /etc/nvshare/nvshare.toml.d/mine.toml ] || fail "the administrator's rules are gone"
rm -r /etc/nvshare
rm /etc/apt/sources.list.d/nvshare.sources /etc/apt/keyrings/nvshare.gpg
