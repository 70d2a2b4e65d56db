#!/bin/bash
# Two programs share a GPU that is too small for both. The scheduler is restarted, killed, given a
# wrong configuration file, and stopped until its watchdog expires. Both programs succeed, and
# neither program connects a second time.
. "$(dirname "$0")/../lib.sh"

resumed=$(logged '^2 of 2 programs continue')
connected=$(logged 'cuda-program connected$')
went_on() { has_logged $((resumed + $1)) '^2 of 2 programs continue' && [ "$(systemctl is-active $unit)" = active ]; }

nvsharectl set time-quantum 1
nvsharectl set anti-thrash on
start_two mix --mem 160M --rounds 40 --gpu-ms 50

systemctl restart $unit
until_true "both to go on after a restart" went_on 1
nvsharectl get | grep -q 'time-quantum = "1s"' || fail "a changed setting is lost"

# A short timeout, so that both programs still run when the watchdog expires.
dropin=/run/systemd/system/$unit.d
mkdir -p $dropin
printf '[Service]\nWatchdogSec=10s\n' >$dropin/watchdog.conf
systemctl daemon-reload
systemctl kill --signal=KILL --kill-who=main $unit
until_true "both to go on after SIGKILL" went_on 2
kept 2 || fail "$(shown NFileDescriptorStore) connections are kept"

file=/etc/nvshare/nvshare.toml
cp $file $file.right
printf 'time-quantum = "soon"\n' >$file
if systemctl reload $unit 2>/dev/null; then fail "a wrong file is taken"; fi
journalctl -x -u $unit | grep -q 'Subject: The configuration file has a mistake' || fail "the catalog explains nothing"
mv $file.right $file
systemctl reload $unit || fail "a right file is refused"

kill -STOP "$(shown MainPID)"
until_true "the watchdog to bark" sh -c "journalctl -u $unit | grep -q 'Watchdog timeout'"
until_true "both to go on after that" went_on 3

for program in "${programs[@]}"; do wait "$program" || fail "a program ended with $?"; done
until_true "no connection to be kept" kept 0
[ "$(logged 'cuda-program connected$')" = $((connected + 2)) ] || fail "programs connected a second time"
nvsharectl reset
rm -r $dropin
systemctl daemon-reload
