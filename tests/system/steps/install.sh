#!/bin/bash
# Installed, nothing runs and nothing is preloaded: that is for the administrator to say.
. "$(dirname "$0")/../lib.sh"

apt-get install -qq -y "$here"/packages/*.deb >/tmp/apt.log 2>&1 || { cat /tmp/apt.log >&2; fail "apt-get install"; }
for socket in nvshare.socket nvshare-control.socket nvshare-metrics.socket nvshare-cdi.service nvshare-cdi.path $unit; do
    case $socket in nvshare-control.socket) state=static ;; *) state=disabled ;; esac
    [ "$(systemctl is-enabled $socket)" = $state ] || fail "$socket is $(systemctl is-enabled $socket)"
    [ "$(systemctl is-active $socket)" = inactive ] || fail "$socket is $(systemctl is-active $socket)"
done
[ ! -e /etc/ld.so.preload ] || fail "something is preloaded: $(cat /etc/ld.so.preload)"
nvsharectl --version >/dev/null || fail "nvsharectl"
for page in nvsharectl nvshare.toml nvshare.service org.nvshare.Scheduler1 libnvshare; do
    man -w $page >/dev/null || fail "no man page $page"
done
