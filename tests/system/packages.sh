#!/bin/sh
# Tests how dpkg handles the packages: installation, upgrade, failed upgrade, removal, failed
# removal, and purge. Tests each of them with and without the library preloaded in every program.
# Uses a Debian system without booting or changing it. Needs root and systemd-nspawn.
#
#   mmdebstrap --variant=apt --include=systemd,dbus,man-db,passwd bookworm DIR
#   make deb && make deb VERSION=0.1.1~test
#   tests/system/packages.sh DIR PACKAGES       PACKAGES: target/packages; the oldest and the newest there are used
set -eu

if [ $# = 2 ]; then
    exec systemd-nspawn --quiet --directory="$1" --volatile=overlay --private-network --register=no --keep-unit --as-pid2 --pipe \
        --bind-ro="$(realpath "$2"):/packages" --bind-ro="$(realpath "$0"):/packages.sh" \
        --setenv=LC_ALL=C.UTF-8 /bin/sh /packages.sh
fi
[ -d /packages ] || { echo "usage: $0 DIR PACKAGES" >&2; exit 2; }

versions=$(for deb in /packages/nvshare_*.deb; do dpkg-deb -f "$deb" Version; done | sort -V)
old=$(echo "$versions" | head -n 1)
new=$(echo "$versions" | tail -n 1)
[ "$old" != "$new" ] || { echo "two versions are needed, and there is $versions" >&2; exit 2; }

list=/etc/ld.so.preload
work=$(mktemp -d)
log=$work/log

fail() {
    echo "FAILED: $*" >&2
    tail -n 30 "$log" >&2
    exit 1
}
is() { # what, seen, expected
    [ "$2" = "$3" ] || fail "$1 is '$2' instead of '$3'"
}
quietly() { "$@" >"$log" 2>&1 || fail "$*"; }
in_vain() { ! "$@" >"$log" 2>&1 || fail "this succeeds: $*"; }
step() { echo "--- $*"; }

debs() { echo /packages/nvshare_"$1"_*.deb /packages/libnvshare-preload_"$1"_*.deb; }
# The names are meant to be split.
# shellcheck disable=SC2046
install() { quietly dpkg --install $(debs "$1") && quietly dpkg --configure --pending; }
installed() { dpkg-query --show --showformat='${db:Status-Abbrev}${Version}' "$1" 2>/dev/null || true; }
preloading() { nvsharectl preload status >/dev/null; }
clean() { # No program complains about a library that it loads.
    is "what a program says" "$(/bin/true 2>&1)" ""
}
# Creates a package that differs from another package in some files.
remade() { # deb, name, a command that changes the tree
    dpkg-deb --raw-extract "$1" "$work/$2"
    (cd "$work/$2" && eval "$3")
    dpkg-deb --build "$work/$2" "$work/$2.deb" >/dev/null
}
# Lists all files except logs, caches, dpkg's own lists and other programs' backups.
everything() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /var/log -o -path /var/cache -o -path /tmp \
        -o -path /packages -o -path /var/lib/dpkg -o -path '/etc/*-' -o -path /etc/.pwd.lock \) -prune \
        -o ! -path /run -printf '%p %y %m %U:%G %l\n' | sort
    find /etc /usr /opt /var/lib/systemd -xdev -type f ! -path '/etc/*-' -exec sha256sum {} + | sort
    find /run -mindepth 1 ! -path '/run/host*' -printf '%p %y %m\n' | sort
}

# These commands create files that are created only once.
quietly ldconfig
quietly journalctl --update-catalog
quietly systemd-sysusers
mkdir -p /run/mount
everything >"$work/before"

step "installing starts, enables and preloads nothing, and says what is next"
# The names are meant to be split.
# shellcheck disable=SC2046
quietly dpkg --install $(debs "$old")
grep -q 'systemctl enable --now nvshare.socket' "$log" || fail "no next step is named"
is "nvshare" "$(installed nvshare)" "ii $old"
[ ! -e $list ] || fail "there is a $list"
is "the socket" "$(systemctl is-enabled nvshare.socket 2>&1)" disabled
getent passwd nvshare >/dev/null || fail "there is no user nvshare"
is "its directory" "$(stat -c %U:%a /run/nvshare)" nvshare:755
nvshare-scheduler --check-config >/dev/null || fail "the configuration file is wrong"
LD_PRELOAD=libnvshare.so clean
# If a package can be installed for several architectures, the names of its files contain the
# architecture.
for script in /var/lib/dpkg/info/nvshare.postinst /var/lib/dpkg/info/libnvshare-preload:*.postinst; do
    quietly $script configure "$old"
    quietly $script configure
done

step "an upgrade preloads nothing"
install "$new"
is "nvshare" "$(installed nvshare)" "ii $new"
[ ! -e $list ] || fail "there is a $list"

step "an upgrade leaves the preloading alone"
# The first library is any harmless library. The second has a name that begins like the name of
# nvshare's library.
for other in libother.so libnvshare.so.no; do cp /lib/*-linux-gnu/libresolv.so.2 /usr/lib/$other; done
printf '# Another library.\n/usr/lib/libother.so\n' >$list
cp $list "$work/list"
quietly nvsharectl preload enable
before=$(stat -c '%i %y' $list)
install "$old"
install "$new"
install "$new"
is "the file" "$(stat -c '%i %y' $list)" "$before"
preloading || fail "it is off"
clean

step "an upgrade that fails leaves everything as it was"
remade "$(echo /packages/libnvshare-preload_"$old"_*.deb)" stuck "printf '#!/bin/sh\nexit 1\n' >DEBIAN/preinst; chmod 755 DEBIAN/preinst"
in_vain dpkg --install "$work/stuck.deb"
is "the library" "$(installed libnvshare-preload)" "ii $new"
is "the file" "$(stat -c '%i %y' $list)" "$before"

step "a removal that fails puts the entry back"
# Creates a package that replaces other packages, and that fails after dpkg has begun to remove
# them.
for others in nvshare 'nvshare, libnvshare-preload'; do
    mkdir -p "$work/rival/DEBIAN"
    cat >"$work/rival/DEBIAN/control" <<EOF
Package: rival
Version: 1
Architecture: all
Maintainer: Nobody <nobody@nvshare.invalid>
Conflicts: $others
Replaces: $others
Description: a rival
EOF
    printf '#!/bin/sh\n! nvsharectl preload status && exit 1\n' >"$work/rival/DEBIAN/preinst"
    chmod 755 "$work/rival/DEBIAN/preinst"
    dpkg-deb --build "$work/rival" "$work/rival.deb" >/dev/null
    in_vain dpkg --auto-deconfigure --install "$work/rival.deb"
    grep -q '^off: ' "$log" || fail "it was not off in between"
    quietly dpkg --configure --pending
    is "nvshare" "$(installed nvshare)" "ii $new"
    is "the library" "$(installed libnvshare-preload)" "ii $new"
    preloading || fail "it is off"
done
mount --bind $list $list
in_vain dpkg --remove nvshare
umount $list
is "nvshare" "$(installed nvshare)" "ri $new"
preloading || fail "it is off"
clean

step "a library that fails its trial is not left in force"
remade "$(echo /packages/libnvshare-preload_"$new"_*.deb)" damaged "echo damaged | tee usr/lib/*/libnvshare.so >/dev/null"
mkdir -p /etc/systemd/system/a.service.d
printf '[Service]\nEnvironment="LD_PRELOAD=libnvshare.so"\n' >/etc/systemd/system/a.service.d/zz-nvshare-preload.conf
quietly dpkg --install --force-depends "$work/damaged.deb"
! preloading || fail "it is on"
[ ! -e /etc/systemd/system/a.service.d ] || fail "it is on for a service"
clean
install "$new"
! preloading || fail "it is on again"

step "removal ends the preloading first, and leaves what others preload"
quietly nvsharectl preload enable
quietly dpkg --remove nvshare
cmp $list "$work/list" || fail "$list is not as it was before"
clean
printf '/usr/lib/libother.so:/usr/lib/x86_64-linux-gnu/libnvshare.so libnvshare.so\n/usr/lib/libnvshare.so.no\nlibnvshare.so\n' >$list
quietly dpkg --remove libnvshare-preload
is "the file" "$(cat $list)" "$(printf '/usr/lib/libother.so: \n/usr/lib/libnvshare.so.no')"
rm $list /usr/lib/libother.so /usr/lib/libnvshare.so.no
install "$new"
quietly nvsharectl preload enable
# Creates a service that preloads the library, and a service that also has another change.
for unit in a b; do
    mkdir -p /etc/systemd/system/$unit.service.d
    printf '[Service]\nEnvironment="LD_PRELOAD=libnvshare.so"\n' >/etc/systemd/system/$unit.service.d/zz-nvshare-preload.conf
done
touch /etc/systemd/system/b.service.d/override.conf
quietly dpkg --force-depends --remove libnvshare-preload
is "what is left" "$(echo /etc/systemd/system/?.service.d/*)" /etc/systemd/system/b.service.d/override.conf
rm -r /etc/systemd/system/b.service.d
[ ! -e $list ] || fail "there is a $list"
clean
install "$new"

step "purging leaves nothing but what the administrator made"
quietly nvsharectl preload enable
quietly systemctl enable nvshare.service nvshare.socket
quietly usermod --append --groups nvshare nobody
quietly gpasswd --delete nobody nvshare
mkdir -p /var/lib/nvshare/swap /etc/cdi && touch /etc/cdi/nvshare.json /var/lib/nvshare/settings.toml /etc/nvshare/nvshare.toml.dpkg-old /run/nvshare/lock
chown -R nvshare: /var/lib/nvshare
# The administrator has files in the package's directories.
mkdir -p /var/lib/nvshare/backup && touch /var/lib/nvshare/backup/settings.toml /etc/cdi/other.json
mkdir -p /etc/nvshare/nvshare.toml.d && touch /etc/nvshare/nvshare.toml.d/lab.toml
quietly dpkg --purge nvshare libnvshare-preload
is "what is left in /etc/nvshare" "$(find /etc/nvshare -type f)" /etc/nvshare/nvshare.toml.d/lab.toml
is "what is left of its state" "$(find /var/lib/nvshare -printf '%U %P\n' | sort | paste -sd,)" "0 ,0 backup,0 backup/settings.toml"
is "what is left in /etc/cdi" "$(ls /etc/cdi)" other.json
rm -r /etc/nvshare /var/lib/nvshare /etc/cdi
everything >"$work/after"
diff "$work/before" "$work/after" >"$log" || fail "something is left, or missing"
for file in /var/lib/dpkg/info/*nvshare*; do [ ! -e "$file" ] || fail "dpkg knows $file"; done
echo "packages.sh: all right"
