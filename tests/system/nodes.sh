#!/bin/bash
# Boots a Debian twice, as two hosts with a network, and moves a user's program from one to the other
# with `nvsharectl hibernate --send`: with the network cut at each step, with the other host's disk full,
# and with the other host killed. Then the host is shut down and booted again. Each time, the program
# runs on exactly one host, or its image can be restored, and its results are right.
#
#   nodes.sh ROOT   a system with the packages' repository, openssh-server, rsync and criu. It is copied.
#
# The hosts have other GPUs (UUIDs) and other monotonic clocks, but share the kernel and the processor.
# A shared file system for the files of programs is simulated: they are copied before the other host
# restores the program.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 ROOT" >&2; exit 2; }
nodes=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-nodes-XXXXXX")
bridge=nvshare-nodes
export SYSTEMD_SECCOMP=0

leader() { pgrep -P "$(cat "$nodes/$1.pid")" | head -n 1; }
inside() { # node, command…
    init=$(leader "$1") || return
    shift
    nsenter --all --target "$init" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb "$@"
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

until_true() { # what, command…
    what=$1
    shift
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    fail "waited in vain for $what"
}

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

# ssh that cuts the network at a step (/run/cut: when, the number of earlier such commands, a part of the command).
cat >"$nodes/a/usr/local/bin/ssh" <<'EOF'
#!/bin/bash
case $* in *"mv -T"*)
    cd /srv/gpu
    {
        rsync -a --rsh=/usr/bin/ssh processes pids root@node-b:/srv/gpu/
        # The other GPU's files have another state.
        for file in gpu* host-link; do echo "[ -e $file ] || truncate -s $(stat -c %s "$file") $file; chmod 666 $file"; done |
            /usr/bin/ssh root@node-b "cd /srv/gpu; sh"
        rsync -a --rsh=/usr/bin/ssh /home/ root@node-b:/home/
    } >/dev/null 2>&1
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

step() { printf '  %4d s  %s\n' $SECONDS "$*"; }
number=20000
start() {
    # Process IDs that the other host does not use.
    number=$((number + 500))
    said=$(inside a bash -ec ". /opt/nvshare-test/lib.sh
        umask 0
        echo $number >/proc/sys/kernel/ns_last_pid
        systemd-run --quiet --scope --uid=\$user --slice=user-\$(id -u \$user).slice env \"\${gpu[@]}\" setpriv --inh-caps=-all \
            nvsharectl run --portable=/home/\$user/log -- cuda-program naps --mem 16M --seconds 600 --pause-ms 5")
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
    inside "$1" kill -USR1 "$pid"
    until_true "the program to end" inside "$1" grep -q '"ok":true' /home/alice/log
    [ "$(inside "$1" grep -c '"ok":true' /home/alice/log)" = 1 ] || fail "it has ended twice"
    for node in a b; do
        for name in $(image $node); do inside $node nvsharectl hibernated --delete "$name"; done
        inside $node rm -f /home/alice/log
    done
}

# ---- hosts that do not trust each other, and other obstacles, before anything stops
step "hosts that do not trust each other, and other obstacles, before anything stops"
start
send "$pid" && fail "an image was sent to a host that does not trust this one"
[[ $said == *"does not trust this host's images"* ]] || fail "said $said"
runs a || fail "the program was stopped"
# A host with the same key is this host, under another name.
inside a bash -ec 'dir=/var/lib/nvshare-hibernate
    ssh root@node-b mv $dir/key $dir/own && scp -q $dir/key root@node-b:$dir/key'
send "$pid" && fail "an image was sent to a host with the same key"
[[ $said == *"node-b is this host"* ]] || fail "said $said"
inside a ssh root@node-b mv /var/lib/nvshare-hibernate/own /var/lib/nvshare-hibernate/key
inside a bash -ec 'key=/var/lib/nvshare-hibernate/key
    ssh root@node-b install -d -m 700 /var/lib/nvshare-hibernate/trusted && scp -q $key root@node-b:/var/lib/nvshare-hibernate/trusted/node-a'
said=$(inside a runuser -u alice -- nvsharectl hibernate --send node-b "$pid" 2>&1) && fail "a user sends images"
[[ $said == *"Run it as root"* ]] || fail "said $said"

# ---- without trouble
step "without trouble"
send "$pid" || fail "cannot send: $said"
[ -z "$(image a)" ] && [ "$(state b)" = running ] || fail "a has $(state a), b has $(state b)"
uuids() { inside $1 nvsharectl --json | jq -r '.gpus[].uuid'; }
[ "$(uuids a)" != "$(uuids b)" ] || fail "both hosts have the same GPU"
on_own_gpu() { [ "$(inside b nvsharectl --json | jq -r '.clients[].gpus[].uuid')" = "$(uuids b)" ]; }
until_true "the program to be on the GPU of b" on_own_gpu
ends_well b

# ---- the network is cut
step "the network is cut"
for cut in "before 0 --server" "before 1 --server" "before 0 mv" "after 0 mv" "before 0 restore" "after 0 restore"; do
    step "  $cut"
    start
    inside a bash -c "echo $cut >/run/cut"
    send "$pid" && fail "$cut: it was sent without a network: $said"
    saved=$(image a)
    [ -n "$saved" ] || fail "$cut: the image is gone: $said"
    [[ $said == *"hibernate --send node-b $saved"* ]] || fail "$cut: does not say how to continue: $said"
    case $cut in
        "before 0 --server") [ "$(state a)" = saved ] || fail "$cut: $(state a): $said" ;;
        *)
            [ "$(state a)" = sent ] || fail "$cut: $(state a): $said"
            # It may run there.
            if said=$(inside a nvsharectl restore "$saved" 2>&1); then fail "$cut: it was restored: $said"; fi
            [[ $said == *"was sent to node-b"* ]] || fail "$cut: said $said"
            ;;
    esac
    case $cut in "after 0 restore") runs b || fail "$cut: it does not run there" ;; *) runs b && fail "$cut: it runs there" ;; esac
    inside a ip link set host0 up
    send "$saved" || fail "$cut: cannot continue: $said"
    [ -z "$(image a)" ] && [ "$(state b)" = running ] || fail "$cut: a has $(state a), b has $(state b)"
    ends_well b
done

# ---- the other host is lost: only an order restores the image here
step "the other host is lost: only an order restores the image here"
start
inside a bash -c "echo before 0 restore >/run/cut"
send "$pid" && fail "it was sent without a network"
saved=$(image a)
inside a nvsharectl restore --sent "$saved" >/dev/null || fail "an order does not restore it"
inside a ip link set host0 up
send "$saved" && fail "a program that runs here was sent: $said"
for name in $(image b); do inside b nvsharectl hibernated --delete "$name"; done
ends_well a

# ---- the other host's disk is full
step "the other host's disk is full"
inside b bash -ec 'cd /var/lib/nvshare-hibernate && mkdir /run/full && mount -t tmpfs -o size=256k,mode=700 full /run/full &&
    cp -a key trusted /run/full && mount --bind /run/full .'
start
send "$pid" && fail "it was sent to a full disk: $said"
saved=$(image a)
[ "$(state a)" = saved ] && [ -z "$(image b)" ] || fail "full: a has $(state a), b has $(state b): $said"
[ -z "$(inside b find /var/lib/nvshare-hibernate -name '.incoming*')" ] || fail "a part of the copy is left"
inside b bash -c 'umount /var/lib/nvshare-hibernate && umount /run/full && rmdir /run/full'
send "$saved" || fail "cannot continue: $said"
ends_well b

# ---- the other host lacks something
step "the other host lacks something"
start
inside b usermod --append --groups users alice
inside a nvsharectl hibernate "$pid" >/dev/null
saved=$(image a)
inside b usermod --login bob alice
send "$saved" && fail "another user of b got the program"
[[ $said == *"has the number of another user here"* ]] || fail "said $said"
[ "$(state a)" = saved ] && [ -z "$(image b)" ] || fail "lacks: a has $(state a), b has $(state b): $said"
inside b usermod --login alice bob
inside a nvsharectl restore --check "$saved" >/dev/null || fail "a lacks something"
inside a nvsharectl restore "$saved" >/dev/null || fail "it is not restored on a"
ends_well a

# ---- the other host is killed while it restores the program
step "the other host is killed while it restores the program"
for delay in 0.1 0.5 1; do
    start
    inside a bash -c "echo kill 0 restore >/run/cut"
    (
        until [ -e "$nodes/a/srv/kill" ]; do sleep 0.01; done
        sleep $delay
        kill -9 "$(leader b)"
    ) &
    send "$pid" || true
    wait $! || true
    rm "$nodes/a/srv/kill"
    until_true "b to be gone" sh -c "! kill -0 $(cat "$nodes/b.pid") 2>/dev/null"
    boot b
    inside b systemctl start nvshare.socket
    for saved in $(image a); do send "$saved" || fail "killed after $delay s: cannot continue: $said"; done
    [ -z "$(image a)" ] || fail "killed after $delay s: a has $(state a): $said"
    # If it ran there, it has ended with its host, and is restored from its image.
    saved=$(image b)
    [ "$(state b)" = running ] || inside b nvsharectl restore "$saved" >/dev/null || fail "killed after $delay s: b has $(state b)"
    ends_well b
done

# ---- another boot
step "another boot"
inside a bash -ec 'mkdir -p /etc/systemd/logind.conf.d && printf "[Login]\nInhibitDelayMaxSec=60\n" >/etc/systemd/logind.conf.d/nvshare.conf
    systemctl restart systemd-logind && systemctl --quiet enable --now nvshare-boot.service'
until_true "shutdowns to be delayed" inside a sh -c 'systemd-inhibit --list | grep -q nvshare'
start
inside a systemctl poweroff
ends a
boot a
until_true "the program to be restored" served a
[ "$(state a)" = running ] || fail "it was not restored from its image: $(state a)"
ends_well a
[ ! -s "$nodes/a/var/lib/nvshare-hibernate/all" ] || fail "it would be restored again"

# ---- all programs, in a time that suffices for none
step "all programs, in a time that suffices for none"
start
said=$(inside a nvsharectl hibernate --all --within 1s 2>&1) && fail "all programs are saved in no time"
[[ $said == *"and 1 s are left"* ]] || fail "said $said"
inside a nvsharectl hibernate --all --within 2min >/dev/null || fail "not all programs are saved"
runs a && fail "it still runs"
inside a nvsharectl restore --all >/dev/null || fail "not all programs are restored"
ends_well a
step "all right"
