//! Tests that the agent survives missing and restarted schedulers and API servers.

use std::cell::RefCell;
use std::time::Duration;

use crate::support::Node;
use crate::support::api::{pod, uid};

#[test]
fn a_late_or_restarted_scheduler_receives_all_pods() {
    let node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/weight", "50")]));
    let agent = node.agent();
    agent.log.wait("cannot connect to the scheduler at");
    agent.log.wait("connected to the API server");
    let scheduler = node.scheduler();
    node.until_rule("team-a/pod-1", "weight", "50");
    assert_eq!(agent.log.count("cannot connect to the scheduler at"), 1);

    scheduler.kill();
    agent.log.wait("lost the connection to the scheduler");
    // The agent receives this change only after the restart.
    node.api.put(pod(1, &[("nvshare.com/weight", "60")]));
    let _scheduler = node.scheduler();
    node.until_rule("team-a/pod-1", "weight", "60");
    agent.log.wait_for("connected to the scheduler", 2);
    assert_eq!(agent.log.count("the scheduler knows 1 pods"), 2);
    assert_eq!(agent.log.count(". Retrying"), 2);
}

#[test]
fn known_pods_are_kept_while_the_api_server_is_down() {
    let mut node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/weight", "50")]));
    node.api.put(pod(2, &[("nvshare.com/weight", "50")]));
    let scheduler = node.scheduler();
    let agent = node.agent();
    node.until_rule("team-a/pod-1", "weight", "50");
    node.api.stop();
    agent.log.wait("cannot reach the API server");
    scheduler.kill();
    let _scheduler = node.scheduler();
    node.until_rule("team-a/pod-1", "weight", "50");
    node.api.remove(&uid(1));
    node.api.put(pod(2, &[("nvshare.com/weight", "60")]));
    node.api.start_again();
    node.until_rule("team-a/pod-2", "weight", "60");
    node.until_no_rule("team-a/pod-1");
    agent.log.wait_for("connected to the API server", 2);
    assert_eq!(agent.log.count("cannot reach the API server"), 1);
}

#[test]
fn a_broken_watch_resumes_at_its_resource_version() {
    let node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/weight", "50")]));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    node.until_rule("team-a/pod-1", "weight", "50");
    node.until("a watch", |node| (node.api.watches() == 1).then_some(()));
    node.api.break_streams();
    node.api.put(pod(1, &[("nvshare.com/weight", "60")]));
    node.until_rule("team-a/pod-1", "weight", "60");
    // If no other event has arrived since a bookmark, the watch resumes at the bookmark's version.
    let bookmarks = RefCell::new(Vec::new());
    node.until("a watch from a bookmark", |node| {
        bookmarks.borrow_mut().push(format!("resourceVersion={}", node.api.bookmark()));
        std::thread::sleep(Duration::from_millis(50));
        node.api.break_streams();
        bookmarks.borrow().iter().any(|version| !node.api.requests(version).is_empty()).then_some(())
    });
    assert_eq!(node.api.lists(), 1);
    assert_eq!(agent.log.count("WARN"), 0, "{:?}", agent.log.lines());
}

#[test]
fn an_expired_resource_version_triggers_a_new_list() {
    let node = Node::new();
    node.api.put(pod(1, &[("nvshare.com/weight", "50")]));
    node.api.put(pod(2, &[("nvshare.com/weight", "50")]));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    node.until_rule("team-a/pod-1", "weight", "50");
    node.until("a watch", |node| (node.api.watches() == 1).then_some(()));
    for (says_so, weight, removed) in [(true, "60", 1), (false, "70", 3)] {
        node.api.put(pod(3, &[("nvshare.com/weight", "1")]));
        node.until_rule("team-a/pod-3", "weight", "1");
        let lists = node.api.lists();
        // No watcher is notified of these changes.
        node.api.forget(says_so);
        node.api.remove(&uid(removed));
        node.api.put(pod(2, &[("nvshare.com/weight", weight)]));
        node.api.forget(false);
        node.until_rule("team-a/pod-2", "weight", weight);
        node.until_no_rule(&format!("team-a/pod-{removed}"));
        assert!(node.api.lists() > lists);
    }
    assert_eq!(agent.log.count("WARN"), 0, "{:?}", agent.log.lines());
}

#[test]
fn a_forbidden_list_is_logged_once_with_the_required_permission() {
    let node = Node::new();
    node.api.forbid(true);
    node.api.put(pod(1, &[("nvshare.com/weight", "50")]));
    let _scheduler = node.scheduler();
    let agent = node.agent();
    agent.log.wait(
        "does not allow the agent to list pods. Its service account needs \"list\" and \"watch\" (pods is forbidden",
    );
    node.until("some tries", |node| (node.api.lists() > 3).then_some(()));
    assert_eq!(agent.log.count("does not allow the agent"), 1);
    assert!(node.probe().contains("does not allow the agent"), "{}", node.probe());
    node.api.forbid(false);
    node.until_rule("team-a/pod-1", "weight", "50");
    node.until("the probe", |node| node.probe().is_empty().then_some(()));
}
