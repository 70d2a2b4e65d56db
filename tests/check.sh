#!/bin/sh
# `make check`: everything that can be checked without a GPU. Goes on after a failure, and ends with a summary. What this
# machine lacks is named; on CI ($CI is set) it counts as a failure.
set -u

cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
built=${CARGO_TARGET_DIR:-target}/debug
failed=0
summary=

line() { # verdict, what, seconds or a remark
    summary="$summary$(printf '  %-8s %-44s %s' "$1" "$2" "$3")
"
}

step() { # name, command…
    name=$1
    shift
    printf '\n--- %s\n' "$name"
    began=$(date +%s)
    if "$@"; then verdict=passed; else
        verdict=FAILED
        failed=1
    fi
    line $verdict "$name" "$(($(date +%s) - began)) s"
    [ $verdict = passed ]
}

lacking() { # name, what would provide it
    if [ -n "${CI:-}" ]; then
        failed=1
        line FAILED "$1" "missing: $2"
    else
        line skipped "$1" "missing: $2"
    fi
}

finish() {
    printf '\n%s' "$summary"
    if [ $failed = 0 ]; then echo "make check: all right"; else echo "make check: NOT all right"; fi
    exit $failed
}

# rust-version promises that this cargo builds everything; CI has it, and so finds out.
oldest_cargo() {
    oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    version=$("$cargo" --version | cut -d ' ' -f 2)
    case $version in
    "$oldest" | "$oldest".*) line passed "the oldest cargo" "$version built everything" ;;
    *)
        if [ -n "${CI:-}" ]; then
            failed=1
            line FAILED "the oldest cargo" "rust-version is $oldest, and $version built everything"
        else
            line skipped "the oldest cargo" "not checked here: this is $version"
        fi
        ;;
    esac
}

# libnvshare.so is a workspace of its own.
preload() {
    command=$1
    shift
    "$cargo" "$command" --manifest-path preload/Cargo.toml "$@"
}

man_pages() {
    for page in man/*.[0-9]; do
        said=$(man --warnings -E UTF-8 -l -Tutf8 -Z "$page" 2>&1 >/dev/null)
        [ -z "$said" ] || { printf '%s\n' "$said"; return 1; }
    done
}

end_to_end() {
    tests/cuda-sim/install.sh "$built/simulated" "$built" && "$built/nvshare-demo" --simulated "$built/simulated"
}

# Tests that need more are skipped where it is missing, unless NVSHARE_TEST_ALL is set.
all=${NVSHARE_TEST_ALL:+apparmor_parser libeatmydata libjemalloc perl python3 setpriv tmux}
# shellcheck disable=SC2086
step "what is needed" tests/needs.sh cargo cc libc.a readelf dbus-daemon man $all || finish

if $cargo fmt --version >/dev/null 2>&1; then
    step "formatting" "$cargo" fmt --all --check
    step "formatting of libnvshare.so" preload fmt --check
else
    lacking "formatting" "rustup component add rustfmt"
fi

# First, because tests start what is built here.
step "build of a static nvsharectl" env CARGO="$cargo" tests/static-nvsharectl.sh dev "$built" || finish
# With the tests, because what these need has other features: without them, much would be built twice.
step "build" "$cargo" build --workspace --lib --bins --examples --tests --locked || finish
step "build of libnvshare.so" preload build --locked || finish
oldest_cargo

if $cargo nextest --version >/dev/null 2>&1; then
    # Most tests wait for other processes most of the time.
    step "tests" "$cargo" nextest run --workspace --locked --no-fail-fast --test-threads $(($(nproc) * 2)) ${CI:+--profile ci}
    step "tests of libnvshare.so" preload nextest run --locked --no-fail-fast
else
    step "tests" "$cargo" test --workspace --locked --no-fail-fast --lib --bins --tests
    step "tests of libnvshare.so" preload test --locked
fi
step "examples in the documentation" "$cargo" test --workspace --locked --doc

if $cargo clippy --version >/dev/null 2>&1; then
    step "lints" "$cargo" clippy --workspace --locked --all-targets --quiet -- -D warnings
    step "lints of libnvshare.so" preload clippy --locked --all-targets --quiet -- -D warnings
else
    lacking "lints" "rustup component add clippy"
fi

step "man pages" man_pages
step "demo on a simulated GPU" end_to_end

# Whole systems can be made by root, with tools that few machines have; CI does without.
have() { for tool; do command -v "$tool" >/dev/null || return; done; }
if [ "$(id -u)" = 0 ] && have mmdebstrap systemd-nspawn dpkg-buildpackage dh; then
    step "packages on Debian 12 and 13" make check-system PROGRAMS=
else
    line skipped "packages on Debian 12 and 13" "wants root, mmdebstrap, systemd-nspawn, debhelper: make check-system"
fi
if [ "$(id -u)" = 0 ] && have mmdebstrap podman crun musl-gcc python3; then
    step "containers of Debian 11 and 12" make check-containers
else
    line skipped "containers of Debian 11 and 12" "wants root, mmdebstrap, podman, crun, musl-tools: make check-containers"
fi
# Building Kubernetes takes long, and is done only when it is asked for.
if [ "$(id -u)" = 0 ] && [ -d "${built%/*}/kubernetes/kubernetes" ]; then
    step "pods on a Kubernetes node" make check-kubernetes
else
    line skipped "pods on a Kubernetes node" "wants root and half an hour for the first time: make check-kubernetes"
fi
finish
