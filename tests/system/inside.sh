#!/bin/bash
# Runs in a booted system. Installs the packages, tests them, removes them, and compares the file
# system with its earlier state.
. "$(dirname "$0")/lib.sh"

# The rest of the system changes these files by itself.
elsewhere=(/proc /sys /dev /tmp /var/tmp "$simulated" "$here" /var/log /var/cache /var/lib/apt /var/lib/dpkg /var/lib/systemd/random-seed
    /var/lib/systemd/timers /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /run/systemd /run/udev /run/log /run/lock /run/user)

files() { # find's action…
    skip=()
    for path in "${elsewhere[@]}"; do skip+=(-path "$path" -o); done
    find / -xdev \( "${skip[@]}" -false \) -prune -o "$@"
}

# Lists the packages, and the kind, mode, owner and contents of every file.
snapshot() {
    dpkg-query -W
    files -printf '%p %y %m %U:%G %l\n' | sort
    files -type f -print0 | sort -z | xargs -0 md5sum
}

useradd --create-home --shell /bin/bash $user
mkdir -m 777 "$simulated"
ldconfig
simulate "${gpu[@]}"
snapshot >/tmp/before

for step in install autopkgtest activation settings lock release-driver metrics cdi share sleep hibernate migrate swap-file accounting games \
    recipes restart upgrade preload-service preload remove; do
    began=$(date +%s%N)
    "$here/steps/$step.sh" || { echo "step $step failed" >&2; exit 1; }
    printf '  %-12s %5d ms\n' $step $((($(date +%s%N) - began) / 1000000))
done

snapshot >/tmp/after
diff /tmp/before /tmp/after || { echo "FAILED: that is left, or gone" >&2; exit 1; }
