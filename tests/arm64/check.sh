#!/bin/bash
# Runs tests with programs for aarch64: the programs, the library and the simulated driver run under
# qemu-user, and the scheduler runs natively. All tests in tests/guest run, except those in
# `unsupported`, which an emulator cannot run, and tests in tests/sharing that cover each kind of
# call. README.md explains what this shows.
#
# A Debian in target/arm64/root, which later runs use again, contains the compilers and the emulator.
# Needs root, mmdebstrap, and the registries of Debian and of crates.
#
#   check.sh BUILT [TEST…]    BUILT: target/debug, with the programs; TEST: only these tests
set -eu

[ $# -ge 1 ] || { echo "usage: $0 BUILT [TEST…]" >&2; exit 2; }
here=$(realpath "$(dirname "$0")")
tree=$(realpath "$here/../..")
built=$(realpath "$1")
shift
[ "$(id -u)" = 0 ] || { echo "make check-arm64 needs root" >&2; exit 1; }
[ "$(uname -m)" = x86_64 ] || { echo "make check-arm64 emulates aarch64 on x86-64" >&2; exit 1; }
work=$built/../arm64
mkdir -p "$work"
work=$(realpath "$work")
root=$work/root
cargo=${CARGO:-cargo}
cargo_home=$(realpath "${CARGO_HOME:-$HOME/.cargo}")

# Native programs run inside the root too, so its C library must not be older than this machine's.
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-trixie}")
if [ ! -e "$root/.complete" ]; then
    echo "--- a Debian with compilers for aarch64 ($suite)"
    rm -rf --one-file-system "$root"
    mmdebstrap --quiet --variant=apt --architectures=amd64,arm64 --dpkgopt=force-unsafe-io \
        --include=cargo-web,libstd-rust-web-dev:arm64,gcc,libc6-dev,gcc-aarch64-linux-gnu,libc6-dev-arm64-cross,libc6:arm64,libgcc-s1:arm64,qemu-user-static,binutils \
        "$suite" "$root"
    touch "$root/.complete"
fi

# Runs a command inside the root. The source tree and cargo's crates have the same paths as outside.
inside() {
    # shellcheck disable=SC2016
    unshare --mount --pid --fork --kill-child --propagation private sh -euc '
        root=$1 cargo_home=$2 tree=$3 target=$4
        shift 4
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount --rbind /sys "$root/sys"
        for directory in "$tree" "$target" "$cargo_home/registry"; do
            mkdir -p "$root$directory"
            mount --bind "$directory" "$root$directory"
        done
        exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 CARGO_HOME="$cargo_home" \
            chroot "$root" "$@"' sh "$root" "$cargo_home" "$tree" "$(dirname "$work")" "$@"
}

echo "--- libraries and programs for aarch64"
artifacts=$work/artifacts
target=aarch64-unknown-linux-gnu
(cd "$tree" && "$cargo" fetch --quiet --locked && "$cargo" fetch --quiet --locked --manifest-path preload/Cargo.toml)
build() {
    inside env -C "$tree" CARGO_TARGET_DIR="$work" CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC=aarch64-linux-gnu-gcc \
        cargo build --offline --locked --target $target "$@"
}
build -p cuda-sim -p nvml-sim -p cuda-programs
build --manifest-path preload/Cargo.toml
rm -rf "$artifacts"
mkdir "$artifacts"
for name in libnvshare.so libcuda.so libnvidia_ml.so cuda-program; do cp "$work/$target/debug/$name" "$artifacts"; done

# The scheduler is native. The loader skips libraries for other architectures in LD_LIBRARY_PATH, and finds
# these.
for name in libcuda.so:libcuda.so.1 libnvidia_ml.so:libnvidia-ml.so.1; do
    cp "$built/${name%:*}" "$root/usr/lib/x86_64-linux-gnu/${name#*:}"
done

# The kernel starts the emulator for each program of aarch64, until this script ends.
binfmt=/proc/sys/fs/binfmt_misc
handler=nvshare-test-aarch64
mounted=
[ -e $binfmt/register ] || { mount -t binfmt_misc binfmt_misc $binfmt && mounted=1; }
finish() {
    [ ! -e $binfmt/$handler ] || echo -1 >$binfmt/$handler
    [ -z "$mounted" ] || umount $binfmt
}
trap finish EXIT
trap 'exit 130' INT TERM
[ ! -e $binfmt/$handler ] || echo -1 >$binfmt/$handler
# C: with the credentials of the program. F: from this root in every root. P: keeps the program's name.
printf ':%s:M::%s:%s:%s:CFP\n' $handler \
    '\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00' \
    '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff' \
    "$root/usr/bin/qemu-aarch64-static" >$binfmt/register

# Turns, moving memory of each kind, a missing and a new scheduler, limits, and memory that programs share.
sharing='
    turns::programs_of_every_kind_take_turns
    turns::random_allocations_survive_hand_overs
    memory::swapped_memory_is_restored_unchanged
    restart::two_programs_continue_while_the_scheduler_is_repeatedly_restarted
    offline::a_restarted_scheduler_takes_over
    limits::memory_max_is_exact
    limits::the_environment_can_lower_a_programs_limit
    memory_info::cuda_and_nvml_report_the_same_limit_under_a_rule
    ipc::two_programs_share_memory_while_private_memory_is_swapped'

failed=0
for binary in guest sharing; do
    # The selection of `make artifacts`, so that cargo builds no dependency again with other features.
    program=$(cd "$tree" && "$cargo" test --locked --workspace --exclude nvshare-device-plugin --exclude nvshare-agent \
        --test $binary --no-run --message-format=json |
        sed -n '/"kind":\["test"\]/s/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    all=$("$program" --list --format terse | sed -n 's/: test$//p' | sort)
    case $binary in
    guest) tests=$all ;;
    sharing) tests=$(printf '%s\n' $sharing | sort) ;;
    esac
    unsupported=$(sed -n "s/^$binary \([^ ]*\) .*/\1/p" "$here/unsupported" | sort)
    unknown=$(comm -13 <(echo "$all") <(printf '%s\n' "$tests" "$unsupported" | sort -u))
    [ -z "$unknown" ] || { echo "there are no tests $unknown" >&2; exit 1; }
    tests=$(comm -23 <(echo "$tests") <(echo "$unsupported"))
    [ $# = 0 ] || tests=$(comm -12 <(echo "$tests") <(printf '%s\n' "$@" | sort))
    [ -n "$tests" ] || continue
    echo "--- tests/$binary: $(wc -w <<<"$tests") tests; $(wc -w <<<"$unsupported") cannot run with emulated programs"
    # The names are meant to be split.
    # shellcheck disable=SC2086
    inside env -C "$tree" NVSHARE_TEST_OTHER_VERSION="$artifacts" CC=aarch64-linux-gnu-gcc \
        "$program" --test-threads "$(nproc)" --exact $tests || failed=1
done
exit $failed
