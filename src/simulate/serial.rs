//! The baseline for comparing policies. Each GPU runs one program at a time to its end, in the
//! order of arrival. A GPU's lock is handed over only when a program ends, and no memory moves. On
//! the other hand, no work overlaps, and short programs wait for long programs.

use std::time::Duration;

use super::figures::Counted;
use super::plans::Plan;
use super::policies::SERIAL;
use super::report::Outcome;
use super::scenario::Scenario;
use super::statistics::End;
use crate::scheduler::Time;

pub fn outcome(scenario: &Scenario, plans: &[Plan]) -> Outcome {
    let mut free_at = vec![Time::ZERO; scenario.gpus.len()];
    let mut waits = Counted::default();
    let (mut ends, mut had) = (Vec::new(), Vec::new());
    let mut hand_overs = 0;
    for plan in plans {
        let Some(job) = scenario.jobs.get(plan.job) else { continue };
        let own = plan.gpus.iter().filter_map(|gpu| scenario.gpus.get(*gpu));
        if own.into_iter().any(|gpu| gpu.memory < job.memory) {
            ends.push(Some(End::Failed));
            had.push(Duration::ZERO);
            continue;
        }
        let free = plan.gpus.iter().filter_map(|gpu| free_at.get(*gpu)).max().copied().unwrap_or_default();
        let begins = free.max(plan.arrives);
        let (end, until) = (begins + job.alone(), scenario.until);
        // The completed fraction of the program's work at the end of the simulation.
        let part = until.saturating_sub(begins).as_secs_f64() / job.alone().as_secs_f64();
        had.push(if end <= until { job.work } else { job.work.mul_f64(part) });
        ends.push((end <= until).then_some(End::Done(end)));
        if begins <= until {
            waits.add(begins - plan.arrives);
            let used = plan.gpus.iter().filter_map(|gpu| free_at.get(*gpu)).filter(|at| !at.is_zero()).count();
            hand_overs += used as u64;
        }
        for gpu in &plan.gpus {
            if let Some(at) = free_at.get_mut(*gpu) {
                *at = end;
            }
        }
    }
    Outcome {
        policy: SERIAL,
        ends,
        waits,
        hand_overs,
        had,
        ended: free_at.into_iter().max().unwrap_or_default().min(scenario.until),
        ..Outcome::default()
    }
}
