//! Tests registration with kubelet, the list, the answers for containers, and restarts of the
//! plugin and of kubelet.

use std::time::Duration;

use crate::support::kubelet::{Kubelet, Plugin, health, ids};
use crate::support::{Node, PATIENCE, Process, QUICK};
use nvshare_device_plugin::protocol::Device;
use tonic::{Code, Status};

/// A node with all processes running.
async fn running(node: &Node) -> (Process, Process, Kubelet, Plugin) {
    let scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    let mut plugin = kubelet.plugin().await;
    plugin.next().await.expect("a list");
    (scheduler, process, kubelet, plugin)
}

#[tokio::test]
async fn kubelet_receives_a_device_per_slot() {
    let node = Node::with_gpus(2);
    let (_scheduler, _process, _kubelet, plugin) = running(&node).await;
    assert_eq!(
        (plugin.asked.resource_name.as_str(), plugin.asked.endpoint.as_str()),
        ("nvshare.com/gpu", "nvshare.sock")
    );
    assert!(plugin.options.get_preferred_allocation_available && !plugin.options.pre_start_required);
    let gpus = health(&plugin.last);
    assert_eq!(gpus.iter().map(|(_, healthy)| *healthy).collect::<Vec<_>>(), [true, true]);
    let expected: Vec<String> =
        gpus.iter().flat_map(|(uuid, _)| (0..10).map(move |slot| format!("{uuid}::{slot}"))).collect();
    assert_eq!(ids(&plugin.last), expected);
}

#[tokio::test]
async fn a_restarted_plugin_offers_the_same_devices() {
    let node = Node::with_gpus(1);
    let (_scheduler, mut process, mut kubelet, mut plugin) = running(&node).await;
    let before = plugin.last.clone();
    process.signal(libc::SIGTERM);
    assert!(plugin.next().await.is_none(), "the stream ends with the plugin");
    assert_eq!(process.wait().code(), Some(0));
    assert!(!node.socket().exists());

    let process = node.plugin();
    let mut plugin = kubelet.plugin().await;
    assert_eq!(plugin.next().await, Some(&before[..]));
    // A leftover socket is replaced.
    process.kill();
    assert!(node.socket().exists());
    let _process = node.plugin();
    assert_eq!(kubelet.plugin().await.next().await, Some(&before[..]));
}

#[tokio::test]
async fn the_plugin_registers_with_a_restarted_kubelet() {
    let node = Node::with_gpus(1);
    let (_scheduler, process, kubelet, plugin) = running(&node).await;
    let before = plugin.last.clone();
    drop((kubelet, plugin));
    for restart in [Kubelet::start, Kubelet::appear, Kubelet::start] {
        let mut kubelet = restart(&node.kubelet_directory());
        let mut plugin = kubelet.plugin().await;
        assert_eq!(plugin.next().await, Some(&before[..]));
        let first = before[0].id.clone();
        assert!(plugin.allocate(&[&[&first]]).await.is_ok());
    }
    assert!(process.log.count("the plugin's socket has disappeared") >= 2);
}

#[tokio::test]
async fn the_plugin_waits_for_kubelet_to_start() {
    let node = Node::with_gpus(1);
    let _scheduler = node.scheduler();
    std::fs::remove_dir(node.kubelet_directory()).expect("it is empty");
    let process = node.plugin();
    process.log.wait("cannot listen on");
    std::fs::create_dir(node.kubelet_directory()).expect("a directory");
    process.log.wait("waiting for kubelet at");
    assert_eq!(node.ask_plugin("--probe").status.code(), Some(1));
    // This socket was left behind by a kubelet that has ended.
    drop(std::os::unix::net::UnixListener::bind(node.kubelet_directory().join("kubelet.sock")));
    process.log.wait("cannot reach kubelet");
    let mut kubelet = Kubelet::appear(&node.kubelet_directory());
    kubelet.plugin().await.next().await.expect("a list");
    assert_eq!(process.log.count("waiting for kubelet at"), 1, "it is said once");
}

#[tokio::test]
async fn the_plugin_retries_a_refused_registration() {
    let node = Node::with_gpus(1);
    let _scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    *kubelet.refusal.lock().expect("the refusal") = Some(Status::already_exists("somebody has that resource"));
    let process = node.plugin();
    kubelet.asked().await;
    kubelet.asked().await;
    process.log.wait("kubelet does not register nvshare.com/gpu: somebody has that resource");
    let probed = node.ask_plugin("--probe");
    assert_eq!(probed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&probed.stderr).contains("kubelet has not registered it yet"), "{probed:?}");
    *kubelet.refusal.lock().expect("the refusal") = None;
    kubelet.plugin().await.next().await.expect("a list");
    process.log.wait("kubelet has registered nvshare.com/gpu");
    assert_eq!(process.log.count("does not register"), 1, "it is said once");
}

#[tokio::test]
async fn the_plugin_registers_again_if_kubelet_stops_watching() {
    let node = Node::with_gpus(1);
    let (_scheduler, process, mut kubelet, plugin) = running(&node).await;
    drop(plugin);
    kubelet.plugin().await.next().await.expect("a list");
    assert_eq!(process.log.count("kubelet does not watch the list"), 1);
}

#[tokio::test]
async fn a_kubelet_that_never_watches_is_reported_once_as_too_old() {
    let node = Node::with_gpus(1);
    let _scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    // A kubelet before 1.26 registers the plugin, but kubelet's calls are then not valid HTTP/2.
    kubelet.asked().await;
    kubelet.asked().await;
    process.log.wait("The plugin needs kubelet 1.26 or newer");
    assert_eq!(process.log.count("kubelet 1.26"), 1);
    assert_eq!(process.log.count("kubelet has registered nvshare.com/gpu"), 1, "it is said once");
    // A newer kubelet may start later.
    drop(kubelet);
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    kubelet.plugin().await.next().await.expect("a list");
}

#[tokio::test]
async fn the_probe_reports_whether_kubelet_has_registered_the_plugin() {
    let node = Node::with_gpus(1);
    let none = node.ask_plugin("--probe");
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&none.stderr).contains("no plugin answers at"), "{none:?}");
    let (_scheduler, process, kubelet, _plugin) = running(&node).await;
    process.log.wait("kubelet has registered");
    let probe = async || {
        let command = node.plugin_command();
        let probing = tokio::task::spawn_blocking(move || {
            let mut command = command;
            command.arg("--probe").status().expect("it starts").code()
        });
        probing.await.expect("it ends")
    };
    let until = async |code| {
        let waiting = async {
            while probe().await != Some(code) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.is_ok()
    };
    assert!(until(0).await, "registered");
    drop(kubelet);
    std::fs::remove_file(node.kubelet_directory().join("kubelet.sock")).expect("it was there");
    assert!(until(1).await, "there is no kubelet any more");
}

#[tokio::test]
async fn a_second_plugin_does_not_start() {
    let node = Node::with_gpus(1);
    let (_scheduler, _process, _kubelet, mut plugin) = running(&node).await;
    let mut second = node.plugin();
    assert_eq!(second.wait().code(), Some(1));
    second.log.wait("another process serves");
    let first = plugin.last[0].id.clone();
    assert!(plugin.allocate(&[&[&first]]).await.is_ok(), "the first one goes on");
}

#[tokio::test]
async fn containers_get_cdi_devices() {
    let node = Node::with_gpus(2);
    let (_scheduler, _process, _kubelet, mut plugin) = running(&node).await;
    let gpus = health(&plugin.last);
    let slot = |gpu: usize, slot: usize| format!("{}::{slot}", gpus[gpu].0);
    let answer =
        plugin.allocate(&[&[&slot(0, 1), &slot(1, 7), &slot(0, 2)], &[&slot(1, 0)]]).await.expect("they are free");
    let names: Vec<Vec<String>> = answer
        .container_responses
        .iter()
        .map(|container| container.cdi_devices.iter().map(|device| device.name.clone()).collect())
        .collect();
    let name = |gpu: usize| format!("nvshare.com/gpu={}", gpus[gpu].0);
    assert_eq!(names, [vec![name(0), name(1)], vec![name(1)]]);
    for (wrong, code) in [
        (&[][..], Code::InvalidArgument),
        (&[&[][..]], Code::InvalidArgument),
        (&[&["GPU-none::0"]], Code::NotFound),
        (&[&[gpus[0].0.as_str()]], Code::NotFound),
    ] {
        let refused = plugin.allocate(wrong).await.expect_err("it makes no sense");
        assert_eq!(refused.code(), code, "{wrong:?}: {refused}");
    }
    let twice = slot(0, 0);
    let refused = plugin.allocate(&[&[&twice, &twice]]).await.expect_err("it makes no sense");
    assert!(refused.message().contains("requests the device"), "{refused}");
}

#[tokio::test]
async fn containers_get_mounts_if_mount_injection_is_configured() {
    let node = Node::with_gpus(2);
    node.configure(&format!("slots = 2\ninject = \"mounts\"\n[mounts]\ndevice-nodes = true\n{QUICK}"));
    let (_scheduler, _process, _kubelet, mut plugin) = running(&node).await;
    let gpus = health(&plugin.last);
    assert_eq!(plugin.last.len(), 4);
    let ids = ids(&plugin.last);
    let answer = plugin.allocate(&[&[&ids[2], &ids[0]]]).await.expect("they are free").container_responses.remove(0);
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], format!("{},{}", gpus[0].0, gpus[1].0));
    let inside: Vec<&str> = answer.mounts.iter().map(|mount| mount.container_path.as_str()).collect();
    assert!(
        inside[0].ends_with("/libnvshare.so") && inside[1..] == ["/run/nvshare", "/etc/ld.so.preload"],
        "{inside:?}"
    );
    assert!(answer.mounts.iter().all(|mount| mount.read_only));
    assert!(answer.devices.iter().any(|node| node.host_path == "/dev/nvidia1"), "{:?}", answer.devices);
    assert!(answer.cdi_devices.is_empty());
}

#[tokio::test]
async fn preferred_allocation_favours_different_gpus() {
    let node = Node::with_gpus(3);
    let (_scheduler, process, _kubelet, mut plugin) = running(&node).await;
    let all = ids(&plugin.last);
    let gpu = |id: &String| id.split_once("::").expect("a slot").0.to_owned();
    let picked = plugin.prefer(&all, &[&all[0]], 3).await.expect("there are enough");
    assert_eq!(picked.iter().map(gpu).collect::<std::collections::BTreeSet<_>>().len(), 3, "{picked:?}");
    assert_eq!(picked[0], all[0]);
    // The third GPU has the most free slots.
    let left = [&all[9..10], &all[15..]].concat();
    assert_eq!(plugin.prefer(&left, &[], 1).await.expect("there are enough"), [all[20].clone()]);
    for (size, must) in [(-1, &[][..]), (40, &[]), (1, &["GPU-none::0"]), (0, &[all[0].as_str()])] {
        let refused = plugin.prefer(&all, must, size).await.expect_err("it makes no sense");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    node.configure(&format!("allocation = \"pack\"\n{QUICK}"));
    process.signal(libc::SIGHUP);
    process.log.wait("the configuration was reloaded");
    assert_eq!(plugin.prefer(&left, &[], 1).await.expect("there are enough"), [all[9].clone()]);
}

#[tokio::test]
async fn reloading_the_configuration_changes_the_device_list() {
    let node = Node::with_gpus(2);
    let (_scheduler, process, _kubelet, mut plugin) = running(&node).await;
    node.configure("slots = 5000");
    process.signal(libc::SIGHUP);
    process.log.wait("slots cannot be 5000: 1 to 1000 are allowed");
    node.configure(&format!("resource = \"a.b/c\"\nslots = 3\n[[gpu]]\ngpu = 1\nslots = 0\n{QUICK}"));
    process.signal(libc::SIGHUP);
    plugin.until("three slots", |devices: &[Device]| devices.len() == 3).await;
    process.log.wait("the resource stays nvshare.com/gpu");
    process.log.wait("is no longer offered");
}

#[test]
fn check_config_validates_a_configuration_file() {
    let node = Node::with_gpus(1);
    let right = node.ask_plugin("--check-config");
    assert!(
        right.status.success() && String::from_utf8_lossy(&right.stdout).contains("the configuration has no errors")
    );
    node.configure("inject = 3");
    let wrong = node.ask_plugin("--check-config");
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("device-plugin.toml:1:10: "), "{wrong:?}");
    assert_eq!(node.plugin().wait().code(), Some(1), "it does not start with it either");
}
