#!/bin/sh
# Builds nvsharectl as `make build` does, without need of a loader, and puts it where tests of it look.
#
#   static-nvsharectl.sh PROFILE BUILT
#
# BUILT is where cargo puts that profile; this goes to BUILT/static/nvsharectl, and cargo's own build comes afterwards.
set -eu

"${CARGO:-cargo}" rustc --locked --profile "$1" -p nvshare --bin nvsharectl -- -C target-feature=+crt-static
mkdir -p "$2/static"
# In one step, for those who run the one that is there.
cp "$2/nvsharectl" "$2/static/nvsharectl.new"
mv "$2/static/nvsharectl.new" "$2/static/nvsharectl"
