#!/bin/sh
# Checks that another version of nvshare works with this version. Programs share a simulated GPU
# three times. First, they use the other version's library and this scheduler, as in containers and
# in programs that keep running after an upgrade. Second, they use this library and the other
# scheduler. Third, the other scheduler is upgraded to this one while they run.
#
#   compatibility.sh COMMIT BUILT   COMMIT: a tag or any other commit; BUILT: target/debug, with this version's programs
set -eu

[ $# = 2 ] || { echo "usage: $0 COMMIT BUILT" >&2; exit 2; }
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "there is no commit $1" >&2; exit 1; }
built=$(realpath "$2")
directory=$built/../compatibility
mkdir -p "$directory"
directory=$(realpath "$directory")

# The tests cover sharing in general, a restart of the scheduler, a missing scheduler, limits, and
# memory that programs share. The tests check programs' results and the values that programs see,
# but no wording, which may change.
tests='
    test(=turns::programs_of_every_kind_take_turns)
  | test(=turns::random_allocations_survive_hand_overs)
  | test(=memory::swapped_memory_is_restored_unchanged)
  | test(=restart::two_programs_continue_while_the_scheduler_is_repeatedly_restarted)
  | test(=offline::a_restarted_scheduler_takes_over)
  | test(=limits::memory_max_is_exact)
  | test(=limits::the_environment_can_lower_a_programs_limit)
  | test(=memory_info::cuda_and_nvml_report_the_same_limit_under_a_rule)
  | test(=ipc::two_programs_share_memory_while_private_memory_is_swapped)'

echo "--- building $1"
rm -rf "$directory/source" "$directory/library" "$directory/scheduler" "$directory/upgrade"
mkdir "$directory/source" "$directory/library" "$directory/scheduler" "$directory/upgrade"
# tar gives the files the current time (-m). cargo compares times, and would otherwise reuse its
# build of a newer commit.
git archive "$commit" | tar -xm -C "$directory/source"
build() { (cd "$directory/source" && CARGO_TARGET_DIR="$directory/target" "$cargo" build --locked "$@"); }
build -p nvshare --bin nvshare-scheduler
build --manifest-path preload/Cargo.toml
cp "$directory/target/debug/libnvshare.so" "$directory/library"
cp "$directory/target/debug/nvshare-scheduler" "$directory/scheduler"
rm -rf "$directory/source"
# The first scheduler that a test starts is the other version, and all later schedulers are this
# version. Each run has a separate record with the run's number.
cat >"$directory/upgrade/nvshare-scheduler" <<END
#!/bin/sh
case " \$* " in *"/record-1 "*) exec '$directory/scheduler/nvshare-scheduler' "\$@" ;; esac
exec '$built/nvshare-scheduler' "\$@"
END
chmod +x "$directory/upgrade/nvshare-scheduler"

failed=0
for part in library scheduler upgrade; do
    case $part in
        upgrade) echo "--- an upgrade from $1 while programs run" ;;
        *) echo "--- the $part of $1" ;;
    esac
    NVSHARE_TEST_OTHER_VERSION="$directory/$part" "$cargo" nextest run -p nvshare --test sharing --locked --no-fail-fast \
        -E "binary(sharing) & ($tests)" || failed=1
done
exit $failed
