//! Simulation of a described mix of programs: the scheduler's own state machine (`nvshare::scheduler::Machine`), and
//! programs whose clients (`nvshare_simulated_client::Client`) answer it as `libnvshare.so` does, in virtual time. There
//! is no GPU, daemon or clock: the same file gives the same figures.
//!
//! - [`scenario`]: the simulated GPUs, settings and jobs; `schema`: the file format.
//! - `plans`: the arrival time and the GPUs of each program.
//! - [`policies`]: the policies that are compared.
//! - `world`: the machine, the programs and the time; `queue`: coming events.
//! - `program`: one program and its client. `engines`: the work of GPUs; `link`: copies between them and the host.
//! - `context`: state that all programs share.
//! - `serial`: the ideal that policies are compared with.
//! - [`report`]: the figures; `statistics`: collects them; `figures`: computes them.

mod context;
mod engines;
pub mod figures;
mod link;
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
    // A policy whose thread panicked has printed the panic, and has no figures.
    report::report(scenario, &plans, played.into_iter().flatten().chain([ideal]))
}
