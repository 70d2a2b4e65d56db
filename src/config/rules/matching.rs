//! Matching of programs with rules: finds the rule that applies to a program, and the programs that
//! count together under the rule.
//!
//! Rules match units, slices and containers of the system manager. Users can give any name to units
//! of their own managers. Such units match only rules that also name the user, or rules with a
//! pattern of the whole path.

use super::list::Rules;
use super::rule::{Glob, Rule, Subject};
use crate::identity::{self, Claim, Identity, Owned, Pod};

/// The programs that count together under a rule.
///
/// A rule that names a unit, slice, container, pod or claim limits each matching one separately.
/// Several pods that use the same claim count together. A rule that names a user limits all
/// programs of the user together. A rule that names a group limits each of the group's users
/// separately.
///
/// A rule without conditions limits each container and each unit separately. Programs in sessions
/// of a user count together, because a user can open any number of sessions.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instance {
    /// The position of the rule in the list.
    pub rule: usize,
    container: Option<String>,
    pod: Option<String>,
    claim: Option<String>,
    unit: Option<String>,
    slice: Option<String>,
    user: Option<u32>,
}

impl Instance {
    /// Returns the same programs for a rule at another position.
    pub fn of_rule(self, rule: usize) -> Self {
        Self { rule, ..self }
    }

    /// Describes the programs in words that do not depend on the order of the rules, for example
    /// `unit=/system.slice/a.service`.
    pub fn programs(&self) -> String {
        let user = self.user.map(|uid| uid.to_string());
        let parts = [
            ("container", &self.container),
            ("pod", &self.pod),
            ("claim", &self.claim),
            ("unit", &self.unit),
            ("slice", &self.slice),
            ("user", &user),
        ];
        let parts = parts.iter().filter_map(|(what, which)| Some(format!("{what}={}", which.as_deref()?)));
        parts.collect::<Vec<_>>().join(" ")
    }

    /// Returns the path of the innermost control group that contains all of the programs. Returns
    /// `None` if only the root contains all of them.
    pub fn place(&self) -> Option<&str> {
        [&self.container, &self.pod, &self.unit, &self.slice]
            .into_iter()
            .filter_map(|path| path.as_deref())
            .max_by_key(|path| path.len())
    }
}

impl Rules {
    /// Returns the rule that applies to a program: the first matching rule.
    pub fn of(&self, who: &Identity) -> Option<(&Rule, Instance)> {
        self.all().enumerate().find_map(|(at, rule)| Some((rule, rule.subject.matches(who, at)?)))
    }
}

impl Subject {
    fn matches(&self, who: &Identity, rule: usize) -> Option<Instance> {
        if self.user.is_some_and(|uid| uid != who.accountable())
            || self.group.is_some_and(|gid| !who.groups.contains(&gid))
        {
            return None;
        }
        let system = who.cgroup.of_system();
        if *self == Self::default() {
            return Some(Self::everybody(who, &system, rule));
        }
        let users = who.cgroup.of_user().filter(|(uid, _)| self.user == Some(*uid)).map(|(_, owned)| owned);
        // All names must belong to the same manager.
        let by_name = |owned: &Owned<'_>| self.places(who, owned, rule);
        by_name(&system).or_else(|| by_name(&users?))
    }

    fn places(&self, who: &Identity, owned: &Owned<'_>, rule: usize) -> Option<Instance> {
        let mut instance = Instance { rule, ..Instance::default() };
        if let Some(unit) = &self.unit {
            instance.unit = Some(unit.find(owned.unit.as_slice(), who)?.to_owned());
        }
        if let Some(slice) = &self.slice {
            instance.slice = Some(slice.find(&owned.slices, who)?.to_owned());
        }
        if let Some(container) = &self.container {
            let (path, id) = owned.container?;
            let is_meant = container.0.matches(id) || id.get(..12).is_some_and(|short| container.0.matches(short));
            instance.container = Some(is_meant.then_some(path)?.to_owned());
        }
        if let Some(pod) = &self.pod {
            let (path, _) = owned.pod.as_ref()?;
            let Pod { uid, namespace, name, .. } = &who.pod;
            instance.pod = Some(pod.is_of(uid, namespace, name).then_some(*path)?.to_owned());
        }
        if let Some(claim) = &self.claim {
            let Claim { uid, namespace, name } = &who.claim;
            let is_meant = !uid.is_empty() && claim.is_of(uid, namespace, name);
            instance.claim = Some(is_meant.then_some(uid)?.clone());
        }
        instance.user = self.user.or(self.group).map(|_| who.accountable());
        Some(instance)
    }

    fn everybody(who: &Identity, owned: &Owned<'_>, rule: usize) -> Instance {
        let is_of_a_user = owned.slices.iter().any(|path| identity::name(path) == "user.slice");
        let container = owned.container.map(|(path, _)| path.to_owned());
        let unit = owned.unit.filter(|_| container.is_none() && !is_of_a_user).map(str::to_owned);
        let user = (container.is_none() && unit.is_none()).then(|| who.accountable());
        Instance { rule, container, unit, user, ..Instance::default() }
    }
}

impl Glob {
    /// Returns true if the pattern matches the UID of a pod or claim, or its namespace and name.
    /// Without a known name, only the UID can match.
    fn is_of(&self, uid: &str, namespace: &str, name: &str) -> bool {
        if !self.0.as_str().contains('/') {
            return self.0.matches(uid);
        }
        let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
        !name.is_empty() && self.0.matches_with(&format!("{namespace}/{name}"), options)
    }

    /// Returns the path of the first control group in `owned` whose name matches the pattern. A
    /// pattern with a `/` is instead compared with the paths of all control groups that contain the
    /// program.
    fn find<'a>(&self, owned: &[&'a str], who: &'a Identity) -> Option<&'a str> {
        let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
        if self.0.as_str().contains('/') {
            return who.cgroup.within().find(|path| self.0.matches_with(path, options));
        }
        owned.iter().find(|path| self.0.matches(identity::name(path))).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;
    use crate::identity::Cgroup;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn who(uid: u32, path: &str) -> Identity {
        Identity { uid, groups: vec![uid, 50], cgroup: Cgroup { path: path.into() }, ..Identity::default() }
    }

    fn rules(text: &str) -> Rules {
        Config::parse(text, Path::new("nvshare.toml")).unwrap_or_else(|e| panic!("{text}: {e}")).rules
    }

    /// Returns true if a rule with these lines matches.
    fn matches(lines: &str, who: &Identity) -> bool {
        rules(&format!("[[rule]]\n{lines}\nmemory-max = \"1G\"")).of(who).is_some()
    }

    #[test]
    fn unit_names_match_only_units_of_the_expected_manager() {
        let docker = format!("/system.slice/docker-{ID}.scope");
        let cgroupfs = format!("/docker/{ID}");
        let rootless = format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container");
        let pod = format!("/kubepods.slice/kubepods-burstable.slice/kubepods-pod7.slice/cri-containerd-{ID}.scope");
        let borrowed = "/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service";
        let delegated = "/system.slice/other.service/jupyter.service";
        let container = format!("container = \"{ID}\"");
        let cases = [
            ("unit = \"jupyter.service\"", "/system.slice/jupyter.service", true),
            ("unit = \"jupyter.service\"", "/system.slice/jupyter.service/deeper/still", true),
            ("unit = \"jupyter-*.service\"", "/system.slice/jupyter-7.service", true),
            ("unit = \"jupyter-*.service\"", "/system.slice/jupyter.service", false),
            ("unit = \"jupyter.service\"", borrowed, false),
            ("unit = \"jupyter.service\"", delegated, false),
            ("unit = \"jupyter.service\"\nuser = 1000", borrowed, true),
            ("unit = \"jupyter.service\"\nuser = 1000", delegated, false),
            ("unit = \"jupyter.service\"\ngroup = 1000", borrowed, false),
            ("unit = \"**/jupyter.service\"", borrowed, true),
            ("unit = \"**/jupyter.service\"", "/jupyter.service", true),
            ("unit = \"/system.slice/*\"", "/system.slice/jupyter.service/deeper", true),
            ("unit = \"/system.slice/*\"", borrowed, false),
            ("unit = \"/user.slice/*/user@1000.service/**\"", borrowed, true),
            ("unit = \"session-*.scope\"", "/user.slice/user-1000.slice/session-3.scope", true),
            ("unit = \"user@1000.service\"", borrowed, true),
            ("unit = \"*\"", "/system.slice", false),
            ("unit = \"*\"", "", false),
            ("slice = \"user.slice\"", borrowed, true),
            ("slice = \"user-1000.slice\"", borrowed, true),
            ("slice = \"app.slice\"", borrowed, false),
            ("slice = \"app.slice\"\nuser = 1000", borrowed, true),
            ("slice = \"app.slice\"\nuser = 1000\nunit = \"jupyter.service\"", borrowed, true),
            ("slice = \"user.slice\"\nunit = \"jupyter.service\"\nuser = 1000", borrowed, false),
            ("slice = \"kubepods*.slice\"", &pod, true),
            ("slice = \"/kubepods.slice\"", &pod, true),
            (&container, &docker, true),
            (&container, &cgroupfs, true),
            (&container, &pod, true),
            (&container, &rootless, false),
            ("container = \"*\"", &rootless, false),
            ("container = \"*\"\nuser = 1000", &rootless, true),
            ("container = \"0123456789ab\"", &docker, true),
            ("container = \"0123*\"", &docker, true),
            ("container = \"1123*\"", &docker, false),
            ("container = \"*\"", "/system.slice/a.service", false),
            ("user = 1000", "/anything", true),
            ("user = 1001", "/anything", false),
            ("group = 50", "/anything", true),
            ("group = 51", "/anything", false),
            ("user = 1000\ngroup = 51", "/anything", false),
            ("", "", true),
        ];
        for (lines, path, expected) in cases {
            assert_eq!(matches(lines, &who(1000, path)), expected, "{lines} of {path}");
        }
        let other = Identity { uid: 1001, ..who(1001, borrowed) };
        let lines = "unit = \"jupyter.service\"\nuser = 1001";
        assert!(!matches(lines, &other), "the manager is another user's");
    }

    #[test]
    fn cgroup_v1_and_v2_match_the_same_units() {
        for text in ["0::/system.slice/a.service\n", "4:memory:/x\n1:name=systemd:/system.slice/a.service\n"] {
            let who = Identity { cgroup: Cgroup::read(text), ..Identity::default() };
            assert!(matches("unit = \"a.service\"", &who), "{text}");
        }
    }

    #[test]
    fn a_pod_matches_by_name_or_uid_and_shares_one_limit() {
        let uid = "01234567-89ab-cdef-0123-456789abcdef";
        let pod = |container: char| {
            let id: String = ID.chars().take(63).chain([container]).collect();
            let (namespace, name) = ("team-a".into(), "train-0".into());
            let pod = Pod { uid: uid.into(), namespace, name, ..Pod::default() };
            Identity {
                pod,
                ..who(0, &format!("/kubepods.slice/kubepods-pod{}.slice/crio-{id}.scope", uid.replace('-', "_")))
            }
        };
        for (pattern, expected) in [
            ("team-a/train-0", true),
            ("team-a/*", true),
            ("*/train-*", true),
            ("team-b/*", false),
            ("*", true),
            (uid, true),
            ("0*", true),
            ("f*", false),
        ] {
            assert_eq!(matches(&format!("pod = {pattern:?}"), &pod('1')), expected, "{pattern}");
            assert!(!matches(&format!("pod = {pattern:?}"), &who(0, "/system.slice/a.service")), "{pattern}");
        }
        let unnamed = Identity { pod: Pod { uid: uid.into(), ..Pod::default() }, ..pod('1') };
        assert!(!matches("pod = \"*/*\"", &unnamed) && matches("pod = \"*\"", &unnamed));
        let rules = rules("[[rule]]\npod = \"team-a/*\"\nmemory-max = \"1G\"");
        let instance = |who: &Identity| rules.of(who).map(|(_, instance)| instance);
        assert_eq!(instance(&pod('1')), instance(&pod('2')), "its containers count together");
    }

    #[test]
    fn programs_of_a_claim_in_different_pods_share_one_limit() {
        let uid = "11234567-89ab-cdef-0123-456789abcdef";
        let with = |claim: &str, path: &str| {
            let claim = Claim { uid: claim.into(), namespace: "team-a".into(), name: "half".into() };
            Identity { claim, ..who(0, path) }
        };
        let (one, other) = (with(uid, "/kubepods/podx/a"), with(uid, "/kubepods/pody/b"));
        for (pattern, expected) in [("team-a/half", true), ("team-b/*", false), (uid, true), ("*", true), ("2*", false)]
        {
            assert_eq!(matches(&format!("claim = {pattern:?}"), &one), expected, "{pattern}");
            assert!(!matches(&format!("claim = {pattern:?}"), &with("", "/kubepods/podx/a")), "{pattern}");
        }
        let rules = rules("[[rule]]\nclaim = \"team-a/*\"\nmemory-max = \"1G\"");
        let instance = |who: &Identity| rules.of(who).expect("the rule").1;
        assert_eq!(instance(&one), instance(&other));
        assert_eq!(instance(&one).programs(), format!("claim={uid}"));
        let another = with("21234567-89ab-cdef-0123-456789abcdef", "/kubepods/podx/a");
        assert_ne!(instance(&one), instance(&another));
    }

    #[test]
    fn the_first_matching_rule_applies() {
        let rules = rules(
            "[[rule]]\nname = \"one\"\nuser = 1\nmemory-max = \"1G\"\n[[rule]]\nname = \"lab\"\ngroup = 50\nmemory-max = \"2G\"\n\
             [[rule]]\nname = \"all\"\nmemory-max = \"3G\"\n",
        );
        let name = |who: &Identity| rules.of(who).map(|(rule, instance)| (rule.name.clone(), instance.rule));
        assert_eq!(name(&who(1, "/a")), Some(("one".into(), 0)));
        assert_eq!(name(&who(2, "/a")), Some(("lab".into(), 1)));
        assert_eq!(name(&Identity::default()), Some(("all".into(), 2)));
    }

    #[test]
    fn clients_matched_by_the_same_pattern_share_one_limit() {
        let session = |n: u32| format!("/user.slice/user-1000.slice/session-{n}.scope");
        let together = |lines: &str, one: &Identity, other: &Identity| {
            let rules = rules(&format!("[[rule]]\n{lines}\nmemory-max = \"1G\""));
            let instance = |who| rules.of(who).unwrap_or_else(|| panic!("{lines} of {who:?}")).1;
            instance(one) == instance(other)
        };
        let (a, b) = (who(1, "/system.slice/a.service"), who(1, "/system.slice/b.service"));
        assert!(!together("unit = \"*.service\"", &a, &b), "each unit");
        assert!(together("unit = \"*.service\"", &a, &who(2, "/system.slice/a.service/x")), "whoever is in it");
        assert!(together("slice = \"system.slice\"", &a, &b));
        // All jobs of Slurm run in the same unit.
        let job =
            |job: u32, task: u32| who(1, &format!("/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_{task}"));
        assert!(together("unit = \"slurm*\"", &job(1, 0), &job(2, 0)));
        let each_job = "unit = \"/system.slice/slurmstepd.scope/job_*\"";
        assert!(together(each_job, &job(1, 0), &job(1, 1)) && !together(each_job, &job(1, 0), &job(2, 0)), "each job");
        assert!(together("user = 1", &a, &b));
        assert!(together("group = 50", &a, &b), "each user of a group");
        assert!(!together("group = 50", &a, &who(2, "/system.slice/a.service")));
        assert!(!together("", &a, &b), "each unit, where nothing is named");
        assert!(together("", &who(1000, &session(1)), &who(1000, &session(2))), "but sessions are their user's");
        assert!(!together("", &who(1000, &session(1)), &who(1001, &session(1))));
        let inside = |last: char| {
            let id: String = ID.chars().take(63).chain([last]).collect();
            who(0, &format!("/docker/{id}"))
        };
        assert!(!together("", &inside('1'), &inside('2')), "each container");
        assert!(together("", &inside('1'), &Identity { uid: 5, ..inside('1') }));
    }
}
