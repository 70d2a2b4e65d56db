//! Tests that hostile annotations and invalid answers of the API server do not harm the agent.

use crate::support::Node;
use crate::support::api::{pod, uid};

#[test]
fn hostile_annotations_do_not_affect_other_pods() {
    let node = Node::new();
    let huge = "8".repeat(200_000);
    let unknown: Vec<(String, String)> =
        (0..200).map(|n| (format!("nvshare.com/key-{n}"), "\u{1b}[2J".into())).collect();
    let unknown: Vec<(&str, &str)> = unknown.iter().map(|(name, text)| (&**name, &**text)).collect();
    let hostile: [&[(&str, &str)]; 9] = [
        &[("nvshare.com/memory-max", &huge)],
        &[("nvshare.com/memory-max", "\u{1b}]0;owned\u{7}\r\nWARN pod team-a/pod-8: forged")],
        &[("nvshare.com/affinity", "a\u{0}\"]\npod = \"*\"")],
        &[("nvshare.com/", "1"), ("nvshare.com/pod", "*"), ("nvshare.com/user", "root"), ("nvshare.com/name", "x")],
        &[("nvshare.com/weight", "99999999999999999999"), ("nvshare.com/priority", "-9223372036854775808")],
        &[("nvshare.com/allowed-gpus", ",,,"), ("nvshare.com/gang", "TRUE")],
        &unknown,
        &[
            ("kubernetes.io/config.hash", &uid(9)),
            ("kubernetes.io/config.mirror", &uid(9)),
            ("nvshare.com/weight", "1"),
        ],
        &[("nvshare.com/weight", "77")],
    ];
    for (annotations, number) in hostile.iter().zip(1..) {
        node.api.put(pod(number, annotations));
    }
    let _scheduler = node.scheduler();
    let agent = node.agent();
    node.until_rule("team-a/pod-9", "weight", "77");
    node.until_rule("team-a/pod-8", "pod", &uid(8));
    agent.log.wait("the scheduler refuses its rule");
    let mut names: Vec<String> = node.rules().into_keys().collect();
    names.sort();
    assert_eq!(names, ["team-a/pod-8", "team-a/pod-9"]);
    let lines = agent.log.lines();
    assert!(lines.iter().all(|line| line.len() < 1000 && !line.chars().any(char::is_control)), "{lines:?}");
    assert!(!lines.iter().any(|line| line.starts_with("WARN")), "{lines:?}");
    assert!(agent.log.count("pod team-a/pod-7:") <= 11);
}

#[test]
fn ten_thousand_pods_are_cut_off_at_the_schedulers_limit() {
    let node = Node::new();
    for number in 1..=10_000 {
        node.api.put(pod(number, &[("nvshare.com/weight", "50")]));
    }
    let _scheduler = node.scheduler();
    let agent = node.agent();
    agent.log.wait("sent 5000 pods");
    assert_eq!(agent.log.count("this node has 10000 pods, but the scheduler accepts only 5000"), 1);
    assert_eq!(node.rules().len(), 5000);
    node.api.put(pod(1, &[("nvshare.com/weight", "60")]));
    node.until_rule("team-a/pod-1", "weight", "60");
}

#[test]
fn the_agent_survives_invalid_api_server_responses() {
    let node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/weight", "50")]));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    for (line, weight) in [
        ("nonsense", "51"),
        ("{\"type\": \"LATER\", \"object\": {}}", "52"),
        ("{\"type\": \"ADDED\", \"object\": {\"metadata\": {\"uid\": 5}}}", "53"),
        ("{\"type\": \"ERROR\", \"object\": {\"code\": 500, \"message\": \"etcd \\u001b[2J is gone\"}}", "54"),
        ("{\"type\": \"ADDED\", \"object\": {\"metadata\": null, \"status\": null}}", "55"),
        ("{\"type\": \"MODIFIED\", \"object\": {}}", "56"),
        ("", "57"),
    ] {
        node.until("a watch", |node| node.probe().is_empty().then_some(()));
        node.api.babble(line);
        node.api.put(pod(1, &[("nvshare.com/weight", weight)]));
        node.until_rule("team-a/pod-1", "weight", weight);
    }
    assert!(agent.log.lines().iter().all(|line| !line.chars().any(char::is_control)));
}
