#!/bin/bash
# Memory that doesn't fit into RAM is stored in files. The files are in the state directory, or in
# another directory once the sandbox allows it.
. "$(dirname "$0")/../lib.sh"

file=/etc/nvshare/nvshare.toml
cp $file $file.right
swaps_to() { # directory
    printf '[swap]\nmax = "16M"\nfile = "%s"\nfile-max = "2G"\n' "$1" >$file
    systemctl restart $unit || fail "the scheduler does not start with that"
}
# Starts two programs. Together, the programs need more memory than the GPU and the permitted RAM
# can hold.
share() {
    start_two mix --mem 160M --chunks 4 --rounds 6 --gpu-ms 50
    until_true "memory to be in a file" is_so '[.clients[].gpus[]."in-file" // 0] | add > 0'
    for program in "${programs[@]}"; do wait "$program" || fail "a program ended with $?"; done
    until_true "nothing to be kept" kept 0
    # A file has no name, and disappears with its program.
    [ -z "$(ls -A "$1")" ] || fail "there is something left in $1: $(ls -A "$1")"
}

swaps_to /var/lib/nvshare/swap
share /var/lib/nvshare/swap
says "nvshare:nvshare 700" stat -c '%U:%G %a' /var/lib/nvshare/swap

elsewhere=/srv/swap
install -d -o nvshare -g nvshare -m 700 $elsewhere
swaps_to $elsewhere
# If the sandbox forbids the directory, the scheduler logs this, and refuses memory that fits
# nowhere else.
program naps --mem 160M --seconds 600 --pause-ms 50 >/dev/null &
first=$!
until_true "the first to have its memory" is_so '.clients[].gpus[].resident > 100e6'
refused OUT_OF_MEMORY program mix --mem 160M --rounds 1
until_true "the sandbox to be named" has_logged 1 "$elsewhere.*ReadWritePaths= of nvshare.service"
kill -USR1 "$(status '.clients[].pid')"
wait $first || fail "a program ended with $?"
mkdir -p /etc/systemd/system/$unit.d
printf '[Service]\nReadWritePaths=%s\n' $elsewhere >/etc/systemd/system/$unit.d/swap.conf
systemctl daemon-reload
systemctl restart $unit
share $elsewhere

rm /etc/systemd/system/$unit.d/swap.conf
systemctl daemon-reload
rmdir $elsewhere
mv $file.right $file
systemctl restart $unit
systemctl reset-failed $unit
