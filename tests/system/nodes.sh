#!/bin/bash
# Boots a Debian twice, as two hosts with a network, and moves a user's program from one to the other
# with `nvsharectl hibernate --send`: with the network cut at each step, with the other host's disk full,
# and with the other host killed. Then the host is shut down and booted again. Each time, the program
# runs on exactly one host, or its image can be restored, and its results are right.
#
#   nodes.sh ROOT   a system with the packages' repository, openssh-server, rsync and criu. It is copied.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 ROOT" >&2; exit 2; }
. "$(dirname "$0")/hosts.sh"

step() { printf '  %4d s  %s\n' $SECONDS "$*"; }

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
trust
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
