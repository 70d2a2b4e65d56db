# shellcheck shell=bash
# Functions that prepare systems. check.sh and bench/send.sh source this file, and set $here (this
# directory), $bases (where base systems are kept) and $built (the simulated GPU and its programs).

# The systems have no network, so the packages' dependencies are preinstalled. The steps need the
# packages after adduser.
include=systemd,systemd-sysv,dbus,dbus-user-session,polkitd,libpam-systemd,libc6,adduser
include=$include,procps,diffutils,man-db,bash-completion,jq,gamemode-daemon,python3
# Packages of hosts that programs move between.
for_nodes=criu,openssh-server,openssh-client,rsync,iproute2

# Creates the base system of a suite, unless a base system with these packages already exists.
base() { # name, packages
    base=$bases/$1.tar
    [ ! -e "$base" ] || [ "$(cat "$base.packages" 2>/dev/null)" != "$2" ] || return 0
    echo "--- $1: making a base system"
    mmdebstrap --quiet --format=tar --variant=apt --include="$2" "${1%%-*}" "$base.new"
    mv "$base.new" "$base"
    echo "$2" >"$base.packages"
}

# Puts the simulated GPU, the steps and the files in $packages into a system.
prepare() { # root
    # NVIDIA's packages put their libraries in this directory.
    "$here/../cuda-sim/install.sh" "$1/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || cc -print-multiarch)" "$built"
    install "$built/cuda-program" "$1/usr/local/bin"
    mkdir -p "$1/opt/nvshare-test"
    cp -r "$here"/*.sh "$here/../until-true.sh" "$here/steps" "$here/recipes" "$here/cockpit" "$1/opt/nvshare-test"
    cp -r "$here/../../docs/recipes" "$1/opt/nvshare-test/pages"
    cp -r "$here/../../debian/tests" "$1/opt/nvshare-test/autopkgtests"
}
