//! Computes the limits that the driver is to enforce: bytes by control group and GPU.
//!
//! Unlike nvshare's own limits, one of the driver cannot be exceeded for a moment, and committed memory must always
//! be able to come to the GPU. So a limit is never below what the programs of the control group may have by now, and
//! leaves room for what is not measured. It covers all processes of the control group: the share of a program that
//! counts with another group is added, and a control group with an unlimited program has no limit.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::rules::Instance;
use crate::identity::Cgroup;
use crate::scheduler::{Amount, GpuId};

/// Bytes for each GPU and control group, by the path of that from the root of the hierarchy.
pub type Wanted = BTreeMap<(GpuId, String), u64>;

/// Where a group has more than its rule allows, its limits follow in steps of a chunk, in which memory moves.
const STEP: u64 = 64 << 20;

#[derive(Debug, Clone, Copy)]
pub struct Gpu {
    pub total: u64,
    /// Bytes that a program may use beyond its known memory: the size assumed for a context.
    pub margin: u64,
}

/// A client.
#[derive(Debug)]
pub struct Program<'a> {
    pub cgroup: &'a Cgroup,
    /// With whom it counts, and what they may have of each GPU's memory together.
    pub rule: Option<(&'a Instance, Amount)>,
    /// The most that it can have on each GPU, now or when it is back there, its context included.
    pub has: BTreeMap<GpuId, u64>,
}

/// Those who count together.
#[derive(Debug, Default)]
struct Party<'a> {
    max: Amount,
    programs: u64,
    has: BTreeMap<GpuId, u64>,
    /// The control group that it is.
    place: Option<&'a str>,
}

impl Party<'_> {
    /// The bytes that the control group may have on that GPU; `None`: unlimited.
    fn reach(&self, id: GpuId, gpu: Gpu) -> Option<u64> {
        let max = self.max.on(gpu.total)?;
        let has = self.has.get(&id).filter(|bytes| **bytes > max);
        let most = has.map_or(max, |bytes| bytes.next_multiple_of(STEP));
        Some(most.saturating_add(self.programs.saturating_mul(gpu.margin)))
    }
}

pub fn wanted(gpus: &BTreeMap<GpuId, Gpu>, programs: &[Program<'_>]) -> Wanted {
    let mut parties: BTreeMap<&Instance, Party<'_>> = BTreeMap::new();
    for program in programs {
        let Some((instance, max)) = program.rule else { continue };
        let party = parties.entry(instance).or_default();
        (party.max, party.place) = (max, instance.place());
        party.programs += 1;
        for (id, bytes) in &program.has {
            let sum = party.has.entry(*id).or_default();
            *sum = sum.saturating_add(*bytes);
        }
    }
    // The groups with programs in each of those control groups; `None` is a program without a rule.
    let places = parties.values().filter(|party| party.max != Amount::Infinity).filter_map(|party| party.place);
    let mut within: BTreeMap<&str, BTreeSet<Option<&Instance>>> =
        places.map(|place| (place, BTreeSet::new())).collect();
    for program in programs {
        for path in program.cgroup.within() {
            if let Some(all) = within.get_mut(path) {
                all.insert(program.rule.map(|(instance, _)| instance));
            }
        }
    }
    let mut wanted = Wanted::new();
    for (id, gpu) in gpus {
        for (path, all) in &within {
            let reaches = all.iter().map(|instance| parties.get((*instance)?)?.reach(*id, *gpu));
            let sum = reaches.sum::<Option<u64>>();
            if let Some(bytes) = sum {
                wanted.insert((*id, (*path).to_owned()), bytes.min(gpu.total));
            }
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;
    use crate::identity::Identity;
    use crate::scheduler::Uuid;

    const GIB: u64 = 1 << 30;
    const GPU: GpuId = GpuId(Uuid([1; 16]));
    const MARGIN: u64 = GIB / 2;

    /// What is wanted for programs of those users, in those control groups, that have so many GiB.
    fn of(rules: &str, programs: &[(u32, &str, u64)]) -> Vec<(String, u64)> {
        let config = Config::parse(rules, Path::new("nvshare.toml")).unwrap_or_else(|e| panic!("{rules}: {e}"));
        let who = |uid, path: &str| Identity {
            uid,
            groups: vec![uid],
            cgroup: Cgroup { path: path.into() },
            ..Identity::default()
        };
        let all: Vec<_> = programs.iter().map(|(uid, path, gib)| (who(*uid, path), gib * GIB)).collect();
        let found: Vec<_> = all.iter().map(|(who, _)| config.rules.of(who)).collect();
        let program = |((who, bytes), found): (&'_ (Identity, u64), &'_ Option<(_, Instance)>)| -> (Cgroup, Option<(Instance, Amount)>, u64) {
            let rule = found.as_ref().map(|(rule, instance): &(&crate::config::rules::Rule, Instance)| {
                (instance.clone(), rule.limits.memory_max)
            });
            (who.cgroup.clone(), rule, *bytes)
        };
        let kept: Vec<_> = all.iter().zip(&found).map(program).collect();
        let programs: Vec<Program<'_>> = kept
            .iter()
            .map(|(cgroup, rule, bytes)| Program {
                cgroup,
                rule: rule.as_ref().map(|(instance, max)| (instance, *max)),
                has: BTreeMap::from([(GPU, *bytes)]),
            })
            .collect();
        let gpus = BTreeMap::from([(GPU, Gpu { total: 64 * GIB, margin: MARGIN })]);
        wanted(&gpus, &programs).into_iter().map(|((_, path), bytes)| (path, bytes)).collect()
    }

    const A: &str = "/system.slice/a.service";
    const B: &str = "/system.slice/b.service";

    fn rule(subject: &str, max: &str) -> String {
        format!("[[rule]]\n{subject}\nmemory-max = \"{max}\"\n")
    }

    #[test]
    fn a_control_group_gets_what_its_rule_allows_and_a_margin_for_each_program() {
        let rules = rule("unit = \"*.service\"", "8G");
        assert_eq!(of(&rules, &[(0, A, 1)]), [(A.into(), 8 * GIB + MARGIN)]);
        let deeper = format!("{A}/worker");
        let all = [(0, A, 1), (5, &*deeper, 7), (0, B, 0)];
        assert_eq!(of(&rules, &all), [(A.into(), 9 * GIB), (B.into(), 8 * GIB + MARGIN)]);
        assert_eq!(of(&rules, &[]), []);
        assert_eq!(of(&rule("unit = \"*.service\"", "50%"), &[(0, A, 1)]), [(A.into(), 32 * GIB + MARGIN)]);
        let slice = rule("slice = \"system.slice\"", "8G");
        assert_eq!(of(&slice, &[(0, A, 1), (0, B, 1)]), [("/system.slice".into(), 9 * GIB)]);
        let id = "0123456789abcdef".repeat(4);
        let container = format!("/system.slice/docker-{id}.scope");
        for rules in [rule("container = \"*\"", "8G"), rule("", "8G")] {
            assert_eq!(of(&rules, &[(0, &container, 1)]), [(container.clone(), 8 * GIB + MARGIN)], "{rules}");
        }
        assert_eq!(of(&rule("", "8G"), &[(0, A, 1)]), [(A.into(), 8 * GIB + MARGIN)]);
    }

    #[test]
    fn who_is_no_control_group_has_no_limit() {
        let session = "/user.slice/user-5.slice/session-1.scope";
        for (subject, path) in [("user = 5", A), ("group = 5", A), ("", session), ("", "/"), ("", "")] {
            assert_eq!(of(&rule(subject, "8G"), &[(5, path, 1)]), [], "{subject} of {path}");
        }
        assert_eq!(of(&rule("unit = \"*\"", "infinity"), &[(5, A, 1)]), []);
    }

    #[test]
    fn what_is_there_already_has_room_and_no_limit_exceeds_the_gpu() {
        let rules = rule("unit = \"*\"", "8G");
        assert_eq!(of(&rules, &[(0, A, 6), (0, A, 6)]), [(A.into(), 13 * GIB)], "it was lowered");
        assert_eq!(of(&rule("unit = \"*\"", "8000M"), &[(0, A, 7)]), [(A.into(), (8000 << 20) + MARGIN)]);
        assert_eq!(of(&rule("unit = \"*\"", "7100M"), &[(0, A, 7)]), [(A.into(), 7 * GIB + MARGIN)]);
        assert_eq!(of(&rule("unit = \"*\"", "64G"), &[(0, A, 6)]), [(A.into(), 64 * GIB)]);
    }

    #[test]
    fn who_counts_elsewhere_has_his_part_added_and_who_is_free_is_not_walled_in() {
        let both = rule("user = 5", "4G") + &rule("slice = \"system.slice\"", "8G");
        assert_eq!(of(&both, &[(5, A, 1), (0, B, 1)]), [("/system.slice".into(), 13 * GIB)]);
        let both = rule("unit = \"a.service\"", "4G") + &rule("slice = \"system.slice\"", "8G");
        let expected = [("/system.slice".into(), 13 * GIB), (A.into(), 4 * GIB + MARGIN)];
        assert_eq!(of(&both, &[(0, A, 1), (0, B, 1)]), expected);
        let free = rule("user = 5", "infinity") + &rule("slice = \"system.slice\"", "8G");
        assert_eq!(of(&free, &[(5, A, 1), (0, B, 1)]), []);
        let no_rule = rule("unit = \"a.service\"\nuser = 5", "8G");
        assert_eq!(of(&no_rule, &[(5, A, 1)]), [(A.into(), 8 * GIB + MARGIN)]);
        assert_eq!(of(&no_rule, &[(5, A, 1), (6, A, 1)]), [], "the other user is in the same unit");
    }
}
