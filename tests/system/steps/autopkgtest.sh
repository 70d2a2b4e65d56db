#!/bin/bash
# debian/tests, which Debian runs against installed packages.
. "$(dirname "$0")/../lib.sh"

AUTOPKGTEST_TMP=$(mktemp -d)
export AUTOPKGTEST_TMP
for test in command-line service preload; do
    "$here/autopkgtests/$test" >/tmp/said 2>&1 || fail "the autopkgtest $test ended with $?: $(cat /tmp/said)"
done
rm -r "$AUTOPKGTEST_TMP"
