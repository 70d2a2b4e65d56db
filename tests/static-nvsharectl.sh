#!/bin/sh
# Links nvsharectl statically, as `make build` does, and puts it where its tests look for it.
#
#   static-nvsharectl.sh BUILT
#
# BUILT is where cargo has built the workspace: target/debug. Only rustc is run, for the program
# itself. cargo would compile the library again, because it chooses other features for one package
# than for all packages.
set -eu

cd "$(dirname "$0")/.."
built=$1
for feature in $(sed -n 's/^default = \[\(.*\)\]$/\1/p' Cargo.toml | tr -d '",'); do
    set -- "$@" --cfg "feature=\"$feature\""
done
shift
mkdir -p "$built/static"
"${RUSTC:-rustc}" --edition 2024 src/bin/nvsharectl.rs -o "$built/static/nvsharectl.new" "$@" \
    -C target-feature=+crt-static --extern "nvshare=$built/libnvshare.rlib" -L "dependency=$built/deps"
# The rename is atomic, because the old file may be running.
mv "$built/static/nvsharectl.new" "$built/static/nvsharectl"
