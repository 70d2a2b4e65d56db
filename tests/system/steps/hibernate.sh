#!/bin/bash
# A user's program is saved to disk by a real CRIU, and restored. Then every process that takes part is
# killed at random moments. Afterwards, the program runs, or its image can be restored, but never both.
#
#   HIBERNATIONS=500 hibernate.sh   the number of hibernations with kills (default: 20)
. "$(dirname "$0")/../lib.sh"

images=/var/lib/nvshare-hibernate
log=/home/$user/hibernate.log
# The container manager gives all processes inheritable capabilities, which users of other systems lack.
# The program is in its user's slice, as after a login.
start() { # arguments of cuda-program
    said=$(umask 0 && exec systemd-run --quiet --scope --uid=$user --slice="user-$(id -u $user).slice" \
        env "${gpu[@]}" setpriv --inh-caps=-all nvsharectl run --portable=$log -- cuda-program "$@")
    pid=$(sed -n 's/.* runs as process \([0-9]*\), .*/\1/p' <<<"$said")
    [ -n "$pid" ] || fail "the program was not started: $said"
    until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
}
lives() { kill -0 "$pid" 2>/dev/null; }
gone() { ! lives; }
state() { sed -n 's/^State:\t\(.\).*/\1/p' "/proc/$pid/status" 2>/dev/null; }
goes_on() { case $(state) in R | S | D) ;; *) return 1 ;; esac; }
image() { nvsharectl hibernated --json | jq -r ".[] | select(.name | startswith(\"cuda-program-$pid-\")) | .name"; }
# Ends the program, which must have right results.
ends_well() {
    kill -USR1 "$pid"
    until_true "the program to end" gone
    [ "$(grep -c '"ok":true' $log)" = 1 ] || fail "the program's results: $(cat $log)"
    rm $log
}

# The scheduler, which was started before, starts no helper where no program was saved. A helper creates
# this directory.
[ ! -e $images ] || fail "a helper was started: $(ls $images)"
start naps --mem 16M --seconds 600 --pause-ms 5
if ! criu --version 2>/dev/null | grep -q '^Version: [4-9]'; then
    refused "CRIU 4.1 or newer is needed" as_user nvsharectl hibernate "$pid"
    until_true "the program to continue" goes_on
    ends_well
    exit 0
fi

# While CRIU works, the scheduler keeps the bytes of the program, which is not connected. If CRIU fails,
# the program connects again and continues.
criu=$(command -v criu)
mv "$criu" "$criu.real"
cat >"$criu" <<'END'
#!/bin/sh
[ "$1" != --version ] || exec echo 'Version: 4.1'
while [ -e /run/criu-works ]; do sleep 0.1; done
exit 1
END
chmod 755 "$criu"
touch /run/criu-works
as_user nvsharectl hibernate "$pid" >/tmp/said 2>&1 &
order=$!
until_true "CRIU to work" pgrep -f 'criu dump'
sleep 1.5
is_so ".clients[] | select(.pid == $pid) | .gpus[].demand > 0" >/dev/null || fail "its bytes are not kept: $(nvsharectl)"
[ "$(state)" = T ] || fail "the program is not stopped"
refused "is being saved to disk" as_user nvsharectl resume "$pid"
refused "is being hibernated already" as_user nvsharectl hibernate "$pid"
rm /run/criu-works
wait $order && fail "a program was saved without CRIU"
grep -q "cannot hibernate process $pid: CRIU fails" /tmp/said || fail "said $(cat /tmp/said)"
# A second attempt waits until the program has connected again.
refused "CRIU fails" as_user nvsharectl hibernate "$pid"
goes_on || fail "the program is $(state)"
until_true "it to run again" is_so ".clients[] | select(.pid == $pid and .paused == false) | .gpus[].\"lock-time\" > 0.2"
mv "$criu.real" "$criu"
[ "$(nvsharectl hibernated)" = "No program is saved." ] || fail "left: $(nvsharectl hibernated)"

continues() {
    goes_on || fail "the program is $(state)"
    until_true "it to run again" is_so ".clients[] | select(.pid == $pid and .paused == false)"
    [ "$(nvsharectl hibernated)" = "No program is saved." ] || fail "left: $(nvsharectl hibernated)"
}
mv "$criu" "$criu.real"
cat >"$criu" <<'END'
#!/bin/bash
[ "$1" != --version ] || exec echo 'Version: 4.1'
[ ! -e /run/criu-fails ] || ulimit -f 8192
while [ -e /run/criu-works ]; do sleep 0.1; done
exec criu.real "$@"
END
chmod 755 "$criu"
# CRIU's writes fail in the middle of a process's memory, while it executes code in the program. It removes
# that code, and the program continues with right results.
first=$pid
touch /run/criu-fails
said=$(umask 0 && exec systemd-run --quiet --scope --uid=$user --slice="user-$(id -u $user).slice" env "${gpu[@]}" setpriv \
    --inh-caps=-all nvsharectl run --portable=$log.second -- bash -c 'python3 -c "import signal
data = bytes(range(256)) * (64 << 10)
signal.signal(signal.SIGUSR2, lambda *_: print(data == bytes(range(256)) * (64 << 10)) or exit())
while True: signal.pause()" & exec cuda-program naps --mem 16M --seconds 600 --pause-ms 5')
pid=$(sed -n 's/.* runs as process \([0-9]*\), .*/\1/p' <<<"$said")
until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
has_memory() { [ "$(awk '/RssAnon/ { print $2 }' "/proc/$(pgrep -P "$pid" -x python3)/status")" -gt 16000 ]; }
until_true "its second process to have memory" has_memory
refused "File too large" nvsharectl hibernate "$pid"
rm /run/criu-fails
continues
pkill -USR2 -P "$pid" -x python3
kill -USR1 "$pid"
until_true "the program to end" gone
ends_right() { [ "$(grep -c '"ok":true\|^True' $log.second)" = 2 ]; }
until_true "its right results" ends_right
rm $log.second
pid=$first

# The helper lets CRIU's writes fail, and does not kill CRIU.
may_not_write() { grep -q '^Max file size  *0  *0 ' "/proc/$(pgrep -f 'criu dump' | head -n 1)/limits"; }
begin() {
    touch /run/criu-works
    nvsharectl hibernate "$pid" >/tmp/said 2>&1 &
    order=$!
    until_true "CRIU to work" pgrep -f 'criu dump'
}
fails() { # why
    until_true "CRIU's writes to fail" may_not_write
    expected=$(nvsharectl hibernated --json | jq ".[] | select(.\"runs-as\" == $pid) | .\"expected-bytes\"")
    [ "${expected:-0}" -gt 0 ] || fail "the image is not listed: $(nvsharectl hibernated)"
    rm /run/criu-works
    wait $order && fail "the program was saved though $1"
    until_true "the program to continue" goes_on
    nothing_is_left() { [ "$(nvsharectl hibernated)" = "No program is saved." ]; }
    until_true "the partial image to be deleted" nothing_is_left
    continues
}
# The disk becomes full while CRIU writes.
mount -t tmpfs -o size=512M,mode=700 tmpfs $images
begin
fallocate -l "$(($(stat -f -c '%a * %S' $images) - (20 << 20)))" $images/filler
fails "the disk is full"
grep -q "is almost full" /tmp/said || fail "said $(cat /tmp/said)"
umount $images
# The caller is interrupted.
begin
kill -TERM $order
fails "its caller has left"
[ "$(logged "cannot save process $pid to disk: it was cancelled")" = 1 ] || fail "the scheduler has not cancelled"
# The caller is interrupted before the program is stopped.
nvsharectl hibernate "$pid" >/tmp/said 2>&1 &
kill -TERM $!
wait $! || true
until_true "nothing to be left" nothing_is_left
continues
mv "$criu.real" "$criu"

refused "may not" runuser -u nobody -- nvsharectl hibernate "$pid"
limits=$(cat "/proc/$pid/limits")
as_user nvsharectl hibernate "$pid" >/tmp/said || fail "its owner may not hibernate it"
lives && fail "the program still runs"
saved=$(image)
grep -q "nvsharectl restore $saved" /tmp/said || fail "said $(cat /tmp/said)"
until_true "the scheduler to forget it" is_so '.clients | length == 0'
[ "$(stat -c %a $images)" = 700 ] || fail "others can enter $images"
[ -z "$(find $images/"$saved"/criu ! -user root)" ] || fail "the image belongs to $user"

# Another user does not see the image.
refused "there is no image" runuser -u nobody -- nvsharectl restore "$saved"
[ "$(runuser -u nobody -- nvsharectl hibernated)" = "No program is saved." ] || fail "nobody sees images"
# A changed image is refused, and so is one whose owner was changed.
pages=$(find $images/"$saved"/criu -name 'pages-*.img' | head -n 1)
cp -a "$pages" /tmp/pages
printf x | dd of="$pages" bs=1 seek=4096 conv=notrunc status=none
refused "is damaged" as_user nvsharectl restore "$saved"
cp -a /tmp/pages "$pages"
cp -a $images/"$saved"/manifest /tmp/manifest
sed -i "s/\"uid\":$(id -u $user)/\"uid\":0/" $images/"$saved"/manifest
refused "this host has not signed it" nvsharectl restore "$saved"
cp -a /tmp/manifest $images/"$saved"/manifest
# What the host lacks is named before anything is started.
mv $log $log.saved
refused "\"$log\" is missing" as_user nvsharectl restore --check "$saved"
mv $log.saved $log
says "$saved can be restored on this host." as_user nvsharectl restore --check "$saved"
refused "Run it as root" as_user nvsharectl hibernate --all
# The log is another file than the one that the program had open, and the user may not write it.
mv $log $log.saved && install -m 644 /dev/null $log
truncate -s "$(stat -c %s $log.saved)" $log
refused "Permission denied" as_user nvsharectl restore "$saved"
mv $log.saved $log

as_user nvsharectl restore "$saved" >/dev/null || fail "its owner may not restore it"
until_true "the program to continue" goes_on
[ -z "$(sed -n 's/^Cap\(Inh\|Prm\|Eff\|Amb\):\t0*$//p' "/proc/$pid/status" | tr -d '\n')" ] || fail "it has capabilities"
grep -Eq '^Cap(Inh|Prm|Eff|Amb):.*[1-9a-f]' "/proc/$pid/status" && fail "the restored program has capabilities"
refused "runs as process $pid" as_user nvsharectl restore "$saved"
until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
[[ $(cat "/proc/$pid/cgroup") == *"/user-$(id -u $user).slice/nvshare-$saved-"*.scope* ]] || fail "it is in $(cat "/proc/$pid/cgroup")"
[ "$(cat "/proc/$pid/limits")" = "$limits" ] || fail "it has other limits: $(cat "/proc/$pid/limits")"
[ "$(sed -n 's/^NoNewPrivs:\t//p' "/proc/$pid/status")" = 1 ] || fail "it may get privileges from set-user-ID programs"
as_user nvsharectl hibernated --delete "$saved" || fail "its owner may not delete it"
# A restored program is saved again.
as_user nvsharectl hibernate "$pid" >/tmp/said || fail "it may not be saved again"
saved=$(image)
as_user nvsharectl restore "$saved" >/dev/null || fail "its owner may not restore it"
until_true "the program to continue" goes_on
until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
ends_well
as_user nvsharectl hibernated --delete "$saved" || fail "its owner may not delete it"
rm -f /tmp/said /tmp/pages /tmp/manifest

# Programs are saved with the process that has started them, which need not use a GPU itself.
both_served() { is_so '[.clients[] | select(.gpus[].grants > 0)] | length == 2'; }
both_end() { [ "$(grep -c '"ok":true' $log)" = 2 ]; }
for rest in 'run exec' '(run exec) & wait'; do
    said=$(umask 0 && exec systemd-run --quiet --scope --uid=$user --slice="user-$(id -u $user).slice" env "${gpu[@]}" setpriv \
        --inh-caps=-all nvsharectl run --portable=$log -- bash -c 'run() { "$@" cuda-program naps --mem 16M --seconds 600 \
        --pause-ms 5; }; (run exec) & '"$rest")
    pid=$(sed -n 's/.* runs as process \([0-9]*\), .*/\1/p' <<<"$said")
    until_true "both programs to be served" both_served
    child=$(pgrep -P "$pid" -x cuda-program | head -n 1)
    refused "may not" runuser -u nobody -- nvsharectl hibernate "$pid"
    as_user nvsharectl hibernate "$pid" >/tmp/said 2>&1 || fail "the two programs are refused: $(cat /tmp/said)"
    saved=$(sed -n 's/.*nvsharectl restore \([^ ]*\).*/\1/p' /tmp/said)
    kill -0 "$child" 2>/dev/null && fail "the second program still runs"
    as_user nvsharectl restore "$saved" >/dev/null || fail "the two programs are not restored"
    until_true "both programs to be served" both_served
    pkill -USR1 -u $user -x cuda-program
    until_true "the programs to end" gone
    until_true "both results" both_end
    rm $log
    as_user nvsharectl hibernated --delete "$saved"
done
refused "neither process $$ nor its descendants are programs" as_user nvsharectl hibernate $$

# The owner of a program controls what CRIU reads from it, and which processes it leaves. An image that
# claims a right is not sealed, and a restore gives no process a right. The stand-in for CRIU does what
# such an owner can do.
mv "$criu" "$criu.real"
cat >"$criu" <<'END'
#!/bin/bash
[ "$1" != --version ] || exec echo 'Version: 4.1'
criu.real "$@" || exit
case $1$(cat /run/forge) in
    dumpimage) for core in core-*.img; do python3 /run/forge.py "$core"; done ;;
    # Has the capabilities of CRIU.
    restoreorphan) setsid sleep 1000 & ;;
esac
END
# Adds the capabilities that CRIU has to those in an image.
cat >/run/forge.py <<'END'
import struct, sys

none = b"".join(bytes([9 + kind << 3, 0]) * 2 for kind in range(3))
more = b"".join(bytes([9 + kind << 3, 0x80, 2]) * 2 for kind in range(3))

def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at

def encode(value):
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])

def forge(message):
    out, at, found = b"", 0, message.find(none)
    while at < len(message):
        if at == found:
            out, at = out + more, at + len(none)
            continue
        start = at
        key, at = varint(message, at)
        if key & 7 == 0:
            _, at = varint(message, at)
        elif key & 7 == 2:
            length, begin = varint(message, at)
            at = begin + length
            if begin <= found < at:
                inner = forge(message[begin:at])
                out += encode(key) + encode(len(inner)) + inner
                continue
        else:
            at += 8 if key & 7 == 1 else 4
        out += message[start:at]
    return out

path = sys.argv[1]
image = open(path, "rb").read()
length, = struct.unpack_from("<I", image, 8)
forged = forge(image[12:12 + length])
if forged != image[12:12 + length]:
    open(path, "wb").write(image[:8] + struct.pack("<I", len(forged)) + forged + image[12 + length:])
    open("/run/forged", "w").write(path)
END
chmod 755 "$criu"
install -m 666 /dev/null /run/forged
left() { pgrep -u $user -x "cuda-program|sleep"; }
echo image >/run/forge
start naps --mem 16M --seconds 600 --pause-ms 5
refused "claims capabilities" as_user nvsharectl hibernate "$pid"
[ -z "$(image)" ] || fail "the forged image is left: $(image)"
until_true "the program to continue" goes_on
until_true "the program to be connected" is_so ".clients[] | select(.pid == $pid and .paused == false)"
ends_well
echo orphan >/run/forge
start naps --mem 16M --seconds 600 --pause-ms 5
as_user nvsharectl hibernate "$pid" >/tmp/said 2>&1 || fail "the program is refused: $(cat /tmp/said)"
saved=$(image)
for _ in 1 2; do
    refused "has capabilities" as_user nvsharectl restore "$saved"
    left && fail "processes of the refused program are left"
done
[ "$(image)" = "$saved" ] || fail "the image is gone"
# Not the same file: the program's own log has no results.
as_user nvsharectl hibernated --delete "$saved"
rm $log
[ -s /run/forged ] || fail "no image was forged"
mv "$criu.real" "$criu"
rm /run/forge /run/forge.py /run/forged

# A restore would take these restrictions from a program.
start_with() { # command…
    said=$(umask 0 && exec env "${gpu[@]}" "$@" nvsharectl run --portable=$log -- \
        cuda-program naps --mem 16M --seconds 600 --pause-ms 5)
    pid=$(sed -n 's/.* runs as process \([0-9]*\), .*/\1/p' <<<"$said")
    until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
}
start_with runuser -u $user -- setpriv --inh-caps=-all
refused "is outside of the slice of its user" nvsharectl hibernate "$pid"
ends_well
start_with systemd-run --quiet --scope --uid=$user --slice="user-$(id -u $user).slice" setpriv --inh-caps=-all --no-new-privs
refused "NoNewPrivs" nvsharectl hibernate "$pid"
ends_well
# A program with a network connection is only saved if the connection may be closed.
python3 -c 'import signal, socket
server = socket.create_server(("127.0.0.1", 4711))
signal.pause()' &
server=$!
listens() { (: <>/dev/tcp/127.0.0.1/4711) 2>/dev/null; }
until_true "the server to listen" listens
said=$(umask 0 && exec systemd-run --quiet --scope --uid=$user --slice="user-$(id -u $user).slice" env "${gpu[@]}" setpriv \
    --inh-caps=-all nvsharectl run --portable=$log -- bash -c 'exec 9<>/dev/tcp/127.0.0.1/4711 &&
    exec cuda-program naps --mem 16M --seconds 600 --pause-ms 5')
pid=$(sed -n 's/.* runs as process \([0-9]*\), .*/\1/p' <<<"$said")
until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
refused "hibernate the program with --close-connections" as_user nvsharectl hibernate "$pid"
if as_user nvsharectl hibernate --close-connections "$pid" >/tmp/said 2>&1; then
    saved=$(image)
    as_user nvsharectl restore "$saved" >/dev/null || fail "a program with a closed connection is not restored"
    until_true "the program to be served" is_so ".clients[] | select(.pid == $pid) | .gpus[].grants > 0"
    ends_well
    as_user nvsharectl hibernated --delete "$saved"
else
    # The kernel is the host's, and may be too new for this system's CRIU.
    grep -q "needs CRIU 4.2 or newer" /tmp/said || fail "said $(cat /tmp/said)"
    until_true "the program to continue" goes_on
    ends_well
fi
kill $server
# A restored program would lack the process that reads its output.
(umask 0 && exec systemd-run --quiet --scope --uid=$user --slice="user-$(id -u $user).slice" env "${gpu[@]}" setpriv \
    --inh-caps=-all nvsharectl run --portable=$log -- bash -c \
    'setsid cuda-program naps --mem 16M --seconds 600 --pause-ms 5 | cat') >/tmp/said
until_true "the program to be served" is_so '[.clients[] | select(.gpus[].grants > 0)] | length == 1'
pid=$(pgrep -u $user -x cuda-program) || fail "no program runs"
refused "shares a pipe (descriptor 1) with process" as_user nvsharectl hibernate "$pid"
until_true "the program to continue" goes_on
kill -USR1 "$pid"
has_result() { grep -q '"ok":true' $log; }
until_true "its result" has_result
rm $log

# systemd would stop to restart a scheduler that is killed this often.
kill_victim() {
    for name in $victim; do pkill -KILL -x "${name:0:15}" || true; done
    systemctl reset-failed $unit nvshare.socket 2>/dev/null || true
}
settled() { [ -z "$(image)" ] && goes_on || { [ -n "$(image)" ] && gone; }; }
saves=0
for _ in $(seq "${HIBERNATIONS:-20}"); do
    start naps --mem 8M --seconds 600 --pause-ms 5
    nvsharectl hibernate "$pid" >/tmp/said 2>&1 &
    order=$!
    sleep "0.$(printf '%03d' $((RANDOM % 500)))"
    # `exe`: a worker that has not become CRIU yet.
    victims=(nvshare-hibernate criu nvshare-scheduler "nvshare-scheduler nvshare-hibernate" exe "exe nvshare-hibernate")
    victim=${victims[RANDOM % 6]}
    kill_victim
    wait $order || true
    # Each list starts a helper, which settles what a killed helper has left.
    until_true "the program or its image after $victim was killed: $(cat /tmp/said)" settled
    saved=$(image)
    if [ -n "$saved" ]; then
        saves=$((saves + 1))
        nvsharectl restore "$saved" >/tmp/said 2>&1 &
        order=$!
        sleep "0.$(printf '%03d' $((RANDOM % 300)))"
        kill_victim
        wait $order || true
        running() { nvsharectl hibernated --json | jq -e ".[] | select(.name == \"$saved\") | .\"runs-as\" == $pid" && goes_on; }
        restored() { running || { nvsharectl restore "$saved" && running; }; }
        until_true "$saved to be restored after $victim was killed: $(cat /tmp/said)" restored
        nvsharectl hibernated --delete "$saved"
    fi
    until_true "the program to be connected" is_so ".clients[] | select(.pid == $pid and .paused == false)"
    ends_well
done
[ "$(nvsharectl hibernated)" = "No program is saved." ] || fail "left: $(nvsharectl hibernated)"
echo "  ${HIBERNATIONS:-20} hibernations with kills: $saves programs were saved and restored, none was lost"
# Kills that never, or always, prevent the image test only half of the cases.
[ "${HIBERNATIONS:-20}" -lt 20 ] || { [ $saves -gt 0 ] && [ $saves -lt "${HIBERNATIONS:-20}" ]; } || fail "$saves programs were saved"
rm -rf /tmp/said $images
