//! Jobs of several processes, and programs on several GPUs, in virtual time. The figure is the time
//! at which the last program ends, divided by the work of the busier GPU. Simulated clients
//! (`tests/scheduler-sim`) drive the scheduler's state machine, so the figures are the same on
//! every machine.
//!
//! `cargo bench -p nvshare-sched --bench gangs`

use nvshare_sched::{AntiThrash, PolicyName, Settings};
use scheduler_sim::*;
use std::time::Duration;

const QUANTUM: Duration = Duration::from_secs(5);

/// A program on GPU `at` with bursts of 110 ms.
fn busy(at: u64) -> Plan {
    let (gpu, cpu, drain) = (ms(110), Duration::from_micros(100), ms(60));
    Plan { gpus: gpus([at]), demand: 4 * GIB, phases: 100, gpu, cpu, drain, fullness: Some(1000), ..Plan::default() }
}

/// A program on GPU `at` with bursts of 20 ms and pauses.
fn quick(at: u64) -> Plan {
    Plan { gpu: ms(20), cpu: ms(50), phases: 200, drain: ms(5), ..busy(at) }
}

/// A program on both GPUs.
fn both() -> Plan {
    Plan { gpus: gpus([0, 1]), ..busy(0) }
}

/// A rank of a job, with pauses of `cpu` between its bursts.
fn rank(job: u64, at: u64, cpu: Duration) -> Plan {
    Plan { job, gang: job, cpu, ..busy(at) }
}

/// A rank that leaves its GPU idle most of the time.
fn light(job: u64, at: u64) -> Plan {
    Plan { gpu: ms(11), phases: 500, fullness: Some(350), ..rank(job, at, ms(20)) }
}

/// Two jobs of two ranks, which arrive at two GPUs in opposite order.
fn jobs() -> Vec<Plan> {
    vec![rank(1, 0, ms(0)), rank(2, 1, ms(5)), rank(2, 0, ms(0)), rank(1, 1, ms(7))]
}

fn main() {
    let cases = [
        ("two jobs, two programs", [jobs(), vec![busy(0), busy(1)]].concat()),
        ("two jobs, two quick programs", [jobs(), vec![quick(0), quick(1)]].concat()),
        ("two jobs, two programs, two quick ones", [jobs(), vec![busy(0), busy(1), quick(0), quick(1)]].concat()),
        ("one on both GPUs, two programs, two quick ones", vec![both(), busy(0), busy(1), quick(0), quick(1)]),
        (
            "two on both GPUs, one program, three quick ones",
            vec![both(), both(), busy(0), quick(1), quick(1), quick(1)],
        ),
        ("two light jobs", vec![light(1, 0), light(2, 1), light(2, 0), light(1, 1)]),
    ];
    println!("{:>48} {:>8} {:>5} {:>9} {:>9} {:>8}", "", "policy", "mode", "work (s)", "done (s)", "revokes");
    for (name, plans) in cases {
        for policy in [PolicyName::Fcfs, PolicyName::Adaptive] {
            for mode in [AntiThrash::On, AntiThrash::Auto] {
                run(name, &plans, policy, mode);
            }
        }
    }
}

fn run(name: &str, plans: &[Plan], policy: PolicyName, mode: AntiThrash) {
    let mut world = World::new(Settings { policy, ..settings(mode, QUANTUM) }, 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 80 * GIB, 0));
    let start = |n: usize| ms(20 * n as u64);
    let clients: Vec<_> =
        plans.iter().enumerate().map(|(n, plan)| world.add(Plan { start: start(n), ..plan.clone() })).collect();
    let is_done = world.run(Duration::from_secs(600));
    let on = |at| plans.iter().filter(move |plan| plan.gpus.contains(&gpu(at))).map(|plan| plan.gpu * plan.phases);
    let work = [0, 1].map(|at| on(at).sum::<Duration>()).into_iter().max().unwrap_or_default().as_secs_f64();
    let last = clients.iter().map(|client| world.finished(*client)).max().unwrap_or_default().as_secs_f64();
    let last = if is_done { format!("{last:.1}") } else { "never".to_owned() };
    let revokes: usize = clients.iter().map(|client| world.revokes_of(*client).len()).sum();
    let (policy, mode) = (format!("{policy:?}"), format!("{mode:?}"));
    println!("{name:>48} {policy:>8} {mode:>5} {work:>9.1} {last:>9} {revokes:>8}");
}
