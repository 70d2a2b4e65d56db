# shellcheck shell=bash
# The scheduler in the image for Kubernetes: not in a PID namespace of its own; in the node's, it knows who is who, and goes
# when it is told to.

"$here/../../kubernetes/image.sh" "$built" "$scratch/image"
import_directory nvshare "$scratch/image"
for program in nvshare-scheduler nvsharectl nvshare-device-plugin nvshare-agent; do
    [[ $(run nvshare "/usr/bin/$program" --version) == "$program "* ]] || fail "$program does not start in the image"
done

stop_scheduler TERM
scheduler=
in_pod=(--read-only --cap-drop=all --security-opt=no-new-privileges --tmpfs /tmp
    --volume "$sockets:/run/pod" --volume "${control%/*}:/run/nvshare-control")
scheduler_in_pod=(/usr/bin/nvshare-scheduler --in-pod --socket /run/pod/scheduler.sock
    --control-socket /run/nvshare-control/control.sock)
if said=$(run "${in_pod[@]}" nvshare "${scheduler_in_pod[@]}" 2>&1); then fail "it runs in a PID namespace of its own"; fi
[[ $said == *"hostPID: true"* ]] || fail "it does not say what the pod needs: $said"

id=$(create --pid=host "${in_pod[@]}" nvshare "${scheduler_in_pod[@]}")
enter "$id" >"$scratch/pod.log" 2>&1 & pod_scheduler=$!
until_true "the scheduler in its pod" ctl get

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

pod kill --signal TERM "$id" >/dev/null
wait $pod_scheduler || fail "it ended with $?: $(cat "$scratch/pod.log")"
