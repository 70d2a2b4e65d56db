#!/bin/bash
# The part of check.sh with private mounts: starts a scheduler, writes the CDI file, and runs the steps.
#
#   inside.sh BUILT PROGRAMS BASES
set -eu

built=$1 programs=$2 bases=$3
here=$(dirname "$0")
scratch=$(mktemp -d "${TMPDIR:-/tmp}/nvshare-containers-XXXXXX")
. "$here/lib.sh"
trap finish EXIT

mount --make-rprivate /
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /etc/cdi && mount -t tmpfs none /etc/cdi

import bookworm "$bases/bookworm.tar"
import bullseye "$bases/bullseye.tar"
import_static
import_musl

"$here/../cuda-sim/install.sh" "$scratch/driver" "$programs"
start_scheduler
write_cdi_file

began=$SECONDS
for step in "$here"/steps/*.sh; do
    echo "--- ${step##*/}"
    # shellcheck source=/dev/null
    . "$step"
done
echo "--- all right ($((SECONDS - began)) s)"
