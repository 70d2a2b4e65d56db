#!/bin/sh
# Counts driver calls that may wait and that were made on the client's thread or under a lock of the
# library. Also counts places in the library's sources that make such calls and that no test
# reached. Prints the calls and places, and then their number, which should be 0.
#
#     tests/waiting-calls.sh [TEST…]     arguments for nextest that select tests of tests/sharing; default: all
#     CALLS=FILE tests/waiting-calls.sh  runs no tests, and reads the file of a run with LIBNVSHARE_WAITING_CALLS=FILE
#
# The tests use the build of `make check`: only a library with debug assertions counts calls.
set -eu
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
calls=${CALLS:-}
if [ -z "$calls" ]; then
    calls=$(mktemp)
    trap 'rm -f "$calls"' EXIT
    # Places reached by failing tests count too.
    LIBNVSHARE_WAITING_CALLS=$calls $cargo nextest run --workspace --no-fail-fast -E 'binary(sharing)' "$@" >&2 || :
fi

# The places where the library calls a function that waits, except the declarations in driver/mod.rs and the tests in
# driver/waits.rs.
places() {
    sed -n 's/^\(cu[A-Za-z0-9_]*\)\twaits\t.*/\1/p' preload/coverage/waiting.tsv | while read -r name; do
        grep -rnE "(driver::|[ (])$name(_ptds)?\(" preload/src --include='*.rs' |
            grep -vE '^preload/src/driver/(mod|waits)\.rs:|^[^:]*:[0-9]*: *(//|\[cu)' |
            sed 's|^preload/\([^:]*:[0-9]*\):.*|\1|'
    done | sort -u
}

wrong=$(sed -n 's/^wrong\t//p' "$calls" | cut -f1,2 | sort | uniq -c)
reached=$(cut -f3 "$calls" | sort -u)
missed=$(places | while read -r place; do printf '%s\n' "$reached" | grep -qxF "$place" || echo "$place"; done)
[ -z "$wrong" ] || printf 'may wait where nothing may:\n%s\n' "$wrong"
[ -z "$missed" ] || printf 'not reached by a test:\n%s\n' "$missed"
printf '%s\n' "$(($(printf '%s' "$wrong" | grep -c . || :) + $(printf '%s' "$missed" | grep -c . || :)))"
