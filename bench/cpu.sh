#!/bin/sh
# Measures the figures that need no GPU, and writes them to bench/results.json.
#
#     bench/cpu.sh [PART…]    default: all parts that PARTS lists
#
# A part is a benchmark of cargo or one of the functions below. Some need root. The following are long,
# and need an idle machine: `check`, which runs `make check` in a fresh clone, and `cockpit`,
# `hibernations` and `send`, which boot a Debian. JSON=FILE writes to another file.
set -eu
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
json=${JSON:-$PWD/bench/results.json}
PARTS="events growth handover metrics top debug guest exposure hostile soak swap-file eight-jax field aliases simulate waiting crash demo"
LONG="check cockpit hibernations send"

add() { python3 bench/gpu/figures.py --add "$json" "$1" "$2" "$3" "$4"; }

# Prints the seconds of processor time that a command takes. Its output goes to standard error.
processor_time() {
    python3 - "$@" <<'END'
import resource, subprocess, sys

subprocess.run(sys.argv[1:], stdout=sys.stderr, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"{used.ru_utime + used.ru_stime:.1f}")
END
}

# Clones the checked-out commit.
clone() {
    rm -rf target/figures
    git clone --quiet . target/figures
}

# Builds what the benchmarks start.
programs() {
    $cargo build --release --locked --manifest-path preload/Cargo.toml
    $cargo build --release --locked -p nvshare -p nvshare-checkpoint -p cuda-programs -p cuda-sim -p nvml-sim
}

simulate() {
    $cargo build --release --locked --bin nvsharectl
    for _ in 1 2; do
        begin=$(date +%s.%N)
        target/release/nvsharectl simulate tests/scenarios/ten-thousand.toml >&2
        echo "$(date +%s.%N) $begin"
    done | awk '{ s = $1 - $2; if (s > most) most = s } END { printf "%.2f\n", most }' >target/simulate
    add simulate-10000-clients-1000-gpus "$(cat target/simulate)" s "the slower of two runs, release build"
}

aliases() {
    programs
    tests/cuda-sim/install.sh target/simulator target/release
    gpu=$PWD/target/simulated-gpu
    LD_LIBRARY_PATH=$PWD/target/simulator CUDA_SIM_DIR=$gpu NVSHARE_DEVICES=$gpu \
        python3 bench/gpu/queues.py --programs target/release --cases aliases --json "$json"
}

waiting() {
    export RUSTC_WORKSPACE_WRAPPER=clippy-driver # the same build as `make check`
    make artifacts >&2
    note="all tests of sharing, with a library that has debug assertions"
    add waiting-calls-under-locks "$(tests/waiting-calls.sh | tail -n 1)" count "$note"
}

crash() {
    seconds=${NVSHARE_CRASH_SECONDS:-900}
    export RUSTC_WORKSPACE_WRAPPER=clippy-driver NVSHARE_CRASH_SECONDS="$seconds" NVSHARE_TEST_SEED=random
    make artifacts >&2
    $cargo nextest run --workspace --profile long --no-capture -E 'binary(crash) and test(random_kills)' 2>&1 |
        tee /dev/stderr | sed -n 's/^[0-9.]* s: {\(.*\)}$/\1/p' | tail -n 1 >target/crash
    # "holder killed": 12, "finished": 30, …
    count=$(tr ',' '\n' <target/crash | awk -F: '/killed|told to end/ { n += $2 } END { print n + 0 }')
    add crash-kills-survived "$count" count "on the simulated GPU in $seconds s: $(tr -d '"' <target/crash)"
}

demo() {
    clone
    (cd target/figures && $cargo fetch --locked >&2 && $cargo fetch --locked --manifest-path preload/Cargo.toml >&2)
    seconds=$(processor_time make -C target/figures demo-programs)
    add demo-build-cpu "$seconds" s "make demo-programs in a fresh clone, crates downloaded before"
}

check() {
    clone
    (cd target/figures && $cargo fetch --locked >&2 && $cargo fetch --locked --manifest-path preload/Cargo.toml >&2)
    begin=$(date +%s)
    NVSHARE_TEST_ALL=1 CARGO_INCREMENTAL=0 make -C target/figures check >&2
    minutes=$(echo "$begin $(date +%s)" | awk '{ printf "%.1f\n", ($2 - $1) / 60 }')
    add check-minutes-two-cores "$minutes" min "make check in a fresh clone, crates downloaded before, on $(nproc) processors"
}

cockpit() {
    note="page and scheduler, beside one viewer, five times 30 s, minus the same page standing still"
    CPU=1 SUITES=trixie FRESH=no make check-system 2>&1 | tee /dev/stderr | sed -n 's/.*"sum": \([0-9.]*\).*/\1/p' | tail -n 1 >target/cockpit
    add cockpit-100-clients-cpu "$(cat target/cockpit)" percent "$note"
}

hibernations() {
    HIBERNATIONS=500 SUITES=trixie FRESH=no make check-system 2>&1 | tee /dev/stderr | grep '500 hibernations with kills' >target/kills
    add hibernate-kills-lost 0 count "$(sed 's/^ *//' target/kills)" # the step fails if one is lost
}

send() {
    programs
    make build STATIC= >&2
    bench/send.sh 5 | tee /dev/stderr >target/send
    note="medians of 5 rounds; simulated GPU, two booted Debian on one machine; contents cannot be compressed"
    add send-2GiB-over-copy "$(tail -n 1 target/send)" ratio "$note"
}

benches="events growth handover metrics top debug guest exposure hostile soak swap-file eight-jax field"
for part in ${*:-$PARTS}; do
    echo "--- $part" >&2
    case " $benches " in
    *" $part "*)
        programs
        $cargo bench --locked --bench "$part" -- --json "$json"
        ;;
    *)
        case " $PARTS $LONG " in
        *" $part "*) "$part" ;;
        *)
            echo "unknown part $part. The parts are: $PARTS $LONG" >&2
            exit 1
            ;;
        esac
        ;;
    esac
done
