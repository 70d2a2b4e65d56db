//! The parts of a Kubernetes pod that the agent needs.

use std::collections::{BTreeMap, HashMap};

use nvshare::bus::{is_pod_name, is_pod_uid};
use serde::Deserialize;

use crate::annotations::PREFIX;

/// Annotations of kubelet on mirror pods. A mirror pod represents a static pod of the node, but has
/// another UID. The annotations contain the UID of the static pod, which is part of the names of
/// its control groups.
const MIRROR: &str = "kubernetes.io/config.mirror";
const HASH: &str = "kubernetes.io/config.hash";

/// A pod in the API server's format.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Pod {
    #[serde(default)]
    pub metadata: Metadata,
    #[serde(default)]
    pub status: Option<Status>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub resource_version: String,
    pub creation_timestamp: Option<String>,
    pub annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    pub phase: Option<String>,
    pub container_statuses: Option<Vec<Container>>,
    pub init_container_statuses: Option<Vec<Container>>,
    pub ephemeral_container_statuses: Option<Vec<Container>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Container {
    pub name: String,
    /// The runtime's name and the container's id: `containerd://0123...`. Missing until the
    /// container has started.
    #[serde(rename = "containerID")]
    pub id: Option<String>,
}

/// A pod in which programs can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPod {
    /// The UID that is part of the names of the pod's control groups.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// The creation time in Kubernetes' notation, whose text order is the order of time.
    pub created: String,
    /// The name of each container, by its id.
    pub containers: HashMap<String, String>,
    /// The annotations for nvshare, by their names without the prefix.
    pub annotations: BTreeMap<String, String>,
}

impl KnownPod {
    /// Converts a pod. Returns `None` for a pod that has ended, and for an invalid object.
    pub fn read(pod: Pod) -> Option<Self> {
        let Pod { metadata, status } = pod;
        let status = status.unwrap_or_default();
        if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
            return None;
        }
        let Metadata { uid, namespace, name, creation_timestamp, annotations, .. } = metadata;
        let annotations = annotations.unwrap_or_default();
        let uid = of_node_itself(&annotations).unwrap_or(uid);
        if !(is_pod_uid(&uid) && is_pod_name(&namespace) && is_pod_name(&name)) {
            return None;
        }
        let Status { container_statuses, init_container_statuses, ephemeral_container_statuses, .. } = status;
        let lists = [container_statuses, init_container_statuses, ephemeral_container_statuses];
        let container = |container: Container| {
            let id = container.id?;
            let (_, id) = id.split_once("://")?;
            (is_pod_name(id) && is_pod_name(&container.name)).then(|| (id.to_owned(), container.name))
        };
        let containers = lists.into_iter().flatten().flatten().filter_map(container).collect();
        let wished = |(name, text): (String, String)| Some((name.strip_prefix(PREFIX)?.to_owned(), text));
        Some(Self {
            uid,
            namespace,
            name,
            created: creation_timestamp.unwrap_or_default(),
            containers,
            annotations: annotations.into_iter().filter_map(wished).collect(),
        })
    }

    /// Returns `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Returns the UID of a static pod. Any user may write annotations. A UID with dashes could be the
/// UID of another pod, so this function rejects it.
fn of_node_itself(annotations: &BTreeMap<String, String>) -> Option<String> {
    let hash = annotations.get(HASH).filter(|hash| annotations.get(MIRROR) == Some(hash))?;
    (hash.len() == 32 && hash.bytes().all(|b| b.is_ascii_hexdigit())).then(|| hash.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "01234567-89ab-cdef-0123-456789abcdef";
    const HASHED: &str = "0123456789abcdef0123456789abcdef";

    fn read(json: &str) -> Option<KnownPod> {
        KnownPod::read(serde_json::from_str(json).expect("JSON"))
    }

    fn with(annotations: &str, status: &str) -> Option<KnownPod> {
        read(&format!(
            r#"{{"apiVersion": "v1", "kind": "Pod", "spec": {{"containers": [{{"name": "main", "image": "x"}}]}},
               "metadata": {{"uid": "{UID}", "namespace": "team-a", "name": "train-0", "managedFields": [{{}}],
               "creationTimestamp": "2026-01-02T03:04:05Z", "annotations": {annotations}}}, "status": {status}}}"#
        ))
    }

    #[test]
    fn a_pod_lists_containers_of_every_kind_and_runtime() {
        let status = r#"{"phase": "Running",
            "containerStatuses": [{"name": "main", "containerID": "containerd://aa"}, {"name": "late", "containerID": ""}],
            "initContainerStatuses": [{"name": "setup", "containerID": "cri-o://bb"}, {"name": "waits"}],
            "ephemeralContainerStatuses": [{"name": "debug", "containerID": "docker://cc"}]}"#;
        let pod = with(r#"{"nvshare.com/weight": "50", "example.com/weight": "7"}"#, status).expect("a pod");
        let names = [("aa", "main"), ("bb", "setup"), ("cc", "debug")].map(|(id, name)| (id.into(), name.into()));
        assert_eq!(pod.containers, HashMap::from(names));
        assert_eq!(pod.annotations, BTreeMap::from([("weight".to_owned(), "50".to_owned())]));
        assert_eq!((pod.full_name().as_str(), pod.uid.as_str()), ("team-a/train-0", UID));
    }

    #[test]
    fn pending_and_running_pods_are_reported_and_ended_pods_are_not() {
        for (phase, counts) in
            [("Pending", true), ("Running", true), ("Unknown", true), ("Succeeded", false), ("Failed", false)]
        {
            assert_eq!(with("null", &format!(r#"{{"phase": "{phase}"}}"#)).is_some(), counts, "{phase}");
        }
        assert!(with("{}", "null").is_some());
    }

    #[test]
    fn only_a_static_pods_mirror_is_identified_by_its_config_hash() {
        let claims = |hash: &str, mirror: &str| {
            with(&format!(r#"{{"{HASH}": "{hash}", "{MIRROR}": "{mirror}"}}"#), "{}").expect("a pod").uid
        };
        assert_eq!(claims(HASHED, HASHED), HASHED);
        let victim = "76543210-89ab-cdef-0123-456789abcdef";
        assert_eq!(claims(victim, victim), UID);
        assert_eq!(claims(HASHED, "other"), UID);
        assert_eq!(with(&format!(r#"{{"{HASH}": "{HASHED}"}}"#), "{}").map(|pod| pod.uid).as_deref(), Some(UID));
    }

    #[test]
    fn invalid_pod_metadata_is_rejected() {
        for (uid, namespace, name) in [("", "a", "b"), (UID, "", "b"), (UID, "a", "b\u{1b}"), ("x/../y", "a", "b")] {
            let metadata =
                Metadata { uid: uid.into(), namespace: namespace.into(), name: name.into(), ..Default::default() };
            assert_eq!(KnownPod::read(Pod { metadata, status: None }), None, "{uid} {namespace} {name:?}");
        }
    }
}
