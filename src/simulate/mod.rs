//! What the scheduler would do with a described mix of programs: its own state machine (`nvshare::scheduler::Machine`),
//! and programs that answer it as `libnvshare.so` does, in virtual time. No GPU, no daemon, no clock: the same file gives the
//! same figures.
//!
//! - [`scenario`]: what is simulated; over `written`, the file as people write it.
//! - `plans`: which program comes when, and to which GPUs.
//! - [`policies`]: what is compared.
//! - `world`: the machine, the programs and the time; over `queue`, what happens next.
//! - `program`: one client, with `answers` for what it answers the scheduler, `turn` for the lock as it has it, and `memory` for
//!   what it has on a GPU.
//! - `engines`: work that GPUs do. `surroundings`: all that programs share.
//! - `serial`: the ideal that policies are compared with.
//! - [`report`]: the figures; over `ledger`, where they are collected, and `figures`, how they are computed.

mod answers;
mod engines;
pub mod figures;
mod ledger;
mod memory;
mod plans;
pub mod policies;
mod program;
mod queue;
pub mod report;
pub mod scenario;
mod serial;
mod surroundings;
mod turn;
mod world;
mod written;

use std::thread;

use policies::Policy;
use report::{Outcome, Report};
use scenario::Scenario;
use world::World;

/// Plays a scenario under each of these policies.
pub fn run(scenario: &Scenario, policies: &[Policy]) -> Report {
    let plans = plans::plans(scenario);
    let ideal = serial::outcome(scenario, &plans);
    let play = |policy: &Policy| World::new(scenario, &plans, policy).play();
    let played: Vec<Option<Outcome>> = thread::scope(|scope| {
        let threads: Vec<_> = policies.iter().map(|policy| scope.spawn(|| play(policy))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    });
    // A policy whose thread panicked says so itself, and has no figures.
    report::report(scenario, &plans, played.into_iter().flatten().chain([ideal]))
}
