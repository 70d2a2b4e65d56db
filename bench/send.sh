#!/bin/bash
# Moves a program with 2 GiB on a simulated GPU from one host to another, and compares the time with the
# sum of a hibernation, a copy and a restore that are measured alone. Needs root, and what `make build`
# and `cargo build --release -p cuda-sim -p nvml-sim -p cuda-programs` have built.
#
#   send.sh [ROUNDS]   prints a line for each round, and then the median of the ratios
#
# The program's memory has no repeated contents, so that all of it is saved. When it is saved, it waits, and
# has no work on the GPU. (On b, whose clock is behind, the wait lasts until a signal.) A move and a restore
# end when the program runs, and a copy when it is on the disk of the other host.
set -euo pipefail

rounds=${1:-3}
export SIMULATED_MEMORY=3G
repository=$(realpath "$(dirname "$0")/..")
here=$repository/tests/system built=${CARGO_TARGET_DIR:-$repository/target}/release
bases=${built%/*}/system
mkdir -p "$bases"
. "$here/bases.sh"
base trixie-nodes "$include,$for_nodes" >&2
root=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-send-XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT
tar -C "$root" -xf "$bases/trixie-nodes.tar"
prepare "$root"
make --silent -C "$repository" install DESTDIR="$root" >&2
set -- "$root"
. "$here/hosts.sh"
rm -rf --one-file-system "$root"
images=/var/lib/nvshare-hibernate

now() { date +%s.%N; }
calculate() { awk "BEGIN { printf \"%.3f\\n\", $1 }"; }

# $took becomes the seconds of a command.
timed() { # command…
    began=$(now)
    "$@" >"$nodes/said" 2>&1 || fail "$*: $(cat "$nodes/said")"
    took=$(calculate "$(now) - $began")
}

begin() {
    start mix --mem 2G --rounds endless --cpu-ms 15000
    until_true "the first round to end" inside a grep -q 'round 0 is over' /home/alice/log
}

copy() { # image
    inside a bash -ec "rsync --archive --numeric-ids --whole-file '--exclude=/work/*' '--rsh=ssh -l root' $images/$1/ node-b:$images/.incoming-$1/
        /usr/bin/ssh root@node-b 'sync -f $images && mv --no-target-directory $images/.incoming-$1 $images/$1 && sync -f $images'"
}
# The ssh of the hosts copies the files of the simulated GPU when it sees this.
copy_files() { inside a ssh root@node-b "true || mv -T"; }

inside a nvsharectl hibernated >/dev/null
inside b nvsharectl hibernated >/dev/null
trust
for round in $(seq "$rounds"); do
    begin
    timed inside a nvsharectl hibernate "$pid" && hibernate=$took
    saved=$(image a)
    bytes=$(inside a du -sB1 "$images/$saved" | cut -f 1)
    timed copy "$saved" && copy=$took
    copy_files
    timed inside b nvsharectl restore "$saved" && restore=$took
    end_program b

    begin
    timed inside a nvsharectl hibernate --send node-b "$pid"
    send=$(calculate "$took - $(inside a cat /run/copying)")
    end_program b
    ratio=$(calculate "$send / ($hibernate + $copy + $restore)")
    echo "$ratio: sent in $send s; hibernate $hibernate s, copy $copy s, restore $restore s; image of $((bytes >> 20)) MiB"
done | tee "$nodes/rounds"
sort -n "$nodes/rounds" | sed -n "$(((rounds + 1) / 2))p" | cut -d : -f 1
