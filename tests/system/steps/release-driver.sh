#!/bin/bash
# On an administrator's order, the scheduler releases the driver and names the programs that still
# use the driver. The scheduler opens NVML again for the next program.
. "$(dirname "$0")/../lib.sh"

# While NVML is open, it keeps the driver's device file open.
uses_driver() { readlink "/proc/$(shown MainPID)"/fd/* | grep -q '/nvidiactl$'; }

program persistent --seconds 600 >/dev/null 2>&1 &
program=$!
until_true "a program" sh -c 'nvsharectl --json | grep -q cuda-program'
until_true "NVML to be used" uses_driver
refused "may not" as_user nvsharectl release-driver
refused "cuda-program (process" nvsharectl release-driver --for 300
pkill -x cuda-program
wait $program || true
until_true "the program to be gone" kept 0

nvsharectl release-driver --for 300 | grep -q "has released the driver for 300 s" || fail "$(nvsharectl release-driver 2>&1)"
! uses_driver || fail "the driver is still used"
nvsharectl | grep -q Simulated || fail "the GPU is no longer shown: $(nvsharectl 2>&1)"
! uses_driver || fail "showing the GPU uses the driver"

program persistent --seconds 600 >/dev/null 2>&1 &
program=$!
until_true "NVML to be used for the next program" uses_driver
pkill -x cuda-program
wait $program || true
until_true "nothing to be kept" kept 0
