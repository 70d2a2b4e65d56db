//! Tests of the agent with the real scheduler. Pods are added, changed and removed, and the agent
//! sends each change to the scheduler.

use crate::support::api::{container, pod, uid};
use crate::support::containers::{Inmate, stay_connected};
use crate::support::{Node, said};
use serde_json::{Value, json};

#[test]
#[ignore = "is run by tests, as a process of its own"]
fn helper_stays_connected() {
    stay_connected();
}

fn with(mut pod: Value, pointer: &str, value: Value) -> Value {
    *pod.pointer_mut(pointer).expect("a field") = value;
    pod
}

#[test]
fn rules_follow_added_changed_and_deleted_pods() {
    let node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/memory-max", "8G"), ("nvshare.com/weight", "50")]));
    node.api.put(pod(2, &[("example.com/weight", "50")]));
    let _scheduler = node.scheduler();
    let _agent = node.agent();
    node.until_rule("team-a/pod-1", "weight", "50");
    let rule = node.rules().remove("team-a/pod-1").expect("a rule");
    assert_eq!(said(&rule, "memory-max").as_deref(), Some("8589934592"));
    assert_eq!(said(&rule, "pod"), Some(uid(1)));
    assert_eq!(said(&rule, "origin").as_deref(), Some("the pod's annotations"));
    assert!(!node.rules().contains_key("team-a/pod-2"));

    node.api.put(pod(1, &[("nvshare.com/weight", "20"), ("nvshare.com/allowed-gpus", "0, 1")]));
    node.until_rule("team-a/pod-1", "weight", "20");
    assert!(said(&node.rules()["team-a/pod-1"], "memory-max").is_none());

    node.api.put(pod(3, &[("nvshare.com/affinity", "train"), ("nvshare.com/gang", "true")]));
    node.until_rule("team-a/pod-3", "affinity", "team-a/train");
    assert_eq!(said(&node.rules()["team-a/pod-3"], "gang").as_deref(), Some("true"));

    node.api.remove(&uid(1));
    node.until_no_rule("team-a/pod-1");
    let pod_3 = pod(3, &[("nvshare.com/affinity", "train")]);
    node.api.put(with(pod_3, "/status/phase", json!("Succeeded")));
    node.until_no_rule("team-a/pod-3");
}

#[test]
fn a_pods_annotations_apply_to_its_programs() {
    let node = Node::new();
    let scheduler = node.scheduler();
    let Some(_program) = Inmate::start(&node.path(""), &node.clients(), &uid(1), &container(1)) else { return };
    scheduler.log.wait(&format!("of pod {} connected", uid(1)));
    let client = |node: &Node| node.clients_listed().into_iter().find(|client| client.pod == uid(1));
    let unnamed = node.until("the client", client);
    assert_eq!((&*unnamed.pod_name, &*unnamed.rule), ("", ""));

    node.api.put(pod(1, &[("nvshare.com/weight", "30")]));
    let _agent = node.agent();
    let named = node.until("its name", |node| client(node).filter(|client| !client.pod_name.is_empty()));
    let names = (&*named.pod_namespace, &*named.pod_name, &*named.pod_container);
    assert_eq!(names, ("team-a", "pod-1", "main"));
    assert_eq!((&*named.rule, &*named.rule_origin), ("team-a/pod-1", "the pod's annotations"));
    assert_eq!(named.share, "weight 30");

    let another = Inmate::start(&node.path(""), &node.clients(), &uid(1), &container(1));
    scheduler.log.wait("of pod team-a/pod-1, container main, connected");
    drop(another);
    // The log shows that the client has ended or disconnected.
    scheduler.log.wait_for("of pod team-a/pod-1, container main, ", 2);

    node.api.remove(&uid(1));
    node.until("its name to be gone", |node| client(node).filter(|client| client.pod_name.is_empty()));
}

#[test]
fn a_default_weight_has_the_agents_configuration_as_its_origin() {
    let node = Node::new();
    node.configure("[[namespaces]]\nname = \"*\"\nweight = 100\n");
    node.api.put(pod(1, &[]));
    node.api.put(pod(2, &[("nvshare.com/memory-max", "8G")]));
    let _scheduler = node.scheduler();
    let _agent = node.agent();
    node.until_rule("team-a/pod-1", "weight", "100");
    node.until_rule("team-a/pod-2", "weight", "100");
    let rules = node.rules();
    let origin = |pod: &str| said(&rules[pod], "origin").unwrap_or_default();
    assert_eq!(origin("team-a/pod-1"), "the agent's configuration");
    assert_eq!(origin("team-a/pod-2"), "the pod's annotations and the agent's configuration");
}

#[test]
fn an_administrators_rule_precedes_a_pods_annotations() {
    let node = Node::new();
    node.rule("name = \"team a\"\npod = \"team-a/*\"\nweight = 10");
    let _scheduler = node.scheduler();
    let Some(_program) = Inmate::start(&node.path(""), &node.clients(), &uid(1), &container(1)) else { return };
    node.api.put(pod(1, &[("nvshare.com/weight", "30")]));
    let _agent = node.agent();
    let client = |node: &Node| node.clients_listed().into_iter().find(|client| !client.pod_name.is_empty());
    let named = node.until("its name", client);
    assert_eq!((&*named.rule, &*named.share), ("team a", "weight 10"));
}

#[test]
fn a_static_pod_is_identified_by_the_uid_in_its_cgroup() {
    let node = Node::new();
    let _scheduler = node.scheduler();
    let hash = "0123456789abcdef0123456789abcdef";
    let Some(_program) = Inmate::start(&node.path(""), &node.clients(), hash, &container(1)) else { return };
    node.api.put(pod(1, &[("kubernetes.io/config.hash", hash), ("kubernetes.io/config.mirror", hash)]));
    let _agent = node.agent();
    let client = |node: &Node| node.clients_listed().into_iter().find(|client| client.pod_name == "pod-1");
    assert_eq!(node.until("its name", client).pod, hash);
}

#[test]
fn the_agent_requests_only_its_own_nodes_pods() {
    let node = Node::new();
    node.api.put(with(pod(1, &[("nvshare.com/weight", "30")]), "/spec/nodeName", json!("node-2")));
    node.api.put(pod(2, &[("nvshare.com/weight", "30")]));
    let _scheduler = node.scheduler();
    let _agent = node.agent();
    node.until_rule("team-a/pod-2", "weight", "30");
    assert!(!node.rules().contains_key("team-a/pod-1"));
    assert_eq!(node.api.requests("fieldSelector=spec.nodeName%3Dnode-1").len(), node.api.requests("").len());
}

#[test]
fn forbidden_annotations_are_ignored_until_a_reload_permits_them() {
    let node = Node::new();
    node.configure("");
    let greedy = [("nvshare.com/weight", "200"), ("nvshare.com/time-min", "20%"), ("nvshare.com/memory-max", "8G")];
    node.api.put(pod(1, &greedy));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    node.until_rule("team-a/pod-1", "memory-max", "8589934592");
    let rule = &node.rules()["team-a/pod-1"];
    assert_eq!((said(rule, "weight"), said(rule, "time-min")), (None, None));
    agent.log.wait(
        "pod team-a/pod-1: ignoring its annotation nvshare.com/weight: pods of namespace team-a may set at most 100",
    );
    agent.log.wait(
        "pod team-a/pod-1: ignoring its annotation nvshare.com/time-min: pods of namespace team-a may not set it",
    );

    node.configure("[[namespaces]]\nname = \"team-*\"\nmay-set = [\"weight\", \"time-min\"]\nweight-max = 200\ntime-min-max = \"20%\"\n");
    agent.signal(libc::SIGHUP);
    node.until_rule("team-a/pod-1", "weight", "200");
    let rule = &node.rules()["team-a/pod-1"];
    assert_eq!((said(rule, "memory-max"), said(rule, "time-min").as_deref()), (None, Some("20%")));

    node.configure("[[namespaces]]\nname = 5\n");
    agent.signal(libc::SIGHUP);
    agent.log.wait("cannot reload the configuration, keeping the current one:");
    assert_eq!(said(&node.rules()["team-a/pod-1"], "weight").as_deref(), Some("200"));
    let output = node.ask_agent("--check-config");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("agent.toml:2:8: "), "{output:?}");
}

#[test]
fn a_rejected_annotation_is_logged_once_and_discards_the_pods_rule() {
    let node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/memory-max", "much"), ("nvshare.com/weight", "5")]));
    node.api.put(pod(2, &[("nvshare.com/weight", "5")]));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    node.until_rule("team-a/pod-2", "weight", "5");
    let said = "pod team-a/pod-1: the scheduler refuses its rule: memory-max cannot be \"much\"";
    agent.log.wait(said);
    node.api.put(pod(2, &[("nvshare.com/weight", "6")]));
    node.until_rule("team-a/pod-2", "weight", "6");
    agent.log.wait_for("pods to the scheduler in", 2);
    assert_eq!(agent.log.count(said), 1);
    assert!(!node.rules().contains_key("team-a/pod-1"));
}

#[test]
fn updates_are_batched_and_unchanged_pods_are_not_sent() {
    let node = Node::new();
    node.api.put(pod(1, &[]));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    agent.log.wait("sent 1 pods");
    // Only the pod's status changes, so no message to the scheduler is needed.
    for ready in ["False", "True", "False"] {
        node.api.put(with(pod(1, &[]), "/status/conditions/0/status", json!(ready)));
    }
    agent.log.wait("1 pods, unchanged");
    assert_eq!(agent.log.count("pods to the scheduler in"), 1);
    for number in 2..302 {
        node.api.put(pod(number, &[]));
    }
    agent.log.wait("sent 301 pods");
    let count = agent.log.count("pods to the scheduler in");
    assert!(count < 60, "{count} times for 300 pods");
}

#[test]
fn the_probe_needs_both_connections_and_sigterm_ends_the_agent() {
    let mut node = Node::new();
    assert!(node.probe().contains("no agent answers"));
    let scheduler = node.scheduler();
    let mut agent = node.agent();
    node.until("both", |node| node.probe().is_empty().then_some(()));
    scheduler.kill();
    node.until("the scheduler's end", |node| node.probe().contains("scheduler").then_some(()));
    let _scheduler = node.scheduler();
    node.until("both", |node| node.probe().is_empty().then_some(()));
    node.api.stop();
    node.until("the API server's end", |node| node.probe().contains("the API server").then_some(()));
    agent.signal(libc::SIGTERM);
    assert!(agent.wait().success());
    assert!(!node.path("agent/agent.sock").exists());
}
