#!/bin/bash
# A newer version is installed while programs run. The socket stays, the new scheduler runs, and no
# program notices the change.
. "$(dirname "$0")/../lib.sh"

nvsharectl set time-quantum 1
inode=$(stat -c %i /run/nvshare/scheduler.sock)
since=$(systemctl show --value -p ActiveEnterTimestampMonotonic nvshare.socket)
connected=$(logged 'cuda-program connected$')
scheduler=$(shown MainPID)
start_two mix --mem 160M --rounds 16 --gpu-ms 50

mv "$here/repository" "$here/repository.older"
mv "$here/repository.newer" "$here/repository"
apt_nvshare update
apt_nvshare upgrade
[ "$(dpkg-query --show --showformat='${Version}' nvshare)" = 999~test ] || fail "the newer version is not installed"
[ "$(shown MainPID)" != "$scheduler" ] || fail "the old scheduler runs still"
for program in "${programs[@]}"; do kill -0 "$program" || fail "a program was too short for this, or has ended"; done
[ "$(stat -c %i /run/nvshare/scheduler.sock)" = "$inode" ] || fail "the socket is another"
[ "$(systemctl show --value -p ActiveEnterTimestampMonotonic nvshare.socket)" = "$since" ] || fail "the socket was restarted"
[ "$(systemctl is-enabled nvshare.socket)" = enabled ] || fail "the socket is no longer enabled"
for program in "${programs[@]}"; do wait "$program" || fail "a program ended with $?"; done
[ "$(logged 'cuda-program connected$')" = $((connected + 2)) ] || fail "programs connected a second time"
nvsharectl reset
