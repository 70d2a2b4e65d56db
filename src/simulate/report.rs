//! The results of a scenario: figures for each policy, and for each job under each policy.

use std::collections::BTreeMap;
use std::time::Duration;

use super::figures::{Counted, Spread, jain};
use super::plans::Plan;
use super::scenario::Scenario;
use super::statistics::End;
use crate::scheduler::{TenantId, Time};

/// The results under one policy.
#[derive(Debug, Default)]
pub struct Outcome {
    pub policy: &'static str,
    /// The end of each program. `None` if the program has not ended.
    pub ends: Vec<Option<End>>,
    pub waits: Counted,
    pub hand_overs: u64,
    pub swapped_out: u64,
    pub swapped_in: u64,
    /// GPU time of each program, on each of its GPUs.
    pub had: Vec<Duration>,
    /// The GPU time that each user could have used without other users, if it was collected.
    pub could: Option<BTreeMap<TenantId, Duration>>,
    /// The end of the simulation.
    pub ended: Time,
    pub events: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    pub programs: usize,
    pub users: usize,
    pub gpus: usize,
    pub jobs: Vec<JobReport>,
    pub policies: Vec<Figures>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct JobReport {
    pub name: String,
    pub programs: usize,
    /// Completion time of one program of the job that runs alone.
    pub alone: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    pub policy: &'static str,
    pub done: usize,
    pub failed: usize,
    /// Programs that had not ended at the end of the simulation.
    pub unfinished: usize,
    /// The time at which the last completed program ended.
    pub last: Option<Time>,
    /// Time from a program's arrival to its end.
    pub completion: Option<Spread>,
    pub wait_mean: Duration,
    pub wait_most: Duration,
    pub wait_worst: Duration,
    pub fairness: Option<f64>,
    /// Fraction of the time, until the end of the simulation, for which GPUs were busy.
    pub busy: f64,
    pub hand_overs: u64,
    pub swapped_out: u64,
    pub swapped_in: u64,
    pub events: u64,
    pub jobs: Vec<JobFigures>,
}

/// The programs of one job under one policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobFigures {
    pub done: usize,
    /// Mean completion time, and its ratio to the completion time of a program that runs alone.
    pub completion: Option<Duration>,
    pub slowdown: Option<f64>,
    /// Sum of the programs' GPU time on all GPUs.
    pub had: Duration,
}

pub fn report(scenario: &Scenario, plans: &[Plan], outcomes: impl Iterator<Item = Outcome>) -> Report {
    let users: BTreeMap<TenantId, ()> = plans.iter().map(|plan| (plan.tenant, ())).collect();
    let job = |(at, job): (usize, &super::scenario::Job)| JobReport {
        name: job.name.clone(),
        programs: plans.iter().filter(|plan| plan.job == at).count(),
        alone: job.alone(),
    };
    Report {
        programs: plans.len(),
        users: users.len(),
        gpus: scenario.gpus.len(),
        jobs: scenario.jobs.iter().enumerate().map(job).collect(),
        policies: outcomes.map(|outcome| figures(scenario, plans, outcome)).collect(),
    }
}

fn figures(scenario: &Scenario, plans: &[Plan], outcome: Outcome) -> Figures {
    let Outcome { policy, ends, waits, hand_overs, swapped_out, swapped_in, had, could, ended, events } = outcome;
    let done: Vec<(&Plan, Time)> =
        plans.iter().zip(&ends).filter_map(|(plan, end)| Some((plan, done_at(*end)?))).collect();
    let last = done.iter().map(|(_, at)| *at).max();
    let had = || plans.iter().zip(&had).map(|(plan, had)| (plan, had.saturating_mul(plan.gpus.len() as u32)));
    let busy: Duration = had().map(|(_, had)| had).sum();
    let fairness = could.filter(|users| users.len() > 1).and_then(|could| {
        let mut parts: BTreeMap<TenantId, f64> = BTreeMap::new();
        for (plan, had) in had() {
            *parts.entry(plan.tenant).or_default() += had.as_secs_f64();
        }
        let part = |(user, could): (&TenantId, &Duration)| {
            let had = parts.get(user).copied().unwrap_or_default();
            (!could.is_zero()).then(|| had / could.as_secs_f64())
        };
        jain(&could.iter().filter_map(part).collect::<Vec<_>>())
    });
    let jobs = (0..scenario.jobs.len()).map(|job| {
        let took = done.iter().filter(|(plan, _)| plan.job == job).map(|(plan, at)| at.saturating_sub(plan.arrives));
        let all: Vec<Duration> = took.collect();
        let completion = Spread::of(all.clone()).map(|spread| spread.mean);
        let alone = scenario.jobs.get(job).map(|job| job.alone().as_secs_f64());
        JobFigures {
            done: all.len(),
            completion,
            slowdown: completion.zip(alone).map(|(mean, alone)| mean.as_secs_f64() / alone),
            had: had().filter(|(plan, _)| plan.job == job).map(|(_, had)| had).sum(),
        }
    });
    Figures {
        policy,
        done: done.len(),
        failed: ends.iter().filter(|end| **end == Some(End::Failed)).count(),
        unfinished: ends.iter().filter(|end| end.is_none()).count(),
        last,
        completion: Spread::of(done.iter().map(|(plan, at)| at.saturating_sub(plan.arrives)).collect()),
        wait_mean: waits.mean(),
        wait_most: waits.percentile(99),
        wait_worst: waits.worst(),
        fairness,
        busy: busy.as_secs_f64() / (ended.as_secs_f64() * scenario.gpus.len() as f64).max(f64::MIN_POSITIVE),
        hand_overs,
        swapped_out,
        swapped_in,
        events,
        jobs: jobs.collect(),
    }
}

fn done_at(end: Option<End>) -> Option<Time> {
    match end {
        Some(End::Done(at)) => Some(at),
        Some(End::Failed) | None => None,
    }
}
