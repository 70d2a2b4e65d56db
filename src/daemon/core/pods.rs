//! The pods of this node, as reported by the agent. A report contains the names for the UIDs in
//! control groups, and the pods' rules.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::bus::rules::table;
use crate::bus::{self, MAX_PODS, is_pod_name, is_pod_uid};
use crate::config::rules::{Origin, Rule, SUBJECT_KEYS, read_one};
use crate::identity::Identity;

/// Pods by UID.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pods(BTreeMap<String, Known>);

#[derive(Debug, Clone, PartialEq)]
struct Known {
    namespace: String,
    name: String,
    /// Container names by container ID.
    containers: HashMap<String, String>,
    rule: Option<Rule>,
}

/// The reasons why pods' rules were refused, by pod UID.
pub type Refused = HashMap<String, String>;

impl Pods {
    /// Validates the pods that an agent sent. A pod with an invalid rule is kept without the rule.
    ///
    /// # Errors
    /// Returns a sentence if the list as a whole is invalid.
    pub fn read(pods_of_node: Vec<bus::Pod>) -> Result<(Self, Refused), String> {
        if pods_of_node.len() > MAX_PODS {
            return Err(format!("too many pods for a node: {}. At most {MAX_PODS} are allowed", pods_of_node.len()));
        }
        let (mut pods, mut refused) = (Self::default(), Refused::new());
        for pod in pods_of_node {
            let bus::Pod { uid, namespace, name, containers, rule, defaults } = pod;
            if !is_pod_uid(&uid) {
                return Err(format!("{uid:?} is not the UID of a pod"));
            }
            for text in [&namespace, &name].into_iter().chain(containers.values()) {
                if !is_pod_name(text) {
                    return Err(format!("pod {uid}: {text:?} is not a valid Kubernetes name"));
                }
            }
            let origin = origin(&rule, &defaults.unwrap_or_default());
            let read = match rule.is_empty() {
                true => Ok(None),
                false => read_rule("pod", &uid, &format!("{namespace}/{name}"), &rule, &origin).map(Some),
            };
            let rule = read.unwrap_or_else(|why| {
                refused.insert(uid.clone(), why);
                None
            });
            pods.0.insert(uid, Known { namespace, name, containers, rule });
        }
        Ok((pods, refused))
    }

    /// Removes rules that contradict other rules. Returns the reasons, by pod UID.
    pub fn reconcile(&mut self, contradicted: impl Fn(&Rule, &[Rule]) -> Option<String>) -> Refused {
        let (mut kept, mut refused) = (Vec::new(), Refused::new());
        for (uid, pod) in &mut self.0 {
            let Some(rule) = &pod.rule else { continue };
            match contradicted(rule, &kept) {
                None => kept.push(rule.clone()),
                Some(why) => {
                    refused.insert(uid.clone(), why);
                    pod.rule = None;
                }
            }
        }
        refused
    }

    /// The rules of pods.
    pub fn rules(&self) -> Vec<Rule> {
        self.0.values().filter_map(|pod| pod.rule.clone()).collect()
    }

    /// Adds the names of a process's pod and container to its identity.
    pub fn name(&self, identity: &mut Arc<Identity>) {
        if identity.pod.uid.is_empty() {
            return;
        }
        let known = self.0.get(&identity.pod.uid);
        let mut pod = identity.pod.clone();
        let of_container = || {
            let (_, id) = identity.cgroup.of_system().container?;
            Some(known?.containers.get(id)?.clone())
        };
        pod.container = of_container().unwrap_or_default();
        pod.namespace = known.map_or_else(String::new, |known| known.namespace.clone());
        pod.name = known.map_or_else(String::new, |known| known.name.clone());
        if pod != identity.pod {
            Arc::make_mut(identity).pod = pod;
        }
    }
}

/// The source of a rule: the pod's annotations, the agent's configuration, or both.
fn origin(rule: &HashMap<String, zbus::OwnedVariant>, defaults: &[String]) -> String {
    let (of_agent, of_pod) = ("the agent's configuration", "the pod's annotations");
    match rule.keys().filter(|key| defaults.contains(key)).count() {
        0 => of_pod.to_owned(),
        count if count == rule.len() => of_agent.to_owned(),
        _ => format!("{of_pod} and {of_agent}"),
    }
}

/// Reads the rule of one pod or one claim (`kind`). The rule applies only to that pod or claim.
pub(super) fn read_rule(
    kind: &str,
    uid: &str,
    name: &str,
    rule: &HashMap<String, zbus::OwnedVariant>,
    origin: &str,
) -> Result<Rule, String> {
    let mut keys = table(rule)?;
    if let Some(key) = SUBJECT_KEYS.into_iter().find(|key| keys.contains_key(*key)) {
        return Err(format!("{key} is not allowed in the rule of a {kind}, because it always selects that {kind}"));
    }
    keys.insert(kind.into(), uid.into());
    keys.insert("name".into(), name.into());
    read_one(&keys.to_string(), Origin { file: origin.into(), line: 0 })
}

#[cfg(test)]
mod tests {
    use zbus::{OwnedVariant, Variant};

    use super::*;
    use crate::identity::Cgroup;

    const UID: &str = "01234567-89ab-cdef-0123-456789abcdef";
    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn pod(rule: &[(&str, &str)]) -> bus::Pod {
        let value = |text: &str| OwnedVariant::try_from(Variant::from(text)).expect("a value");
        bus::Pod {
            uid: UID.into(),
            namespace: "team-a".into(),
            name: "train-0".into(),
            containers: HashMap::from([(ID.to_owned(), "main".to_owned())]),
            rule: rule.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect(),
            defaults: None,
        }
    }

    #[test]
    fn a_pod_rules_origin_distinguishes_annotations_and_defaults() {
        let origin = |defaults: Option<&[&str]>| {
            let defaults = defaults.map(|keys| keys.iter().map(|key| (*key).to_owned()).collect());
            let pod = bus::Pod { defaults, ..pod(&[("memory-max", "8G"), ("time-max", "20%")]) };
            Pods::read(vec![pod]).expect("a pod").0.rules()[0].origin.to_string()
        };
        assert_eq!(origin(None), "the pod's annotations");
        assert_eq!(origin(Some(&["weight"])), "the pod's annotations");
        assert_eq!(origin(Some(&["time-max"])), "the pod's annotations and the agent's configuration");
        assert_eq!(origin(Some(&["memory-max", "time-max"])), "the agent's configuration");
    }

    #[test]
    fn a_client_has_its_pods_names_while_the_pod_is_known() {
        let (pods, refused) = Pods::read(vec![pod(&[("memory-max", "8G")])]).expect("a pod");
        assert_eq!((pods.rules().len(), refused.len()), (1, 0));
        let cgroup = Cgroup { path: format!("/kubepods/pod{UID}/{ID}") };
        let mut identity = Identity { cgroup, ..Identity::default() };
        identity.pod.uid = UID.into();
        let mut identity = Arc::new(identity);
        pods.name(&mut identity);
        assert_eq!(
            (&*identity.pod.namespace, &*identity.pod.name, &*identity.pod.container),
            ("team-a", "train-0", "main")
        );
        Pods::default().name(&mut identity);
        assert_eq!((&*identity.pod.uid, &*identity.pod.name), (UID, ""));
    }

    #[test]
    fn a_pod_with_invalid_annotations_is_known_without_a_rule() {
        let wrong = [("memory-max", "much"), ("user", "root"), ("pod", "*"), ("colour", "red"), ("time-min", "120%")];
        for (key, value) in wrong {
            let (pods, refused) = Pods::read(vec![pod(&[(key, value)])]).expect("a pod");
            assert!(pods.rules().is_empty() && pods.0.contains_key(UID), "{key}");
            assert!(refused.get(UID).is_some_and(|why| why.contains(key) || why.contains(value)), "{key}: {refused:?}");
        }
    }

    #[test]
    fn an_invalid_pod_is_an_error() {
        for (uid, name) in [("x", "a"), (UID, ""), (UID, "a b"), (UID, "a\u{1b}"), (UID, &"x".repeat(254))] {
            let pod = bus::Pod { uid: uid.into(), name: name.into(), ..pod(&[]) };
            assert!(Pods::read(vec![pod]).is_err(), "{uid} {name:?}");
        }
    }
}
