//! The current pods of the node, and the message to the scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nvshare::bus::{self, MAX_PODS};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};

use crate::annotations::{self, PodRule};
use crate::config::Config;
use crate::pod::{KnownPod, Pod};
use crate::pod_warnings::PodWarnings;

/// Changes within this time are sent in one message, because a starting pod changes several times.
const GATHER: Duration = Duration::from_millis(100);

/// A change reported by Kubernetes.
#[derive(Debug)]
pub enum Change {
    /// All pods of the node.
    Listed(Vec<Pod>),
    Applied(Pod),
    Deleted(Pod),
}

/// The pods as the scheduler receives them. `None` until Kubernetes has listed them.
pub type Told = Option<Arc<Vec<bus::Pod>>>;

/// The pods, by their UIDs in Kubernetes.
#[derive(Debug, Default)]
pub struct Node {
    pods: Option<BTreeMap<String, KnownPod>>,
    warnings: PodWarnings,
    is_crowded: bool,
}

impl Node {
    pub fn change(&mut self, change: Change) {
        let known = |pod: Pod| (pod.metadata.uid.clone(), KnownPod::read(pod));
        let pods = match (change, &mut self.pods) {
            (Change::Listed(all), pods) => {
                let all = all.into_iter().map(known).filter_map(|(uid, pod)| Some((uid, pod?)));
                *pods = Some(all.collect());
                return;
            }
            (Change::Applied(pod), Some(pods)) => (known(pod), pods),
            (Change::Deleted(pod), Some(pods)) => ((pod.metadata.uid, None), pods),
            // No changes occur before the first list.
            (_, None) => return,
        };
        match pods {
            ((uid, Some(pod)), pods) => drop(pods.insert(uid, pod)),
            ((uid, None), pods) => drop(pods.remove(&uid)),
        }
    }

    /// Returns the pods for the scheduler. Logs each invalid annotation once.
    pub fn told(&mut self, config: &Config) -> Told {
        let pods = self.pods.as_ref()?;
        let mut all: Vec<&KnownPod> = pods.values().collect();
        // Two pods have the same UID only if one of them falsely claims to be a static pod. The
        // older pod is genuine.
        all.sort_by(|a, b| (&a.uid, &a.created, a.full_name()).cmp(&(&b.uid, &b.created, b.full_name())));
        all.dedup_by(|later, first| later.uid == first.uid);
        let is_crowded = all.len() > MAX_PODS;
        if is_crowded && !self.is_crowded {
            let count = all.len();
            warn!(
                "this node has {count} pods, but the scheduler accepts only {MAX_PODS}. The scheduler does not know \
                 the names of the other pods"
            );
        }
        self.is_crowded = is_crowded;
        all.truncate(MAX_PODS);
        let mut there = BTreeSet::new();
        let mut told = Vec::with_capacity(all.len());
        for pod in all {
            let PodRule { keys, defaults, left_out } =
                annotations::read(&pod.namespace, &pod.annotations, config.of(&pod.namespace));
            for what in left_out {
                self.warnings.log(&pod.uid, &pod.full_name(), &what);
            }
            there.insert(pod.uid.as_str());
            told.push(bus::Pod {
                uid: pod.uid.clone(),
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                containers: pod.containers.clone(),
                rule: annotations::variants(&keys),
                defaults: Some(defaults.into_iter().map(str::to_owned).collect()),
            });
        }
        self.warnings.keep(|uid| there.contains(uid));
        Some(Arc::new(told))
    }
}

/// Receives changes, and sends the pods to the scheduler, until the sender of changes is dropped.
pub async fn keep(
    mut changes: mpsc::Receiver<Change>,
    mut config: watch::Receiver<Arc<Config>>,
    told: watch::Sender<Told>,
) {
    let mut node = Node::default();
    loop {
        tokio::select! {
            change = changes.recv() => match change {
                Some(change) => node.change(change),
                None => return,
            },
            Ok(()) = config.changed() => {}
        }
        let until = Instant::now() + GATHER;
        while let Ok(Some(change)) = timeout_at(until, changes.recv()).await {
            node.change(change);
        }
        let now = node.told(&config.borrow_and_update());
        let count = now.as_ref().map_or(0, |pods| pods.len());
        let is_news = told.send_if_modified(|before| {
            let is_news = *before != now;
            *before = now;
            is_news
        });
        debug!("{count} pods{}", if is_news { "" } else { ", unchanged" });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Metadata;

    fn pod(number: usize, name: &str) -> Pod {
        let uid = format!("{number:08x}-89ab-cdef-0123-456789abcdef");
        let metadata = Metadata { uid, namespace: "team-a".into(), name: name.into(), ..Metadata::default() };
        Pod { metadata, status: None }
    }

    fn names(node: &mut Node) -> Vec<String> {
        node.told(&Config::default()).expect("a list").iter().map(|pod| pod.name.clone()).collect()
    }

    #[test]
    fn no_pods_are_reported_before_the_first_full_list() {
        let mut node = Node::default();
        node.change(Change::Applied(pod(1, "a")));
        assert_eq!(node.told(&Config::default()), None);
        node.change(Change::Listed(Vec::new()));
        assert_eq!(names(&mut node), Vec::<String>::new());
    }

    #[test]
    fn a_new_list_replaces_the_known_pods() {
        let mut node = Node::default();
        node.change(Change::Listed(vec![pod(1, "a"), pod(2, "b")]));
        node.change(Change::Applied(pod(3, "c")));
        node.change(Change::Deleted(pod(1, "a")));
        assert_eq!(names(&mut node), ["b", "c"]);
        let mut ended = pod(2, "b");
        ended.status = Some(crate::pod::Status { phase: Some("Succeeded".into()), ..Default::default() });
        node.change(Change::Applied(ended));
        assert_eq!(names(&mut node), ["c"]);
        node.change(Change::Listed(vec![pod(4, "d")]));
        assert_eq!(names(&mut node), ["d"]);
    }

    #[test]
    fn the_oldest_mirror_pod_of_a_static_pod_is_reported() {
        let hash = "0123456789abcdef0123456789abcdef";
        let mirror = |number, name: &str, created: &str| {
            let mut pod = pod(number, name);
            let keys = ["kubernetes.io/config.hash", "kubernetes.io/config.mirror"];
            pod.metadata.annotations = Some(keys.map(|key| (key.to_owned(), hash.to_owned())).into());
            pod.metadata.creation_timestamp = Some(created.into());
            pod
        };
        let mut node = Node::default();
        let claims = [mirror(1, "false", "2026-01-02T00:00:01Z"), mirror(2, "true", "2026-01-02T00:00:00Z")];
        node.change(Change::Listed(claims.into()));
        assert_eq!(names(&mut node), ["true"]);
    }

    #[test]
    fn pods_beyond_the_schedulers_limit_are_dropped() {
        let mut node = Node::default();
        node.change(Change::Listed((0..10_000).map(|number| pod(number, "a")).collect()));
        assert_eq!(names(&mut node).len(), MAX_PODS);
    }
}
