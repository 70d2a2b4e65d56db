//! Statistics collected during a simulation: the end of each program, its waiting time, moved
//! bytes, and the GPU time that each user could have used.

use std::collections::BTreeMap;
use std::time::Duration;

use super::figures::Counted;
use super::plans::Plan;
use super::scenario::{FULL, Scenario};
use crate::scheduler::{TenantId, Time};

/// The end of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Done(Time),
    /// The program was denied its memory.
    Failed,
}

#[derive(Debug)]
pub struct Statistics {
    pub ends: Vec<Option<End>>,
    /// How long programs that had work waited before they ran.
    pub waits: Counted,
    pub hand_overs: u64,
    pub swapped_out: u64,
    pub swapped_in: u64,
    /// The newest holder of each GPU.
    last: Vec<Option<usize>>,
    /// A claim for each pair of user and GPU. `claims_of` contains the claims' indices and the
    /// fullness of each program.
    claims: Vec<Claim>,
    claims_of: Vec<(Vec<usize>, u32)>,
    users: Vec<TenantId>,
}

/// The GPU time that a user's programs could have used on a GPU without other users.
#[derive(Debug, Clone, Default)]
struct Claim {
    /// Sum of the fullness of the programs that have work, in millionths, and the time at which the
    /// sum last changed.
    wanted: u64,
    since: Time,
    could: f64,
}

impl Claim {
    fn change(&mut self, now: Time, by: impl Fn(u64) -> u64) {
        let part = self.wanted.min(FULL.into()) as f64 / f64::from(FULL);
        self.could += now.saturating_sub(self.since).as_secs_f64() * part;
        (self.since, self.wanted) = (now, by(self.wanted));
    }
}

impl Statistics {
    pub fn new(scenario: &Scenario, gpus: usize, plans: &[Plan]) -> Self {
        let mut known: BTreeMap<(TenantId, usize), usize> = BTreeMap::new();
        let mut claim = |user, gpu| {
            let next = known.len();
            *known.entry((user, gpu)).or_insert(next)
        };
        let of = |plan: &Plan| {
            let fullness = scenario.jobs.get(plan.job).map_or(FULL, |job| job.fullness());
            (plan.gpus.iter().map(|gpu| claim(plan.tenant, *gpu)).collect(), fullness)
        };
        let claims_of: Vec<_> = plans.iter().map(of).collect();
        let mut users: Vec<_> = known.iter().map(|((user, _), at)| (*at, *user)).collect();
        users.sort_unstable();
        Self {
            ends: vec![None; plans.len()],
            waits: Counted::default(),
            hand_overs: 0,
            swapped_out: 0,
            swapped_in: 0,
            last: vec![None; gpus],
            claims: vec![Claim::default(); known.len()],
            claims_of,
            users: users.into_iter().map(|(_, user)| user).collect(),
        }
    }

    pub fn has_work(&mut self, program: usize, now: Time) {
        self.claim(program, now, |wanted, fullness| wanted + fullness);
    }

    pub fn has_none(&mut self, program: usize, now: Time) {
        self.claim(program, now, |wanted, fullness| wanted - fullness);
    }

    fn claim(&mut self, program: usize, now: Time, by: impl Fn(u64, u64) -> u64) {
        let Some((claims, fullness)) = self.claims_of.get(program) else { return };
        for at in claims {
            if let Some(claim) = self.claims.get_mut(*at) {
                claim.change(now, |wanted| by(wanted, (*fullness).into()));
            }
        }
    }

    pub fn granted(&mut self, program: usize, gpu: usize) {
        let Some(last) = self.last.get_mut(gpu) else { return };
        self.hand_overs += u64::from(last.replace(program).is_some_and(|other| other != program));
    }

    /// Returns the GPU time until `now` that each user's programs could have used without other
    /// users.
    pub fn could(&mut self, now: Time) -> BTreeMap<TenantId, Duration> {
        let mut could: BTreeMap<TenantId, Duration> = BTreeMap::new();
        for (claim, user) in self.claims.iter_mut().zip(&self.users) {
            claim.change(now, |wanted| wanted);
            *could.entry(*user).or_default() += Duration::from_secs_f64(claim.could);
        }
        could
    }
}
