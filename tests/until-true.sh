# shellcheck shell=bash
# A wait that tests in shell scripts share. The script that sources this file has a function `fail`.

# Waits until a command succeeds. The deadline only ends a hang.
until_true() { # what, command…
    local what=$1
    shift
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    fail "waited in vain for $what"
}
