# shellcheck shell=bash
# The scheduler runs in the image for Kubernetes. The scheduler refuses to run in a separate PID
# namespace. In the node's PID namespace, the scheduler identifies processes, and ends on SIGTERM.

"$here/../../kubernetes/image.sh" "$built" "$scratch/image"
import_directory nvshare "$scratch/image"
for program in nvshare-scheduler nvsharectl nvshare-checkpoint nvshare-device-plugin nvshare-agent; do
    [[ $(run nvshare "/usr/bin/$program" --version) == "$program "* ]] || fail "$program does not start in the image"
done

stop_scheduler TERM
scheduler=
mkdir -p "${control%/*}"
in_pod=(--read-only --cap-drop=all --security-opt=no-new-privileges --tmpfs /tmp
    --volume "$sockets:/run/pod" --volume "${control%/*}:/run/nvshare-control")
scheduler_in_pod=(/usr/bin/nvshare-scheduler --in-pod --socket /run/pod/scheduler.sock
    --control-socket /run/nvshare-control/control.sock)
if said=$(run "${in_pod[@]}" nvshare "${scheduler_in_pod[@]}" 2>&1); then fail "it runs in a PID namespace of its own"; fi
[[ $said == *"hostPID: true"* ]] || fail "it does not say what the pod needs: $said"

# podman shares no PID namespace if it creates no control groups. So this step does the runtime's
# work. It creates a separate root, and a control group that is the only group in the scheduler's
# cgroup namespace.
root=$scratch/image
mkdir -p "$root"/{proc,run/pod,run/nvshare-control} "$root$scratch/gpu"
"$here/../cuda-sim/install.sh" "$root/usr/lib/$(uname -m)-linux-gnu" "$programs"
own=/sys/fs/cgroup/nvshare-test/kubepods/besteffort/pod89abcdef-0123-4567-89ab-cdef01234567/$(printf 'a%.0s' {1..64})
mkdir -p "$own"
(
    echo $BASHPID >"$own/cgroup.procs"
    exec unshare --mount --cgroup sh -ec "
        mount --bind $sockets $root/run/pod
        mount --bind ${control%/*} $root/run/nvshare-control
        mount --bind $scratch/gpu $root$scratch/gpu
        mount --rbind /proc $root/proc
        exec env -i ${gpu[*]} $(command -v chroot) $root ${scheduler_in_pod[*]}"
) >"$scratch/pod.log" 2>&1 & pod_scheduler=$!
answers() { ctl get || ! kill -0 $pod_scheduler; }
until_true "the scheduler in its pod" answers
ctl get >/dev/null || fail "the scheduler in its pod ended: $(cat "$scratch/pod.log")"

# A pod's cgroup, as a kubelet makes it.
uid=01234567-89ab-cdef-0123-456789abcdef
member=$(create bookworm "${mix[@]}")
group=/sys/fs/cgroup/nvshare-test/kubepods/besteffort/pod$uid/$member
mkdir -p "$group"
(
    echo $BASHPID >"$group/cgroup.procs"
    exec podman --root "$scratch/store" --runroot "$scratch/run" --tmpdir "$scratch/tmp" --cgroup-manager=cgroupfs \
        --events-backend=file --storage-driver=vfs start --attach "$member"
) >"$scratch/new" 2>"$scratch/new.err" & one=$!
known() {
    ctl --json status | python3 -c "
import json, sys
client, = json.load(sys.stdin)['clients']
assert client['pod'] == '$uid' and client['container'] == '${member:0:12}' and client['pid'] > 0, client"
}
until_true "the program in its pod" known
wait $one || fail "$(cat "$scratch/new" "$scratch/new.err")"
is_right "$scratch/new" || fail "a result is wrong"

kill -TERM $pod_scheduler
wait $pod_scheduler || fail "it ended with $?: $(cat "$scratch/pod.log")"
