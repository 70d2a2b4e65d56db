//! Jobs of several processes that communicate with a stand-in for NCCL. Two jobs do not fit on the GPUs
//! together. Unless the ranks of a job run together, each job soon holds a GPU that the other job waits
//! for, and both stand still.

use std::time::Duration;

use test_support::jobs::*;
use test_support::machine::*;

fn setup() -> Setup {
    let simulator = vec![("CUDA_SIM_GPUS", RANKS.to_string())];
    Setup { memory: 64 * MIB, simulator, time_quantum: Duration::from_millis(100), ..Setup::default() }
}

#[track_caller]
fn assert_finished(ranks: Vec<Program>) {
    for mut rank in ranks {
        let status = rank.wait();
        assert!(status.success() && rank.stdout() == "done\n", "{status}: {}", rank.stdout());
    }
}

/// Runs two jobs that start in opposite order.
#[track_caller]
fn finish_two_jobs(job: [Job; 2]) {
    let machine = Machine::with_scheduler(setup());
    compile_nccl(&machine, 2);
    let mut ranks = job[0].start(&machine, "one", [0, 1]);
    ranks.extend(job[1].start(&machine, "other", [1, 0]));
    assert_finished(ranks);
    machine.wait_until_empty();
}

#[test]
fn jobs_that_are_linked_to_nccl_need_no_name() {
    let job = |options, init| Job { options, init, ..Job::default() };
    finish_two_jobs([
        job(&["-DLINKED", "-l:libnccl.so.2", "-Wl,-z,now"], "plain"),
        job(&["-DLINKED", "-l:libnccl.so.2", "-Wl,-z,lazy"], "config"),
    ]);
}

#[test]
fn jobs_that_look_up_nccls_functions_need_no_name() {
    finish_two_jobs([
        Job { find: "default", init: "scalable", ..Job::default() },
        Job { options: &[], find: "open", init: "plain", ..Job::default() },
    ]);
}

#[test]
fn jobs_without_nccls_functions_need_a_name() {
    let job = |gang| Job { options: &[], find: "open", init: "none", gang, ..Job::default() };
    finish_two_jobs(["a", "b"].map(|gang| job(Some(gang))));
}

#[test]
fn a_standstill_of_unnamed_jobs_is_explained() {
    let machine = Machine::with_scheduler(setup());
    compile_nccl(&machine, 2);
    // `NVSHARE_GANG=0` turns the recognition of NCCL off.
    let job = Job { gang: Some("0"), rounds: 1_000_000, ..Job::default() };
    let mut ranks = job.start(&machine, "one", [0, 1]);
    ranks.extend(job.start(&machine, "other", [1, 0]));
    wait_for("an explanation", || {
        let why = |rank: &Program| machine.ctl(&["why", &rank.pid().to_string()]);
        ranks.iter().any(|rank| why(rank).contains("the same NVSHARE_GANG")).then_some(())
    });
}

#[test]
fn a_gang_of_nccl_outlives_the_scheduler() {
    let mut machine = Machine::with_manager(setup());
    compile_nccl(&machine, 2);
    let mut ranks = Job { rounds: 1_000_000, ..Job::default() }.start(&machine, "one", [0, 1]);
    let wait_for_gang = |machine: &Machine| {
        wait_for("the gang", || {
            let status = machine.status();
            let is_in_gang =
                |client: &&serde_json::Value| client["gang"].as_array().is_some_and(|gang| gang.len() == 1);
            (status["clients"].as_array()?.iter().filter(is_in_gang).count() == RANKS).then_some(())
        })
    };
    wait_for_gang(&machine);
    machine.stop_scheduler();
    machine.start_scheduler();
    wait_for_gang(&machine);
    machine.kill_scheduler();
    machine.start_scheduler();
    wait_for_gang(&machine);
    ranks.iter_mut().for_each(Program::kill);
}

#[test]
fn nccl_is_found_as_without_nvshare() {
    let machine = Machine::with_scheduler(setup());
    let finds = compile(&machine, "finds.c", "finds", &[]);
    let libraries = [2, 3].map(|version| {
        compile_nccl(&machine, version);
        let (output, nccl) = (format!("libbound-{version}.so"), format!("-l:libnccl.so.{version}"));
        compile(&machine, "bound.c", &output, &["-shared", "-fPIC", &nccl]).display().to_string()
    });
    for libraries in [&[][..], &libraries] {
        let arguments: Vec<&str> = libraries.iter().map(String::as_str).collect();
        let launch = || machine.command(&finds, &arguments).env("NCCL_MEET", &meet(&machine));
        assert_finished(vec![launch().without_nvshare().start(), launch().start()]);
    }
}
