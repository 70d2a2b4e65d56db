#!/bin/bash
# Runs in the node. Starts Kubernetes, and runs the steps.
#
#   inside.sh STEP...
set -eu

. /steps/lib.sh
trap 'finish' EXIT

start_node
import_images
for step; do
    say "${step##*/}"
    . "$step"
done
say "all right"
