#!/bin/sh
# Prints the ten slowest tests and the time of all tests together, from the report of nextest's last
# run.
#
#   slowest.sh REPORT   REPORT: …/nextest/PROFILE/junit.xml in cargo's target directory
set -eu

# One line for each test: the test's time, the test program, and the test's name.
tests=$(sed -n 's/.*<testcase name="\([^"]*\)" classname="\([^"]*\)".* time="\([0-9.]*\)".*/\3 \2 \1/p' "$1")
echo "the ten slowest tests:"
printf '%s\n' "$tests" | sort -rn | head -n 10 | while read -r time program name; do
    printf '  %6.1f s  %s %s\n' "$time" "$program" "$name"
done
printf '%s\n' "$tests" | awk '{ sum += $1 } END { printf "%d tests took %.0f s together\n", NR, sum }'
