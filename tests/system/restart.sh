#!/bin/bash
# In a booted system where nvshare is installed: two programs share a GPU that is too small for both, while the scheduler is
# restarted, killed, given a wrong configuration file, and stopped until its watchdog barks. Both end right, and neither
# connects a second time.
#
#   restart.sh GPU COMMAND…   GPU: what the programs and the service need in their environment, as VAR=value words
set -eu

environment=$1
shift
unit=nvshare.service

fail() {
    echo "FAILED: $*" >&2
    systemctl status --no-pager $unit >&2 || true
    journalctl --no-pager -o short-monotonic -u $unit | tail -n 60 >&2
    exit 1
}

until_true() { # what, command…
    what=$1
    shift
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    fail "waited in vain for $what"
}

shown() { systemctl show --value -p "$1" $unit; }
kept() { [ "$(shown NFileDescriptorStore)" = "$1" ]; }
went_on() { [ "$(journalctl -o cat -u $unit | grep -c '^2 of 2 programs go on')" = "$1" ] && systemctl is-active $unit; }

mkdir -p /run/systemd/system/$unit.d
printf '[Service]\nEnvironment=%s\n' "$environment" >/run/systemd/system/$unit.d/gpu.conf
systemctl daemon-reload
systemctl start nvshare.socket nvshare-control.socket

# A connection starts the service.
programs=()
for _ in 1 2; do
    # The words are meant to be split.
    # shellcheck disable=SC2086
    env $environment nvsharectl run -- "$@" &
    programs+=($!)
done
until_true "two connections to be kept" kept 2
nvsharectl set time-quantum 1
nvsharectl set anti-thrash on

systemctl restart $unit
until_true "both to go on after a restart" went_on 1
nvsharectl get | grep -q 'time-quantum = "1s"' || fail "a changed setting is lost"

systemctl kill --signal=KILL --kill-who=main $unit
until_true "both to go on after SIGKILL" went_on 2
kept 2 || fail "$(shown NFileDescriptorStore) connections are kept"

printf 'time-quantum = "soon"\n' >/etc/nvshare/nvshare.toml.wrong
cp /etc/nvshare/nvshare.toml /etc/nvshare/nvshare.toml.right
cp /etc/nvshare/nvshare.toml.wrong /etc/nvshare/nvshare.toml
if systemctl reload $unit 2>/dev/null; then fail "a wrong file is taken"; fi
journalctl -x -u $unit | grep -q 'Subject: The configuration file has a mistake' || fail "the catalog explains nothing"
cp /etc/nvshare/nvshare.toml.right /etc/nvshare/nvshare.toml
rm /etc/nvshare/nvshare.toml.right /etc/nvshare/nvshare.toml.wrong
systemctl reload $unit || fail "a right file is refused"

kill -STOP "$(shown MainPID)"
until_true "the watchdog to bark" sh -c "journalctl -u $unit | grep -q 'Watchdog timeout'"
until_true "both to go on after that" went_on 3

for program in "${programs[@]}"; do wait "$program" || fail "a program ended with $?"; done
until_true "no connection to be kept" kept 0
connected=$(journalctl -o cat -u $unit | grep -c ' connected$')
[ "$connected" = 2 ] || fail "there were $connected connections instead of 2"
nvsharectl reset
echo "restart.sh: all right"
