//! The arrival time, user and GPUs of each program, decided before the simulation and therefore the
//! same under every policy.

use std::collections::BTreeMap;
use std::time::Duration;

use super::scenario::{Gap, Scenario};
use crate::scheduler::{TenantId, Time};

/// One program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The index of the program's job in the scenario.
    pub job: usize,
    pub tenant: TenantId,
    pub arrives: Time,
    /// The indices of the program's GPUs, in ascending order.
    pub gpus: Vec<usize>,
}

/// Plans all programs, in the order of arrival. Each program gets the allowed GPUs with the fewest
/// earlier programs.
pub fn plans(scenario: &Scenario) -> Vec<Plan> {
    let mut tenants: BTreeMap<&str, TenantId> = BTreeMap::new();
    let mut plans = Vec::new();
    for (at, job) in scenario.jobs.iter().enumerate() {
        let mut dice = Dice::new(scenario.seed, at);
        let mut arrives = job.arrival.first;
        for (number, user) in (0..job.count).zip(job.users.iter().cycle()) {
            if number > 0 {
                arrives = arrives.saturating_add(match job.arrival.gap {
                    Gap::Always(gap) => gap,
                    Gap::Random(mean) => dice.gap(mean),
                });
            }
            let next = TenantId(tenants.len() as u64);
            let tenant = *tenants.entry(user).or_insert(next);
            plans.push(Plan { job: at, tenant, arrives, gpus: Vec::new() });
        }
    }
    // The sort is stable, so simultaneous arrivals keep the order of the file.
    plans.sort_by_key(|plan| plan.arrives);
    let mut given = vec![0usize; scenario.gpus.len()];
    for plan in &mut plans {
        let Some(job) = scenario.jobs.get(plan.job) else { continue };
        plan.gpus = fewest(&given, &job.on, job.gpus);
        for place in &plan.gpus {
            if let Some(count) = given.get_mut(*place) {
                *count += 1;
            }
        }
    }
    plans
}

/// Returns the `number` GPUs in `on` with the lowest counts in `given`.
fn fewest(given: &[usize], on: &[usize], number: usize) -> Vec<usize> {
    let count = |place: &usize| (given.get(*place).copied().unwrap_or(usize::MAX), *place);
    let mut places: Vec<usize> = match number {
        1 => on.iter().copied().min_by_key(count).into_iter().collect(),
        _ => {
            let mut all = on.to_vec();
            all.sort_by_key(count);
            all.truncate(number);
            all
        }
    };
    places.sort_unstable();
    places
}

/// The SplitMix64 generator, implemented here because a scenario's seed must give the same arrivals
/// on every machine and in every version.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    /// Begins the sequence of one job, which does not depend on other jobs.
    fn new(seed: u32, job: usize) -> Self {
        Self(u64::from(seed) << 32 ^ job as u64)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns an exponentially distributed time to the next arrival. The time is rounded to
    /// milliseconds, so that different implementations of the logarithm give the same time.
    fn gap(&mut self, mean: Duration) -> Duration {
        let part = ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64; // above 0, at most 1
        Duration::from_millis((-part.ln() * mean.as_secs_f64() * 1e3).round() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn plans_of(text: &str) -> Vec<Plan> {
        plans(&Scenario::parse(text, Path::new("x")).unwrap_or_else(|e| panic!("{e}")))
    }

    #[test]
    fn programs_are_placed_on_the_gpu_with_the_fewest_programs() {
        let plans = plans_of(
            "[[gpu]]\ncount = 3\nmemory = \"1G\"\n\
             [[job]]\nname = \"one\"\nmemory = 1\nwork = 1\non = [1]\n\
             [[job]]\nname = \"two\"\nmemory = 1\nwork = 1\ncount = 2\ngpus = 2\nevery = 1\n\
             [[job]]\nname = \"late\"\nmemory = 1\nwork = 1\nat = \"1s\"",
        );
        let gpus: Vec<_> = plans.iter().map(|plan| (plan.job, plan.arrives.as_secs(), plan.gpus.clone())).collect();
        assert_eq!(gpus, [(0, 0, vec![1]), (1, 0, vec![0, 2]), (1, 1, vec![0, 1]), (2, 1, vec![2])]);
    }

    #[test]
    fn users_alternate_and_jobs_can_share_a_user() {
        let plans = plans_of(
            "[[gpu]]\nmemory = \"1G\"\n[[job]]\nname = \"a\"\nmemory = 1\nwork = 1\ncount = 3\nusers = 2\n\
             [[job]]\nname = \"b\"\nmemory = 1\nwork = 1\nuser = \"a-2\"\n[[job]]\nname = \"c\"\nmemory = 1\nwork = 1",
        );
        let users: Vec<u64> = plans.iter().map(|plan| plan.tenant.0).collect();
        assert_eq!(users, [0, 1, 0, 1, 2]);
    }

    #[test]
    fn random_arrivals_depend_only_on_the_seed() {
        let text = |seed: u32| {
            format!(
                "seed = {seed}\n[[gpu]]\nmemory = \"1G\"\n\
                 [[job]]\nname = \"a\"\nmemory = 1\nwork = 1\ncount = 10000\nrandom = \"10s\"\nat = \"5s\""
            )
        };
        let plans = plans_of(&text(1));
        assert_eq!(plans, plans_of(&text(1)));
        assert_ne!(plans, plans_of(&text(2)));
        assert_eq!(plans.first().map(|plan| plan.arrives.as_secs()), Some(5));
        let mean = plans.last().map_or(0, |plan| plan.arrives.as_secs()) / 10_000;
        assert!((9..=11).contains(&mean), "{mean}");
    }
}
