# shellcheck shell=bash
# root in a container cannot replace the socket, has no access to settings, and learns nothing about other
# containers.

before=$(stat -c %i "$sockets/scheduler.sock")
said=$(run bookworm sh -c '
    rm /run/nvshare/scheduler.sock && echo removed
    mv /run/nvshare/scheduler.sock /run/nvshare/old.sock && echo renamed
    touch /run/nvshare/new.sock && echo created
    mount -o remount,rw /run/nvshare && echo remounted
    umount /run/nvshare && echo unmounted
    ls -d /run/nvshare-control && echo control
    echo /tmp/evil.so > /etc/ld.so.preload && echo preloaded
    printf x >> /usr/lib/nvshare/libnvshare.so && echo written
    echo tried' 2>/dev/null)
[ "$said" = tried ] || fail "a container could do this: $said"
[ "$(stat -c %i "$sockets/scheduler.sock")" = "$before" ] || fail "the socket is another one"

ctl_inside=(--volume "$built/static/nvsharectl:/usr/local/bin/nvsharectl:ro")
refused_inside() { # text, option… command…
    text=$1
    shift
    if said=$(run "${ctl_inside[@]}" "$@" 2>&1); then fail "$*: succeeded: $said"; fi
    [[ $said == *"$text"* ]] || fail "$*: said «$said», which has nothing of «$text»"
}
refused_inside "the scheduler is not running" bookworm nvsharectl set time-quantum 9
refused_inside "the scheduler is not running" bookworm nvsharectl status

# Even if an administrator mounts the control socket into a container, the container's root gains no
# access.
mounted=(--volume "${control%/*}:/run/nvshare-control" --env NVSHARE_CONTROL=/run/nvshare-control/control.sock)
refused_inside "may not see other users' activity" "${mounted[@]}" bookworm nvsharectl status
refused_inside "may not change the time quantum" "${mounted[@]}" bookworm nvsharectl set time-quantum 9
refused_inside 'may not change the rule "mine"' "${mounted[@]}" bookworm nvsharectl set-rule mine memory-max=1G
refused_inside "may not acquire a lock" "${mounted[@]}" bookworm nvsharectl lock -- true
[[ $(ctl get) == 'time-quantum = "1s"'* ]] || fail "a setting was changed"
