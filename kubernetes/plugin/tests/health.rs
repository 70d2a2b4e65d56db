//! Tests that GPUs become unhealthy, and healthy again, by the driver's events and answers and by
//! the scheduler's state.

use crate::support::kubelet::{Kubelet, Plugin, health};
use crate::support::{Node, PATIENCE, Process};
use cuda_sim_gpus::config::gpu_uuid;
use cuda_sim_gpus::trouble::{self, DOUBLE_BIT_ECC, Event, XID};

/// The plugin on a node with a running scheduler.
async fn watched(node: &Node) -> (Process, Kubelet, Plugin) {
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    let plugin = kubelet.plugin().await;
    (process, kubelet, plugin)
}

fn happens(node: &Node, gpu: usize, kind: u64, data: u64) {
    trouble::happen(&node.machine(), Event { gpu, kind, data }).expect("it is written");
}

#[tokio::test]
async fn an_xid_makes_a_gpu_unhealthy_until_the_driver_clears_it() {
    let node = Node::with_gpus(2);
    let _scheduler = node.scheduler();
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[true, true]).await;
    process.log.wait("watching driver events of");
    // The first XID is a program's own mistake, and the second is a fault of the GPU.
    happens(&node, 0, XID, 31);
    happens(&node, 1, XID, 79);
    plugin.until_healthy(&[true, false]).await;
    process.log.wait("is unhealthy: the driver reported XID 79");
    process.log.wait("ignoring Xid(31)");
    let ill = plugin.last.last().expect("a device").id.clone();
    let refused = plugin.allocate(&[&[&ill]]).await.expect_err("it is unhealthy");
    assert!(refused.message().contains("is unhealthy: the driver reported XID 79"), "{refused}");

    trouble::advise(&node.machine(), 1, Some(1)).expect("it is written");
    process.log.wait("is unhealthy: the driver reports that the GPU needs a reset");
    trouble::advise(&node.machine(), 1, Some(0)).expect("it is written");
    plugin.until_healthy(&[true, true]).await;
    plugin.allocate(&[&[&ill]]).await.expect("it is healthy again");
    happens(&node, 0, DOUBLE_BIT_ECC, 0);
    plugin.until_healthy(&[false, true]).await;
}

#[tokio::test]
async fn xids_can_be_ignored() {
    let node = Node::with_gpus(1);
    node.configure("[health]\nquery-interval = 1\nignored-xids = [79]\n");
    let _scheduler = node.scheduler();
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[true]).await;
    process.log.wait("watching driver events of");
    happens(&node, 0, XID, 79);
    process.log.wait("ignoring Xid(79)");
    happens(&node, 0, XID, 48);
    plugin.until_healthy(&[false]).await;
}

#[tokio::test]
async fn a_lost_gpu_is_unhealthy_until_nvml_reaches_it() {
    let node = Node::with_gpus(2);
    let _scheduler = node.scheduler();
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[true, true]).await;
    process.log.wait("watching driver events of");
    let gpus = health(&plugin.last);
    // This driver reports no recovery action, so only a reset of the GPU ends the fault.
    happens(&node, 0, XID, 79);
    plugin.until_healthy(&[false, true]).await;
    trouble::lose(&node.machine(), 0, true).expect("it is written");
    process.log.wait("is unhealthy: NVML cannot reach it");
    trouble::lose(&node.machine(), 0, false).expect("it is written");
    plugin.until_healthy(&[true, true]).await;
    assert_eq!(health(&plugin.last), gpus);
    // The plugin receives the GPU's events again.
    happens(&node, 0, XID, 79);
    plugin.until_healthy(&[false, true]).await;
}

#[tokio::test]
async fn gpus_are_polled_if_the_driver_supports_no_events() {
    let node = Node::with_gpus(2).without_events();
    let _scheduler = node.scheduler();
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[true, true]).await;
    process.log.wait("the driver supports no events, polling GPUs every 1 s");
    trouble::advise(&node.machine(), 0, Some(2)).expect("it is written");
    plugin.until_healthy(&[false, true]).await;
    process.log.wait("the driver reports that the GPU needs a reboot of the node");
    trouble::advise(&node.machine(), 0, None).expect("it is written");
    trouble::lose(&node.machine(), 1, true).expect("it is written");
    plugin.until_healthy(&[true, false]).await;
}

#[tokio::test]
async fn a_driver_loaded_after_the_start_is_detected() {
    let node = Node::with_gpus(1);
    let _scheduler = node.scheduler();
    trouble::unload(&node.machine(), true).expect("it is written");
    let (process, _kubelet, mut plugin) = watched(&node).await;
    process.log.wait("NVML cannot be used");
    // The scheduler found the GPU before the driver was unloaded, so its report suffices.
    plugin.until_healthy(&[true]).await;
    trouble::unload(&node.machine(), false).expect("it is written");
    process.log.wait("watching driver events of");
    happens(&node, 0, XID, 79);
    plugin.until_healthy(&[false]).await;
    assert_eq!(process.log.count("NVML cannot be used"), 1, "it is said once");
}

#[tokio::test]
async fn a_dead_or_hung_scheduler_makes_every_gpu_unhealthy() {
    let node = Node::with_gpus(2);
    let scheduler = node.scheduler();
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[true, true]).await;
    let gpus = health(&plugin.last);

    scheduler.kill();
    plugin.until_healthy(&[false, false]).await;
    process.log.wait("is unhealthy: the scheduler has not answered for 1 s or more");
    let scheduler = node.scheduler();
    plugin.until_healthy(&[true, true]).await;

    scheduler.signal(libc::SIGSTOP);
    plugin.until_healthy(&[false, false]).await;
    process.log.wait("does not answer");
    scheduler.signal(libc::SIGCONT);
    plugin.until_healthy(&[true, true]).await;
    assert_eq!(health(&plugin.last), gpus);
}

#[tokio::test]
async fn a_gpu_that_cannot_be_injected_fails_readiness_with_a_reason() {
    let node = Node::with_gpus(2);
    let _scheduler = node.scheduler();
    let uuids: Vec<String> = (0..2).map(|gpu| gpu_uuid(&node.machine(), gpu)).collect();
    node.inject(&[]);
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[false, false]).await;
    process.log.wait("kubelet has registered");
    let why = until_ready(&node, false).await;
    assert!(why.contains(&format!("names \"nvshare.com/gpu={}\"", uuids[0])), "{why}");
    assert!(why.contains(&uuids[1]) && why.contains("cdi generate"), "{why}");

    node.inject(&uuids[..1]);
    plugin.until("one is healthy", |devices| health(devices).iter().filter(|(_, healthy)| *healthy).count() == 1).await;
    assert_eq!(until_ready(&node, true).await, "");
    node.inject(&uuids);
    plugin.until_healthy(&[true, true]).await;

    std::fs::write(node.containerd(), "version = 2\n").expect("a file");
    plugin.until_healthy(&[false, false]).await;
    let why = until_ready(&node, false).await;
    assert_eq!(why.matches("Set enable_cdi = true").count(), 1, "{why}");
    std::fs::write(node.containerd(), "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n")
        .expect("a file");
    plugin.until_healthy(&[true, true]).await;
}

#[tokio::test]
async fn a_late_cdi_file_never_makes_a_gpu_unhealthy() {
    let node = Node::with_gpus(2);
    let uuids: Vec<String> = (0..2).map(|gpu| gpu_uuid(&node.machine(), gpu)).collect();
    node.inject(&[]);
    let _scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    process.log.wait("watching driver events of");
    // This delay ends after the first reports, but before a missing CDI file makes the GPUs
    // unhealthy.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    node.inject(&uuids);
    let mut plugin = kubelet.plugin().await;
    let first = plugin.next().await.expect("a list");
    assert!(health(first).iter().all(|(_, is_healthy)| *is_healthy), "{first:?}");
    assert_eq!(process.log.count("is unhealthy"), 0);
}

/// Repeats the probe until it has the expected result, and returns the probe's output.
async fn until_ready(node: &Node, expected: bool) -> String {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let mut command = node.plugin_command();
        let output = tokio::task::spawn_blocking(move || command.arg("--ready").output().expect("it starts"));
        let output = output.await.expect("it ends");
        if output.status.success() == expected {
            return String::from_utf8(output.stderr).expect("UTF-8");
        }
        assert!(std::time::Instant::now() < deadline, "{output:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn the_readiness_probe_reports_the_schedulers_problem() {
    let node = Node::with_gpus(1);
    let config = node.directory.join("nvshare.toml");
    std::fs::write(&config, "policy = \"fcfs\"\n").expect("a file");
    let scheduler = node.scheduler_with(&["--config", config.to_str().expect("a path")]);
    let (_process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[true]).await;
    std::fs::write(&config, "policy = \"none\"\n").expect("a file");
    scheduler.signal(libc::SIGHUP);
    let why = until_ready(&node, false).await;
    assert!(why.contains("the configuration has an error") && why.contains("policy"), "{why}");
    std::fs::write(&config, "policy = \"fcfs\"\n").expect("a file");
    scheduler.signal(libc::SIGHUP);
    assert_eq!(until_ready(&node, true).await, "");
}

#[tokio::test]
async fn gpus_are_unhealthy_before_the_scheduler_starts() {
    let node = Node::with_gpus(1);
    let (_process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[false]).await;
    let _scheduler = node.scheduler();
    plugin.until_healthy(&[true]).await;
}

#[tokio::test]
async fn a_gpu_that_the_scheduler_does_not_list_is_unhealthy() {
    let node = Node::with_gpus(2);
    // The scheduler started before the driver was loaded, so it knows no GPU.
    trouble::unload(&node.machine(), true).expect("it is written");
    let _scheduler = node.scheduler();
    trouble::unload(&node.machine(), false).expect("it is written");
    let (process, _kubelet, mut plugin) = watched(&node).await;
    plugin.until_healthy(&[false, false]).await;
    process.log.wait("is unhealthy: the scheduler does not list it");
}
