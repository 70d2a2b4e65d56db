#!/bin/bash
# Runs in a booted system with Cockpit and Chromium. Installs the packages, starts programs on two
# simulated GPUs, and looks at the page as several users.
#
#   cockpit.sh [PICTURES]   PICTURES: a directory for pictures of the page
#   cockpit.sh cpu          measures the processor time of the page with 100 programs instead
. "$(dirname "$0")/lib.sh"

useradd --create-home --shell /bin/bash $user
useradd --create-home --shell /bin/bash bob
useradd --create-home --shell /bin/bash --groups sudo carol
for name in $user bob carol; do echo "$name:secret-$name" | chpasswd; done
mkdir -m 777 "$simulated"
ldconfig
gpu=("${gpu[@]}" CUDA_SIM_GPUS=2)
simulate "${gpu[@]}"

if ! command -v nvshare-scheduler >/dev/null; then
    install -m 644 $here/repository/nvshare.sources /etc/apt/sources.list.d/
    install -m 644 $here/repository/nvshare.gpg /etc/apt/keyrings/
    apt_nvshare update
    apt_nvshare install cockpit-nvshare
fi
gpasswd --add bob nvshare >/dev/null
systemctl start cockpit.socket

if [ "${1:-}" = cpu ]; then
    simulate "${gpu[@]}" CUDA_SIM_MEMORY=8G
    python3 $here/cockpit/cpu.py --user $user || fail "the measurement"
    exit
fi
python3 $here/cockpit/page.py --user $user "$@" || fail "the page"
