//! Simulates a described mix of programs in virtual time. The simulator runs the scheduler's own
//! state machine (`nvshare::scheduler::Machine`). Each program's client
//! (`nvshare_simulated_client::Client`) answers the state machine like `libnvshare.so`. The
//! simulator uses no GPU, daemon or clock, so the same file always gives the same figures.
//!
//! - [`scenario`]: the simulated GPUs, settings and jobs; `schema`: the file format.
//! - `plans`: the arrival time and the GPUs of each program.
//! - `parts`: splits a scenario into independent parts, each simulated in a separate world.
//! - [`policies`]: the compared policies.
//! - `world`: the machine, the programs and the time.
//! - `queue`: future events.
//! - `program`: one program and its client.
//! - `engines`: the work of GPUs.
//! - `link`: copies between GPUs and the host.
//! - `context`: state that all programs share.
//! - `drawing`: records a timeline.
//! - `serial`: the baseline of the comparison.
//! - [`report`]: the figures, which `statistics` collects and `figures` computes.

mod context;
mod drawing;
mod engines;
pub mod figures;
mod link;
mod parts;
mod plans;
pub mod policies;
mod program;
mod queue;
pub mod report;
pub mod scenario;
mod schema;
mod serial;
mod statistics;
mod world;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parts::Part;
use policies::Policy;
use report::{Outcome, Report};
use scenario::Scenario;
use world::World;

use crate::timeline::Timeline;

/// Simulates a scenario under each of these policies, with one thread per processor.
pub fn run(scenario: &Scenario, policies: &[Policy]) -> Report {
    let plans = plans::plans(scenario);
    let ideal = serial::outcome(scenario, &plans);
    let parts: Vec<(&Policy, Vec<Part>)> =
        policies.iter().map(|policy| (policy, parts::parts(scenario, &plans, policy))).collect();
    let worlds: Vec<(&Policy, &Part)> =
        parts.iter().flat_map(|(policy, parts)| parts.iter().map(|part| (*policy, part))).collect();
    let mut played = play(scenario, &worlds).into_iter();
    let outcomes = parts.iter().filter_map(|(policy, parts)| {
        let outcomes: Vec<Option<Outcome>> = played.by_ref().take(parts.len()).collect();
        let outcomes: Option<Vec<Outcome>> = outcomes.into_iter().collect();
        Some(parts::joined(policy, plans.len(), parts.iter().zip(outcomes?)))
    });
    let outcomes: Vec<Outcome> = outcomes.collect();
    report::report(scenario, &plans, outcomes.into_iter().chain([ideal]))
}

/// Simulates a scenario under one policy, and returns the timeline. A program's name consists of
/// its job's name and its number in the job.
pub fn draw(scenario: &Scenario, policy: &Policy) -> Timeline {
    let plans = plans::plans(scenario);
    let mut counts = vec![0; scenario.jobs.len()];
    let name = |plan: &plans::Plan| {
        let (job, count) = (scenario.jobs.get(plan.job)?, counts.get_mut(plan.job)?);
        *count += 1;
        Some(if job.count == 1 { job.name.clone() } else { format!("{} {count}", job.name) })
    };
    let names = plans.iter().map(name).map(Option::unwrap_or_default).collect();
    World::new(scenario, &scenario.gpus, &plans, policy).draw(names)
}

/// Simulates these worlds. If a world panics, the panic message is printed, and the world's outcome
/// is `None`.
fn play(scenario: &Scenario, worlds: &[(&Policy, &Part)]) -> Vec<Option<Outcome>> {
    let next = AtomicUsize::new(0);
    let some = || {
        let take = || {
            let at = next.fetch_add(1, Ordering::Relaxed);
            worlds.get(at).map(|(policy, part)| (at, *policy, *part))
        };
        let played = std::iter::from_fn(take).map(|(at, policy, part)| {
            let play = || World::new(scenario, &part.gpus, &part.plans, policy).play();
            (at, std::panic::catch_unwind(play).ok())
        });
        played.collect::<Vec<_>>()
    };
    let mut outcomes: Vec<Option<Outcome>> = worlds.iter().map(|_| None).collect();
    thread::scope(|scope| {
        let count = thread::available_parallelism().map_or(1, |count| count.get()).min(worlds.len());
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(some)).collect();
        for (at, outcome) in threads.into_iter().filter_map(|thread| thread.join().ok()).flatten() {
            if let Some(place) = outcomes.get_mut(at) {
                *place = outcome;
            }
        }
    });
    outcomes
}
