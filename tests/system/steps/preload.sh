#!/bin/bash
# Turns preloading on and off. Every program loads the library, but the library acts only in CUDA
# programs.
. "$(dirname "$0")/../lib.sh"

list=/etc/ld.so.preload
nvsharectl preload verify >/dev/null || fail "verify ended with $?"
refused "root" as_user nvsharectl preload enable
nvsharectl preload enable >/dev/null || fail "enable ended with $?"
once=$(cat $list)
nvsharectl preload enable >/dev/null || fail "a second enable ended with $?"
says "$once" cat $list
nvsharectl preload status >/dev/null || fail "status ended with $?"

for runner in "" as_user; do
    says "" $runner /bin/true
    $runner grep -q libnvshare /proc/self/maps || fail "it is not loaded"
done
connected=$(logged 'cuda-program connected$')
(umask 0 && env "${gpu[@]}" cuda-program mix --mem 16M --rounds 2 >/dev/null) || fail "a program ended with $?"
until_true "the program to have shared" has_logged $((connected + 1)) 'cuda-program connected$'

# A reinstallation changes nothing.
apt_nvshare install --reinstall nvshare libnvshare-preload
says "$once" cat $list
says "" /bin/true

nvsharectl preload disable >/dev/null || fail "disable ended with $?"
[ ! -e $list ] || fail "$list is still there: $(cat $list)"
# Other entries stay in the list, before and after nvshare's entry.
printf '# by the administrator\n' >$list
nvsharectl preload enable >/dev/null || fail "enable ended with $?"
nvsharectl preload disable >/dev/null || fail "disable ended with $?"
says "# by the administrator" cat $list
rm $list
# Preloading stays on for the next step.
nvsharectl preload enable >/dev/null || fail "enable ended with $?"
