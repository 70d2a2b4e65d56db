//! Independent parts of a scenario. A part is a set of GPUs that shares no program, host-memory
//! budget or rule with other GPUs. Each part is simulated in a separate world, which is small and
//! can run in its own thread.

use std::collections::BTreeMap;

use super::plans::Plan;
use super::policies::Policy;
use super::report::Outcome;
use super::scenario::{Gpu, Scenario};

/// A part of a scenario. Its GPUs are numbered from 0.
#[derive(Debug, Default)]
pub struct Part {
    pub gpus: Vec<Gpu>,
    pub plans: Vec<Plan>,
    /// The index of each program of the part among all programs.
    places: Vec<usize>,
}

/// Splits a scenario under a policy into parts. GPUs without programs belong to no part.
pub fn parts(scenario: &Scenario, plans: &[Plan], policy: &Policy) -> Vec<Part> {
    // The group of a rule may have members on any GPU.
    let shares_more = scenario.swap.is_some() || policy.rules && scenario.jobs.iter().any(|job| job.rule.is_some());
    let mut first_of: Vec<usize> = (0..scenario.gpus.len()).map(|gpu| if shares_more { 0 } else { gpu }).collect();
    for plan in plans {
        let firsts = plan.gpus.iter().map(|gpu| first(&first_of, *gpu));
        let Some(least) = firsts.clone().min() else { continue };
        for other in firsts.collect::<Vec<_>>() {
            if let Some(place) = first_of.get_mut(other) {
                *place = least;
            }
        }
    }
    // Collects the GPUs of each part, and the index of each GPU in its part.
    let mut parts: BTreeMap<usize, Part> = BTreeMap::new();
    let mut place_of = Vec::with_capacity(scenario.gpus.len());
    for (gpu, found) in scenario.gpus.iter().enumerate() {
        let part = parts.entry(first(&first_of, gpu)).or_default();
        place_of.push(part.gpus.len());
        part.gpus.push(*found);
    }
    for (at, plan) in plans.iter().enumerate() {
        let part = plan.gpus.first().and_then(|gpu| parts.get_mut(&first(&first_of, *gpu)));
        if let Some(part) = part {
            let gpus = plan.gpus.iter().filter_map(|gpu| place_of.get(*gpu).copied()).collect();
            part.plans.push(Plan { gpus, ..plan.clone() });
            part.places.push(at);
        }
    }
    parts.into_values().filter(|part| !part.plans.is_empty()).collect()
}

/// Returns the first GPU in the part of `gpu`.
fn first(first_of: &[usize], mut gpu: usize) -> usize {
    while let Some(first) = first_of.get(gpu).copied().filter(|first| *first != gpu) {
        gpu = first;
    }
    gpu
}

/// Joins the outcomes of all parts into the outcome of a policy.
pub fn joined<'a>(policy: &Policy, programs: usize, outcomes: impl Iterator<Item = (&'a Part, Outcome)>) -> Outcome {
    let mut all = Outcome {
        policy: policy.name,
        ends: vec![None; programs],
        had: vec![Default::default(); programs],
        could: Some(BTreeMap::new()),
        ..Outcome::default()
    };
    for (part, outcome) in outcomes {
        for ((place, end), had) in part.places.iter().zip(outcome.ends).zip(outcome.had) {
            all.ends.get_mut(*place).into_iter().for_each(|at| *at = end);
            all.had.get_mut(*place).into_iter().for_each(|at| *at = had);
        }
        let could = all.could.get_or_insert_default();
        for (user, time) in outcome.could.into_iter().flatten() {
            *could.entry(user).or_default() += time;
        }
        all.waits.add_all(&outcome.waits);
        all.hand_overs += outcome.hand_overs;
        all.swapped_out += outcome.swapped_out;
        all.swapped_in += outcome.swapped_in;
        all.ended = all.ended.max(outcome.ended);
        all.events += outcome.events;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::plans::plans;
    use super::super::policies::POLICIES;
    use super::super::world::World;
    use super::*;
    use std::path::Path;

    fn scenario_of(text: &str) -> Scenario {
        Scenario::parse(text, Path::new("x")).unwrap_or_else(|e| panic!("{e}"))
    }

    fn policy(rules: bool) -> &'static Policy {
        POLICIES.iter().find(|policy| policy.rules == rules).expect("a policy")
    }

    const JOBS: &str = "[[gpu]]\ncount = 4\nmemory = \"1G\"\n\
        [[job]]\nname = \"a\"\nmemory = \"600M\"\nwork = \"9s\"\ngpus = 2\non = [1, 3]\n\
        [[job]]\nname = \"b\"\nmemory = \"600M\"\nwork = \"5s\"\ncount = 2\non = [0]\ngpu-time = \"1s\"\ncpu-time = \"1s\"\n\
        [[job]]\nname = \"c\"\nmemory = \"600M\"\nwork = \"7s\"\non = [3]\n";

    #[test]
    fn gpus_of_one_program_are_in_one_part() {
        let scenario = scenario_of(JOBS);
        let plans = plans(&scenario);
        let parts = parts(&scenario, &plans, policy(false));
        let gpus: Vec<usize> = parts.iter().map(|part| part.gpus.len()).collect();
        let programs: Vec<Vec<(usize, Vec<usize>)>> =
            parts.iter().map(|part| part.plans.iter().map(|plan| (plan.job, plan.gpus.clone())).collect()).collect();
        assert_eq!(gpus, [1, 2], "GPU 2 has no programs");
        assert_eq!(programs, [vec![(1, vec![0]), (1, vec![0])], vec![(0, vec![0, 1]), (2, vec![1])]]);
    }

    #[test]
    fn programs_that_share_host_memory_or_a_rule_are_in_one_part() {
        let count = |text: &str, rules: bool| {
            let scenario = scenario_of(text);
            parts(&scenario, &plans(&scenario), policy(rules)).len()
        };
        assert_eq!(count(&format!("swap = {{ max = \"10G\" }}\n{JOBS}"), false), 1);
        let ruled = format!("{JOBS}rule = {{ weight = 50 }}\n");
        assert_eq!((count(&ruled, false), count(&ruled, true)), (2, 1));
    }

    #[test]
    fn joined_parts_equal_the_whole() {
        let scenario = scenario_of(JOBS);
        let plans = plans(&scenario);
        for policy in &POLICIES {
            let whole = World::new(&scenario, &scenario.gpus, &plans, policy).play();
            let parts = parts(&scenario, &plans, policy);
            let played = parts.iter().map(|part| (part, World::new(&scenario, &part.gpus, &part.plans, policy).play()));
            let joined = joined(policy, plans.len(), played);
            let figures = |outcome: &Outcome| {
                let Outcome { ends, had, could, hand_overs, swapped_out, swapped_in, ended, waits, .. } = outcome;
                let bytes = (*swapped_out, *swapped_in);
                (ends.clone(), had.clone(), could.clone(), *hand_overs, bytes, *ended, waits.mean(), waits.worst())
            };
            assert_eq!(figures(&joined), figures(&whole), "{}", policy.name);
        }
    }
}
