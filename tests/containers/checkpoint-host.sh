#!/bin/bash
# One action on one of the hosts of checkpoint.sh.
#
#   checkpoint-host.sh BUILT PROGRAMS BASES ACTION ARGUMENT…
set -eu

built=$1 programs=$2 bases=$3
here=$(dirname "$0")
scratch=/srv
. "$here/lib.sh"
# Podman creates no control groups here, so crun must neither save nor restore them. Podman has no
# option for it.
export CONTAINERS_CONF=$scratch/containers.conf
scheduler=$(cat "$scratch/scheduler.pid" 2>/dev/null || true)

start() {
    start_scheduler
    echo "$scheduler" >"$scratch/scheduler.pid"
}

stop() {
    stop_scheduler TERM
    stopped() { ! kill -0 "$scheduler"; }
    until_true "the scheduler to stop" stopped
}

set_up() {
    mkdir -p "$scratch/bin"
    cat >"$scratch/bin/crun" <<'END'
#!/bin/bash
for argument; do
    arguments+=("$argument")
    case $argument in checkpoint | restore) arguments+=(--manage-cgroups-mode=ignore) ;; esac
done
# Podman asks for the options that crun has.
case " $* " in *" --help "*) exec /usr/bin/crun "$@" ;; *) exec /usr/bin/crun "${arguments[@]}" ;; esac
END
    chmod 755 "$scratch/bin/crun"
    printf '[engine.runtimes]\ncrun = ["%s"]\n' "$scratch/bin/crun" >"$CONTAINERS_CONF"
    mkdir -p /etc/cdi
    import bookworm "$bases/bookworm.tar"
    "$here/../cuda-sim/install.sh" "$scratch/driver" "$programs"
    # The UUID of the simulated GPU derives from this file.
    tr -d - </proc/sys/kernel/random/uuid >"$scratch/gpu/host"
    start
    write_cdi_file 2>/dev/null
}

uuid() { status "s['gpus'][0]['uuid']"; }

# Starts a program in a container, whose ID it prints.
begin() {
    id=$(create bookworm cuda-program naps --mem 64M --seconds 600 --pause-ms 5)
    enter_detached "$id" start "$id" >/dev/null
    until_true "the program to be served" served "$id"
    echo "$id"
}

# Starts or restores a container in its control group, which its monitor leaves, as under Podman.
enter_detached() { # id, command of podman…
    group=$(group_of "$1")
    mkdir -p "$group"
    (
        echo $BASHPID >"$group/cgroup.procs"
        pod "${@:2}"
    )
    monitor=$(pod inspect --format '{{.State.ConmonPid}}' "$1")
    echo "$monitor" >"${group%/*}/cgroup.procs"
}
group_of() { echo "/sys/fs/cgroup/nvshare-test/libpod-$1"; }

is_so() { [ "$(status "$1")" = True ]; }
served() { is_so "any(c['container'] == '${1:0:12}' and c['sleep'] == 'awake' and c['gpus'][0]['grants'] > 0 for c in s['clients'])"; }
sleeps() { is_so "any(c['container'] == '${1:0:12}' and c['sleep'] == 'sleeping' for c in s['clients'])"; }

# Saves a container, and deletes it.
save() { # id
    ctl pause "${1:0:12}"
    until_true "the program to sleep" sleeps "$1"
    # CRIU saves no process with a connection to a process outside of the container.
    stop
    # crun freezes the group that it has created. Here, that is the root of the hierarchy.
    # The locks are the simulated GPU's.
    # shellcheck disable=SC2016
    group=$(group_of "$1") unshare --mount bash -euc 'mount --bind "$group" /sys/fs/cgroup && exec "$@"' -- \
        "$0" "$built" "$programs" "$bases" pod container checkpoint --file-locks --export "$scratch/checkpoint.tar" "$1" >/dev/null ||
        fail "it is not saved: $(logged dump)"
    pod rm "$1" >/dev/null
    start
}

restore() { # id
    enter_detached "$1" container restore --file-locks --import "$scratch/checkpoint.tar" >/dev/null ||
        fail "it is not restored: $(logged restore)"
    until_true "the program to be served" served "$1"
    is_so "all(u['uuid'] == s['gpus'][0]['uuid'] for c in s['clients'] for u in c['gpus'])" || fail "it uses another GPU"
}

logged() { # dump or restore
    find "$scratch/store" -name "$1.log" -exec grep Error {} + || true
}

ends_well() { # id
    pod kill --signal USR1 "$1" >/dev/null
    [ "$(pod wait "$1")" = 0 ] || fail "it ended otherwise: $(pod logs "$1" 2>&1)"
    pod logs "$1" >"$scratch/said" 2>&1
    is_right "$scratch/said" || fail "its results are wrong: $(cat "$scratch/said")"
}

clean_up() {
    pod rm --all --force --time 0 || true
    kill -9 "$scheduler" || true
    find /sys/fs/cgroup/nvshare-test -depth -type d -exec rmdir {} + || true
}

"${@:4}"
