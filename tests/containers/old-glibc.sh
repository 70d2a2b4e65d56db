#!/bin/bash
# Builds the simulated GPU and its programs against the glibc of Debian 11, so that they start in
# containers of Debian 11 and of newer systems.
#
#   old-glibc.sh ROOT TARGET_DIR   ROOT: a Debian 11 with libc6-dev; prints the directory of the results
set -eu

[ $# -eq 2 ] || { echo "usage: $0 ROOT TARGET_DIR" >&2; exit 2; }
root=$1 target=$2
machine=$(uname -m)
libc=$target/libc
mkdir -p "$libc"

# Copies the files into one flat directory. The links and linker scripts of libc6-dev contain
# absolute paths, which would lead out of the root.
cp "$root/usr/lib/$machine-linux-gnu"/{crt1.o,Scrt1.o,crti.o,crtn.o,libc_nonshared.a} "$libc"
for library in libc.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libm.so.6 libutil.so.1 libgcc_s.so.1 ld-linux-x86-64.so.2; do
    cp -L "$root/lib/$machine-linux-gnu/$library" "$libc"
done
for name in pthread.so.0 dl.so.2 rt.so.1 m.so.6 util.so.1 gcc_s.so.1; do
    ln -sf "lib$name" "$libc/lib${name%%.*}.so"
done
echo 'GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( ld-linux-x86-64.so.2 ) )' >"$libc/libc.so"

RUSTFLAGS="-C link-arg=-B$libc -C link-arg=-L$libc" CARGO_TARGET_DIR=$target \
    "${CARGO:-cargo}" build --quiet --locked --release --target "$machine-unknown-linux-gnu" \
    -p cuda-sim -p nvml-sim -p cuda-programs >&2
echo "$target/$machine-unknown-linux-gnu/release"
