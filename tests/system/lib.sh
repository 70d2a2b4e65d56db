# shellcheck shell=bash
# Functions that the steps share. Every step sources this file.
set -eu

unit=nvshare.service
bus=(org.nvshare.Scheduler1 /org/nvshare/Scheduler1 org.nvshare.Scheduler1)
here=/opt/nvshare-test
# A user who may use the GPU but is no administrator.
user=alice

# The directory of the simulated machine. All processes of the machine have these variables,
# including the scheduler and the helper. The directory isn't in /tmp or /var/tmp, because the
# services have private /tmp and /var/tmp.
simulated=/srv/gpu
gpu=(CUDA_SIM_DIR=$simulated NVSHARE_DEVICES=$simulated CUDA_SIM_MEMORY="${SIMULATED_MEMORY:-256M}" CUDA_SIM_CONTEXT=4M)

# Makes the services use the simulated machine.
simulate() { # environment…
    for service in $unit nvshare-checkpoint@.service; do
        mkdir -p /etc/systemd/system/$service.d
        printf '[Service]\nEnvironment=%s\nReadWritePaths=%s\n' "$*" $simulated >/etc/systemd/system/$service.d/gpu.conf
    done
    systemctl daemon-reload
}

fail() {
    echo "FAILED: $*" >&2
    systemctl status --no-pager --lines=0 nvshare.socket $unit >&2 || true
    journalctl --no-pager -o short-monotonic -u nvshare.socket -u $unit 2>/dev/null | tail -n 60 >&2
    exit 1
}

. $here/until-true.sh

# Runs a command that must succeed, and compares its output with the expected text. Spaces at the
# ends of lines are ignored.
says() { # expected, command…
    expected=$1
    shift
    said=$("$@" 2>&1) || fail "$*: ended with $?: $said"
    [ "$said" = "$expected" ] || fail "$*: said «$said», not «$expected»"
}

# Runs a command that must fail. The command's output must contain a text.
refused() { # text, command…
    text=$1
    shift
    if said=$("$@" 2>&1); then fail "$*: succeeded: $said"; fi
    [[ $said == *"$text"* ]] || fail "$*: said «$said», which has nothing of «$text»"
}

# Runs apt-get with nvshare's repository only, because the system has no network.
apt_nvshare() {
    apt-get -qq -y -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/nvshare.sources -o Dir::Etc::sourceparts=- "$@" >/tmp/apt.log 2>&1 ||
        { cat /tmp/apt.log >&2; fail "apt-get $*"; }
}

as_user() { runuser -u $user -- "$@"; }
# Runs a command as the user, within the user's service manager and on the session bus. `user@` must
# be running.
in_session() {
    runtime=/run/user/$(id -u $user)
    runuser -u $user -- env XDG_RUNTIME_DIR="$runtime" DBUS_SESSION_BUS_ADDRESS="unix:path=$runtime/bus" "$@"
}

# Runs a program on the simulated GPU under nvshare. The simulated GPU's files are accessible to all
# users, as a GPU is.
program() { (umask 0 && exec env "${gpu[@]}" nvsharectl run -- cuda-program "$@"); }
program_of_user() { (umask 0 && exec runuser -u $user -- env "${gpu[@]}" nvsharectl run -- cuda-program "$@"); }

# Starts two programs, which take turns. The process IDs of both are in $programs.
start_two() {
    programs=()
    for _ in 1 2; do
        program "$@" >/dev/null &
        programs+=($!)
    done
    until_true "two connections to be kept" kept_at_least 2
}

shown() { systemctl show --value -p "$1" $unit; }
kept() { [ "$(shown NFileDescriptorStore)" = "$1" ]; }
# Swap files are kept too.
kept_at_least() { [ "$(shown NFileDescriptorStore)" -ge "$1" ]; }

# `status` passes the output of `nvsharectl --json` through a jq filter. `is_so` succeeds if the
# filter yields true.
status() { nvsharectl --json | jq -r "$1"; }
is_so() { nvsharectl --json | jq -e "$1"; }

# The number of lines with that text in the scheduler's journal since boot.
logged() { journalctl -o cat -u $unit | grep -c -- "$1" || true; }
has_logged() { [ "$(logged "$2")" = "$1" ]; }
