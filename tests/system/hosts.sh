# shellcheck shell=bash
# Boots a Debian twice, as two hosts with a network. nodes.sh and bench/send.sh source this file.
#
# $1 is a system with openssh-server, rsync and criu, and with nvshare or the packages' repository. It is
# copied. The hosts have other GPUs (UUIDs) and other monotonic clocks, but share the kernel and the
# processor. A shared file system for the files of programs is simulated: they are copied before the
# other host restores the program. The seconds that this takes are in /run/copying.

nodes=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-nodes-XXXXXX")
bridge=nvshare-nodes
export SYSTEMD_SECCOMP=0

leader() { pgrep -P "$(cat "$nodes/$1.pid")" | head -n 1; }
inside() { # node, command…
    init=$(leader "$1") || return
    shift
    nsenter --all --target "$init" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb \
        ${SIMULATED_MEMORY:+"SIMULATED_MEMORY=$SIMULATED_MEMORY"} "$@"
}
fail() {
    echo "FAILED: $*" >&2
    for node in a b; do
        echo "--- $node" >&2
        inside $node nvsharectl hibernated >&2 || true
        inside $node journalctl --no-pager -o short-monotonic -u nvshare.service -u nvshare-boot.service 2>/dev/null | tail -n 20 >&2 || true
    done
    exit 1
}
boot() { # node
    # The clocks of a are ahead, as if it had been booted earlier.
    clocks=()
    [ "$1" = b ] || clocks=(unshare --time --monotonic 1000000 --boottime 1000000)
    setsid "${clocks[@]}" systemd-nspawn --quiet --capability=CAP_CHECKPOINT_RESTORE --directory="$nodes/$1" --machine="nvshare-$1" --keep-unit \
        --register=no --network-bridge=$bridge --boot systemd.mask=timers.target </dev/null >"$nodes/$1.console" 2>&1 &
    echo $! >"$nodes/$1.pid"
    for _ in $(seq 600); do
        case $(inside "$1" systemctl is-system-running 2>/dev/null) in running | degraded) booted=1 && break ;; esac
        sleep 0.1
    done
    [ -n "${booted:-}" ] || fail "$1 does not boot: $(cat "$nodes/$1.console")"
    booted=
    inside "$1" ip addr add "$(address "$1")/24" dev host0
    inside "$1" ip link set host0 up
    inside "$1" mount -o remount,rw,bind /proc/sys
    until_true "ssh on $1" inside "$1" systemctl --quiet is-active ssh.service
}
address() { case $1 in a) echo 10.77.0.1 ;; b) echo 10.77.0.2 ;; esac }
ends() { # node: waits until it has shut down
    for _ in $(seq 900); do
        kill -0 "$(cat "$nodes/$1.pid")" 2>/dev/null || return 0
        sleep 0.1
    done
    fail "$1 does not shut down"
}
finish() {
    code=$?
    trap - EXIT INT TERM
    for node in a b; do
        [ ! -e "$nodes/$node.pid" ] || kill -9 "$(leader $node)" "$(cat "$nodes/$node.pid")" 2>/dev/null || true
    done
    ip link del $bridge 2>/dev/null || true
    rm -rf --one-file-system "$nodes"
    exit $code
}
trap finish EXIT INT TERM

. "$(dirname "${BASH_SOURCE[0]}")/../until-true.sh"

ip link add $bridge type bridge
ip link set $bridge up
ssh-keygen -q -t ed25519 -N '' -f "$nodes/id"
for node in a b; do
    cp -a "$1" "$nodes/$node"
    home=$nodes/$node/root
    mkdir -pm 700 "$home/.ssh"
    install -m 600 "$nodes/id.pub" "$home/.ssh/authorized_keys"
    install -m 600 "$nodes/id" "$home/.ssh/id_ed25519"
    printf 'StrictHostKeyChecking accept-new\n' >"$home/.ssh/config"
    printf '%s node-%s\n' "$(address a)" a "$(address b)" b >>"$nodes/$node/etc/hosts"
    echo "node-$node" >"$nodes/$node/etc/hostname"
    : >"$nodes/$node/etc/machine-id"
    boot $node
    inside $node bash -ec '. /opt/nvshare-test/lib.sh
        id $user >/dev/null 2>&1 || useradd --create-home --shell /bin/bash $user
        mkdir -pm 777 $simulated && chmod 777 $simulated
        ldconfig
        simulate "${gpu[@]}"
        if [ -d $here/repository ]; then $here/steps/install.sh; fi
        systemctl --quiet enable --now nvshare.socket'
    echo $node >"$nodes/$node/srv/gpu/host"
done

# ssh that copies the files of programs, and cuts the network at a step (/run/cut: when, the number of
# earlier such commands, a part of the command).
cat >"$nodes/a/usr/local/bin/ssh" <<'EOF'
#!/bin/bash
case $* in *"mv -T"*)
    began=$EPOCHREALTIME
    cd /srv/gpu
    {
        rsync -a --rsh=/usr/bin/ssh processes pids root@node-b:/srv/gpu/
        # The other GPU's files have another state.
        for file in gpu* host-link; do echo "[ -e $file ] || truncate -s $(stat -c %s "$file") $file; chmod 666 $file"; done |
            /usr/bin/ssh root@node-b "cd /srv/gpu; sh"
        rsync -a --rsh=/usr/bin/ssh /home/ root@node-b:/home/
    } >/dev/null 2>&1
    echo "$EPOCHREALTIME $began" | awk '{ print $1 - $2 }' >/run/copying
    ;;
esac
read -r when skip part 2>/dev/null </run/cut || exec /usr/bin/ssh "$@"
[[ $* == *"$part"* ]] || exec /usr/bin/ssh "$@"
if [ "$skip" -gt 0 ]; then
    echo "$when $((skip - 1)) $part" >/run/cut
    exec /usr/bin/ssh "$@"
fi
rm /run/cut
case $when in
    before) ip link set host0 down ;;
    kill) touch /srv/kill ;;
esac
/usr/bin/ssh "$@"
code=$?
[ "$when" != after ] || { ip link set host0 down && code=255; }
exit $code
EOF
chmod 755 "$nodes/a/usr/local/bin/ssh"

number=20000
# Starts a program on a. Its process ID is in $pid.
start() { # arguments of cuda-program
    [ $# -gt 0 ] || set -- naps --mem 16M --seconds 600 --pause-ms 5
    # Process IDs that the other host does not use.
    number=$((number + 500))
    said=$(inside a bash -ec ". /opt/nvshare-test/lib.sh
        umask 0
        echo $number >/proc/sys/kernel/ns_last_pid
        systemd-run --quiet --scope --uid=\$user --slice=user-\$(id -u \$user).slice env \"\${gpu[@]}\" setpriv --inh-caps=-all \
            nvsharectl run --portable=/home/\$user/log -- cuda-program $*")
    pid=$(sed -n 's/.* runs as process \([0-9]*\), .*/\1/p' <<<"$said")
    [ -n "$pid" ] || fail "the program was not started: $said"
    until_true "the program to be served" served a
}
served() { inside "$1" nvsharectl --json | jq -e ".clients[] | select(.pid == $pid and .paused == false) | .gpus[].grants > 0"; }
image() { inside "$1" nvsharectl hibernated --json | jq -r '.[].name'; }
state() { inside "$1" nvsharectl hibernated --json | jq -r '.[].state'; }
send() { # program or image
    said=$(inside a nvsharectl hibernate --send node-b "$1" 2>&1)
}
runs() { inside "$1" test -d "/proc/$pid" 2>/dev/null; }
ends_well() { # node: the program ends there, with right results, and its image is deleted
    runs b && runs a && fail "the program runs twice"
    until_true "the program to be served on $1" served "$1"
    end_program "$1"
}
end_program() { # node: ends the program, whose results are right, and deletes its image
    inside "$1" kill -USR1 "$pid"
    until_true "the program to end" inside "$1" grep -q '"ok":true' /home/alice/log
    [ "$(inside "$1" grep -c '"ok":true' /home/alice/log)" = 1 ] || fail "it has ended twice"
    for node in a b; do
        for name in $(image $node); do inside $node nvsharectl hibernated --delete "$name"; done
        inside $node rm -f /home/alice/log
    done
}
# Lets b restore the images of a.
trust() {
    inside a bash -ec 'key=/var/lib/nvshare-hibernate/key
        ssh root@node-b install -d -m 700 /var/lib/nvshare-hibernate/trusted && scp -q $key root@node-b:/var/lib/nvshare-hibernate/trusted/node-a'
}
