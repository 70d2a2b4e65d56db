#!/bin/sh
# `make check` runs all checks that need no GPU. It continues after a failure, and ends with a
# summary. The summary lists tools that this machine lacks. On CI ($CI is set), a missing tool is a
# failure.
set -u

cd "$(dirname "$0")/.."
# The usual soft limit on open files. Tests must not depend on a higher limit of this machine.
ulimit -Sn 1024
cargo=${CARGO:-cargo}
built=${CARGO_TARGET_DIR:-target}/debug
started=$(date +%s)
failed=0
summary=
# Results of the steps that run in parallel with the tests.
scratch=$(mktemp -d)
beside=
trap 'kill $beside 2>/dev/null; rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

line() { # verdict, what, seconds or a remark
    [ "$1" != FAILED ] || failed=1
    summary="$summary$(printf '  %-8s %-44s %s' "$1" "$2" "$3")
"
}

step() { # name, command…
    name=$1
    shift
    printf '\n--- %s\n' "$name"
    began=$(date +%s)
    if "$@"; then verdict=passed; else verdict=FAILED; fi
    line $verdict "$name" "$(($(date +%s) - began)) s"
    [ $verdict = passed ]
}

# Runs a step in parallel with the tests, on processor time that the tests do not use. If the step
# fails, its output is shown at the end.
quietly() { # name, command…
    name=$1
    shift
    began=$(date +%s)
    if "$@" >"$scratch/output" 2>&1; then verdict=passed; else
        verdict=FAILED
        { printf '\n--- %s\n' "$name" && cat "$scratch/output"; } >>"$scratch/failures"
    fi
    printf '%s\t%s\t%s s\n' $verdict "$name" "$(($(date +%s) - began))" >>"$scratch/lines"
}

# Waits for the steps that run in parallel with the tests.
collect() {
    wait "$beside"
    beside=
    [ ! -e "$scratch/failures" ] || cat "$scratch/failures"
    while IFS='	' read -r verdict name time; do line "$verdict" "$name" "$time"; done <"$scratch/lines"
}

lacking() { # name, what would provide it
    if [ -n "${CI:-}" ]; then line FAILED "$1" "missing: $2"; else line skipped "$1" "missing: $2"; fi
}

finish() {
    printf '\n%s' "$summary"
    if [ $failed = 0 ]; then verdict='all right'; else verdict='NOT all right'; fi
    echo "make check: $verdict after $(($(date +%s) - started)) s"
    exit $failed
}

# rust-version in Cargo.toml promises that this version of cargo builds everything. CI uses this
# version, and thus checks the promise.
oldest_cargo() {
    oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    version=$("$cargo" --version | cut -d ' ' -f 2)
    case $version in
    "$oldest" | "$oldest".*) line passed "the oldest cargo" "$version built everything" ;;
    *)
        if [ -n "${CI:-}" ]; then
            line FAILED "the oldest cargo" "rust-version is $oldest, and $version built everything"
        else
            line skipped "the oldest cargo" "not checked here: this is $version"
        fi
        ;;
    esac
}

# libnvshare.so is a separate workspace.
preload='--manifest-path preload/Cargo.toml'

man_pages() {
    for page in man/*.[0-9]; do
        said=$(man --warnings -E UTF-8 -l -Tutf8 -Z "$page" 2>&1 >/dev/null)
        [ -z "$said" ] || { printf '%s\n' "$said"; return 1; }
    done
}

end_to_end() {
    tests/cuda-sim/install.sh "$built/simulated" "$built" && "$built/nvshare-demo" --simulated "$built/simulated"
}

# Tests that need more tools are skipped if a tool is missing, unless NVSHARE_TEST_ALL is set.
all=${NVSHARE_TEST_ALL:+apparmor_parser libeatmydata libjemalloc perl python3 setpriv tmux}
# shellcheck disable=SC2086
step "what is needed" tests/needs.sh cargo cc libc.a readelf dbus-daemon man $all || finish

cargo_has() { "$cargo" "$1" --version >/dev/null 2>&1; }
if cargo_has fmt; then
    step "formatting" "$cargo" fmt --all --check
    step "formatting of libnvshare.so" "$cargo" fmt $preload --check
else
    lacking "formatting" "rustup component add rustfmt"
fi

# Clippy is rustc with more lints, so it builds everything. A separate run would compile all code
# and dependencies again. Clippy's warnings don't fail the build, so the tests run anyway. When
# cargo has nothing left to build, it repeats the warnings.
lints() { # what to build
    said=$("$cargo" build --quiet "$@" 2>&1) && [ -z "$said" ] || { printf '%s\n' "$said"; return 1; }
}
if cargo_has clippy; then export RUSTC_WORKSPACE_WRAPPER=clippy-driver; else lacking "lints" "rustup component add clippy"; fi

# The build includes the tests, because their dependencies have other features. A build without the
# tests would compile many crates twice.
everything='--workspace --all-targets --locked'
# shellcheck disable=SC2086
step "build" "$cargo" build $everything || finish
step "build of libnvshare.so" "$cargo" build $preload --all-targets --locked || finish
if cargo_has clippy; then
    # shellcheck disable=SC2086
    step "lints" lints $everything
    step "lints of libnvshare.so" lints $preload --all-targets --locked
fi
step "static nvsharectl" tests/static-nvsharectl.sh "$built" || finish
oldest_cargo

# Runs each unit test of the library in its own process, as nextest does.
library_tests() {
    # shellcheck disable=SC2086
    "$cargo" test $preload --locked --tests --no-run && "$cargo" test $preload --locked --test '*' || return 1
    # shellcheck disable=SC2086
    "$cargo" test $preload --locked --lib -- --list --format terse | sed -n 's/: test$//p' >"$scratch/unit-tests"
    [ -s "$scratch/unit-tests" ] || return 1
    while read -r test; do
        # shellcheck disable=SC2086
        "$cargo" test --quiet $preload --locked --lib -- --exact "$test" </dev/null || return 1
    done <"$scratch/unit-tests"
}

# Lists the built tests for nextest before the lints run. The lints lock the build directory, so
# cargo could not list the tests in parallel.
if cargo_has nextest; then
    "$cargo" metadata --locked --format-version 1 >"$scratch/metadata.json" &&
        "$cargo" nextest list --workspace --locked --list-type binaries-only --message-format json >"$scratch/binaries.json" || finish
    step "tests of libnvshare.so" "$cargo" nextest run $preload --locked --no-fail-fast
fi

{
    quietly "man pages" man_pages
    quietly "examples in the documentation" nice -n 19 "$cargo" test --workspace --locked --doc
} &
beside=$!

if cargo_has nextest; then
    profile=default
    [ -z "${CI:-}" ] || profile=ci
    # Most tests wait for other processes most of the time, so more tests run than there are
    # processors.
    step "tests" "$cargo" nextest run --cargo-metadata "$scratch/metadata.json" --binaries-metadata "$scratch/binaries.json" \
        --no-fail-fast --profile "$profile" --test-threads $(($(nproc) * 3))
    tests/slowest.sh "${built%/*}/nextest/$profile/junit.xml"
else
    step "tests" "$cargo" test --workspace --locked --no-fail-fast --lib --bins --tests
    step "tests of libnvshare.so" library_tests
fi
step "demo on a simulated GPU" end_to_end
collect

# Tests of whole systems need root, and tools that few machines have. CI skips them.
have() { for tool; do command -v "$tool" >/dev/null || return; done; }
if [ "$(id -u)" = 0 ] && have mmdebstrap systemd-nspawn dpkg-buildpackage dh; then
    # The demo and the check in fresh systems would take several times longer than all other steps
    # together.
    step "packages on Debian 12 and 13" env -u RUSTC_WORKSPACE_WRAPPER make check-system PROGRAMS= FRESH=no
else
    line skipped "packages on Debian 12 and 13" "wants root, mmdebstrap, systemd-nspawn, debhelper: make check-system"
fi
if [ "$(id -u)" = 0 ] && have mmdebstrap podman crun musl-gcc python3; then
    step "containers of Debian 11 and 12" make check-containers
else
    line skipped "containers of Debian 11 and 12" "wants root, mmdebstrap, podman, crun, musl-tools: make check-containers"
fi
# Building Kubernetes takes long, so only make check-kubernetes builds it.
if [ "$(id -u)" = 0 ] && [ -d "${built%/*}/kubernetes/kubernetes" ]; then
    step "pods on a Kubernetes node" make check-kubernetes
else
    line skipped "pods on a Kubernetes node" "wants root and half an hour for the first time: make check-kubernetes"
fi
finish
