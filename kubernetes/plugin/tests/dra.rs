//! Tests of the DRA driver with stand-ins for the API server and kubelet, and with the real
//! scheduler. The tests cover the offered devices and the life of claims.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kubernetes_test_support::program::Program;

use crate::support::api::{self, Api, claim, config, uid};
use crate::support::dra::{Container, Driver};
use crate::support::kubelet::{Kubelet, health};
use crate::support::{Node, PATIENCE, Process, QUICK, beside};
use cuda_sim_gpus::config::gpu_uuid;
use cuda_sim_gpus::trouble::{self, Event, XID};
use nvshare::bus::{Client, SchedulerProxy};
use nvshare_device_plugin::dra::health::HealthStatus;
use nvshare_device_plugin::dra::protocol::{Claim, Device};
use serde_json::json;
use toml::Table;

/// A node that offers its GPUs by DRA, and an API server.
fn node(gpus: usize) -> (Node, Api) {
    let (node, api) = (Node::with_gpus(gpus), Api::start());
    std::fs::write(node.directory.join("kubeconfig"), api.kubeconfig()).expect("a file");
    std::fs::write(node.directory.join("agent.toml"), "").expect("a file");
    node.configure(&format!("offer = \"dra\"\n{QUICK}"));
    (node, api)
}

/// Starts all processes of such a node.
async fn running(gpus: usize) -> (Node, Api, Process, Process, Driver) {
    let (node, api) = node(gpus);
    let (scheduler, process) = (node.scheduler(), node.plugin());
    let driver = Driver::find(&node.registry()).await;
    api.until("all GPUs", |devices| devices.len() == gpus);
    (node, api, scheduler, process, driver)
}

fn device(node: &Node, gpu: usize) -> String {
    gpu_uuid(&node.machine(), gpu).to_lowercase()
}

/// Returns a claim as kubelet's requests name it.
fn named(number: u32) -> Claim {
    Claim { namespace: "team-a".into(), uid: uid(number), name: format!("claim-{number}") }
}

/// Asks the scheduler a question, and returns its answer.
async fn ask<T>(node: &Node, question: impl AsyncFn(&SchedulerProxy<'_>) -> zbus::Result<T>) -> T {
    let (_connection, proxy) = nvshare_kubernetes::scheduler::connect(&node.control()).await.expect("it listens");
    question(&proxy).await.expect("it answers")
}

/// Returns the rules of claims, by their names.
async fn rules(node: &Node) -> Vec<(String, Table)> {
    let all = ask(node, async |scheduler| scheduler.list_rules().await).await;
    let table = |rule| nvshare::bus::rules::table(&rule).expect("a rule");
    let name = |rule: Table| (rule["name"].as_str().expect("a name").to_owned(), rule);
    all.into_iter().map(table).map(name).collect()
}

async fn clients(node: &Node) -> Vec<Client> {
    ask(node, async |scheduler| scheduler.list_clients().await).await
}

/// Waits until the condition holds.
async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "{what}: it never came");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Creates a container with the devices of these claims, in this order.
fn container(node: &Node, claims: &[&[Device]]) -> Container {
    let devices = claims.iter().copied().flatten();
    let ids: Vec<String> = devices.flat_map(|device| device.cdi_device_ids.clone()).collect();
    Container::new(&node.cdi(), &ids)
}

/// Returns the path of the socket that is `/run/nvshare/scheduler.sock` in a container with these
/// devices.
fn socket(node: &Node, devices: &[Device]) -> PathBuf {
    container(node, &[devices]).sockets.expect("a socket's directory").join("scheduler.sock")
}

async fn ready(node: &Node) -> String {
    let mut command = node.plugin_command();
    let asking = tokio::task::spawn_blocking(move || command.arg("--ready").output().expect("it starts"));
    let output = asking.await.expect("it ends");
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.success(), said.is_empty(), "{said}");
    said
}

#[tokio::test]
async fn each_gpu_becomes_a_device_with_consumable_capacity() {
    let (node, api, _scheduler, process, driver) = running(2).await;
    let slice = api.slice().expect("a slice");
    assert_eq!(slice.metadata.name.as_deref(), Some("node-1-gpu.nvshare.com"));
    let devices = api.devices();
    assert_eq!(
        devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>(),
        [device(&node, 0), device(&node, 1)]
    );
    for device in &devices {
        assert_eq!(device.allow_multiple_allocations, Some(true));
        let capacity = device.capacity.as_ref().expect("capacities");
        assert_eq!(capacity.keys().collect::<Vec<_>>(), ["memory", "slots", "time"]);
        assert_eq!((&*capacity["slots"].value.0, &*capacity["time"].value.0), ("10", "100"));
        assert!(device.taints.is_none());
        let attributes = serde_json::to_value(device.attributes.as_ref().expect("attributes")).expect("JSON");
        for (name, kind, value) in [
            ("architecture", "string", "Hopper"),
            ("brand", "string", "Nvidia"),
            ("cudaComputeCapability", "version", "9.0.0"),
            ("driverVersion", "version", "580.65.6"),
            ("cudaDriverVersion", "version", "13.0.0"),
        ] {
            assert_eq!(attributes[name][kind], value, "{name}: {attributes}");
        }
        assert!(
            attributes["pcieBusID"]["string"].as_str().is_some_and(|text| text.starts_with("0000:")),
            "{attributes}"
        );
    }
    process.log.wait("kubelet has registered the DRA driver gpu.nvshare.com");
    until("it is ready", async || ready(&node).await.is_empty()).await;
    assert!(node.ask_plugin("--probe").status.success());
    driver.health().await.until(&[HealthStatus::Healthy, HealthStatus::Healthy]).await;
    // The device plugin API offers no GPU, so its socket is not created.
    assert!(!node.socket().exists());
}

#[tokio::test]
async fn a_gpu_is_offered_by_one_api_and_never_by_both() {
    let (node, api) = node(2);
    node.configure(&format!("[[gpu]]\ngpu = 1\nslots = 3\noffer = \"dra\"\n{QUICK}"));
    let _scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    let mut plugin = kubelet.plugin().await;
    plugin.next().await.expect("a list");
    Driver::find(&node.registry()).await;
    api.until("the second", |devices| devices.len() == 1);
    let offered = |devices: &[nvshare_device_plugin::protocol::Device]| -> Vec<String> {
        health(devices).into_iter().map(|(uuid, _)| uuid.to_lowercase()).collect()
    };
    assert_eq!((offered(&plugin.last), &*api.devices()[0].name), (vec![device(&node, 0)], &*device(&node, 1)));
    // With this other configuration, both APIs offer GPUs.
    node.configure(&format!("[[gpu]]\ngpu = 0\nslots = 3\noffer = \"dra\"\n{QUICK}"));
    process.signal(libc::SIGHUP);
    api.until("the first", |devices| devices.len() == 1 && devices[0].name == device(&node, 0));
    plugin.until("the second", |devices| offered(devices) == [device(&node, 1)]).await;
    node.configure(QUICK);
    process.signal(libc::SIGHUP);
    api.until("nothing", |devices| devices.is_empty());
    assert!(api.slice().is_none());
}

#[tokio::test]
async fn offering_gpus_by_another_api_needs_a_restart() {
    let (node, api, _scheduler, process, _driver) = running(1).await;
    node.configure(QUICK);
    process.signal(libc::SIGHUP);
    process.log.wait("keeping the current one: restart the plugin to offer GPUs by another API");
    assert_eq!(api.devices().len(), 1);
    assert_eq!(node.ask_plugin("--probe").status.code(), Some(1), "kubelet restarts it");
}

#[tokio::test]
async fn no_gpus_are_offered_if_the_api_server_drops_consumable_capacity() {
    let (node, api) = node(1);
    api.set_consumable_capacity(false);
    let (_scheduler, process) = (node.scheduler(), node.plugin());
    process.log.wait("cannot offer GPUs: the API server (v1.35.2) drops allowMultipleAllocations");
    assert!(api.slice().is_none());
    assert_eq!(api.requests("dryRun=All").len(), api.requests("POST").len(), "it was never stored");
    Driver::find(&node.registry()).await;
    let said = ready(&node).await;
    assert!(said.contains("Enable the feature gate DRAConsumableCapacity"), "{said}");
    api.set_consumable_capacity(true);
    api.until("the GPU", |devices| devices.len() == 1);
    until("it is ready", async || ready(&node).await.is_empty()).await;
    // If an API server is restarted without the feature gate, it drops the field at the next
    // change.
    api.set_consumable_capacity(false);
    ask(&node, async |scheduler| scheduler.drain("0").await).await;
    api.until("nothing", |devices| devices.is_empty());
    assert!(api.slice().is_none());
    assert!(ready(&node).await.contains("DRAConsumableCapacity"));
}

#[tokio::test]
async fn an_unusable_api_server_is_reported_and_retried() {
    let (node, api) = node(1);
    api.set_resource_api(false);
    let (_scheduler, process) = (node.scheduler(), node.plugin());
    process.log.wait("the API server has no resource.k8s.io/v1, which needs Kubernetes 1.34");
    api.set_resource_api(true);
    api.forbid(true);
    process.log.wait(
        "does not allow the driver to list ResourceSlices. Its service account needs the ClusterRole nvshare-dra",
    );
    api.forbid(false);
    api.until("the GPU", |devices| devices.len() == 1);
    process.log.wait("offering GPUs in ResourceSlice node-1-gpu.nvshare.com");
    // A starting kubelet deletes the slices in the same way.
    api.delete_slices();
    api.until("it again", |devices| devices.len() == 1);
}

#[tokio::test]
async fn unhealthy_and_drained_gpus_get_no_new_claims() {
    let (node, api, _scheduler, _process, mut driver) = running(2).await;
    let mut reports = driver.health().await;
    trouble::happen(&node.machine(), Event { gpu: 1, kind: XID, data: 79 }).expect("it is written");
    let taints = |devices: &[k8s_openapi::api::resource::v1::Device]| -> Vec<Vec<String>> {
        let keys = |device: &k8s_openapi::api::resource::v1::Device| {
            device.taints.iter().flatten().map(|taint| taint.key.clone()).collect()
        };
        devices.iter().map(keys).collect()
    };
    let unhealthy = vec!["gpu.nvshare.com/unhealthy".to_owned()];
    api.until("a taint", |devices| taints(devices) == [vec![], unhealthy.clone()]);
    let reasons = reports.until(&[HealthStatus::Healthy, HealthStatus::Unhealthy]).await;
    assert!(reasons[0].is_empty() && reasons[1].contains("XID 79"), "{reasons:?}");
    api.put_claim(claim(1, &[&device(&node, 1)], "0", "0", &[]));
    let refused = driver.prepare_one(&named(1)).await.expect_err("it is unhealthy");
    assert!(refused.contains("is unhealthy: the driver reported XID 79"), "{refused}");
    let since = |api: &Api| api.devices()[1].taints.as_ref().and_then(|taints| taints[0].time_added.clone());
    let before = since(&api);
    ask(&node, async |scheduler| scheduler.drain("0").await).await;
    api.until("another", |devices| taints(devices) == [vec!["gpu.nvshare.com/drained".to_owned()], unhealthy.clone()]);
    assert!(before.is_some() && since(&api) == before, "a taint keeps its time when another is added");
    // If the API server drops taints, the driver omits unhealthy GPUs, because new claims could get
    // them otherwise.
    api.set_taints(false);
    api.delete_slices();
    ask(&node, async |scheduler| scheduler.undrain("0").await).await;
    api.until("the first alone", |devices| devices.len() == 1 && devices[0].name == device(&node, 0));
}

#[tokio::test]
async fn a_prepared_claim_becomes_a_rule_for_its_programs() {
    let (node, api, _scheduler, _process, mut driver) = running(1).await;
    let keys = json!({"weight": 50, "gang": false, "on-memory-full": "wait"});
    api.put_claim(claim(1, &[&device(&node, 0)], "1Gi", "25", &[config("FromClaim", keys)]));
    let devices = driver.prepare_one(&named(1)).await.expect("it is right");
    let [got] = &devices[..] else { panic!("{devices:?}") };
    let uuid = gpu_uuid(&node.machine(), 0);
    assert_eq!((&*got.pool_name, &*got.device_name), (api::NODE, &*device(&node, 0)));
    assert_eq!(got.request_names, ["gpu"]);
    assert_eq!(got.cdi_device_ids, [format!("nvshare.com/gpu={uuid}"), format!("nvshare.com/claim={}", uid(1))]);
    let all = rules(&node).await;
    let [(name, rule)] = &all[..] else { panic!("{all:?}") };
    assert_eq!((name.as_str(), rule["origin"].as_str()), ("team-a/claim-1", Some("the ResourceClaim")));
    assert_eq!(rule["claim"].as_str(), Some(uid(1).as_str()));
    assert_eq!((rule["memory-max"].as_integer(), rule["memory-low"].as_integer()), (Some(1 << 30), Some(1 << 30)));
    assert_eq!((rule["time-min"].as_str(), rule["weight"].as_integer()), (Some("25%"), Some(50)));
    assert_eq!(rule["on-memory-full"].as_str(), Some("wait"));
    assert_eq!(rule["allowed-gpus"].as_array().map(Vec::len), Some(1));

    // The clients are two containers or pods of the claim, and a program without a claim.
    let socket = socket(&node, &devices);
    assert_eq!(socket, node.claims().join(uid(1)).join("scheduler.sock"));
    let _programs = [&socket, &socket, &node.clients()].map(|socket| Program::connect_soon(socket));
    let of = async || -> Vec<(String, String)> {
        clients(&node).await.into_iter().map(|client| (client.rule, client.share)).collect()
    };
    let (one, none) =
        (("team-a/claim-1".to_owned(), "time-min 25%, weight 50".to_owned()), (String::new(), String::new()));
    let mut found = of().await;
    found.sort();
    found.iter_mut().filter(|(rule, _)| rule.is_empty()).for_each(|(_, share)| share.clear());
    assert_eq!(found.iter().map(|(rule, _)| rule).collect::<Vec<_>>(), [&none.0, &one.0, &one.0], "{found:?}");
    assert!(found[1].1.contains("weight 50") && found[1].1.contains("25%"), "{found:?}");

    driver.unprepare(&named(1)).await;
    assert!(rules(&node).await.is_empty());
    until("nothing is left", async || !node.claims().join(uid(1)).exists()).await;
    let left: Vec<_> = node.cdi().read_dir().expect("the directory").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["nvshare.json"]);
    driver.unprepare(&named(1)).await;
}

#[tokio::test]
async fn claims_of_one_pod_are_prepared_or_rejected_independently() {
    let (node, api, _scheduler, _process, mut driver) = running(2).await;
    let (first, second) = (device(&node, 0), device(&node, 1));
    api.put_claim(claim(
        1,
        &[&first, &second],
        "0",
        "0",
        &[config("FromClass", json!({"gang": true, "interactive": true}))],
    ));
    api.put_claim(claim(2, &[&second], "1Gi", "0", &[]));
    api.put_claim(claim(3, &[&second], "0", "0", &[config("FromClaim", json!({"interactive": true}))]));
    api.put_claim(claim(4, &[&second], "0", "0", &[config("FromClaim", json!({"weight": "heavy"}))]));
    let other = Claim { uid: uid(99), ..named(2) };
    let answers = driver.prepare(&[named(1), named(2), named(3), named(4), named(5), other]).await;
    let refused = |number: u32| answers[&uid(number)].clone().expect_err("it is refused");
    assert_eq!(answers[&uid(1)].as_ref().map(Vec::len), Ok(2));
    assert!(
        refused(3).contains("its key interactive is not allowed: pods of namespace team-a may not set it"),
        "{}",
        refused(3)
    );
    assert!(refused(4).contains("the scheduler refuses it: weight cannot be \"heavy\""), "{}", refused(4));
    assert!(refused(5).contains("the API server does not return the claim"), "{}", refused(5));
    assert!(refused(99).contains("another claim has that name now"), "{}", refused(99));
    let names = |rules: Vec<(String, Table)>| rules.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(rules(&node).await), ["team-a/claim-1", "team-a/claim-2"]);
    let sockets = [1, 2].map(|number| socket(&node, answers[&uid(number)].as_ref().expect("it is prepared")));
    let _programs = sockets.map(|socket| Program::connect_soon(&socket));
    // Without a scheduler, programs that use the same lock files take turns. The two claims share a
    // GPU, so they must use the same files.
    let turn = |number: u32| {
        let name = format!("nvshare-{}.turn", gpu_uuid(&node.machine(), 1).trim_start_matches("GPU-"));
        node.claims().join(uid(number)).join(name).metadata().expect("a lock file").ino()
    };
    assert_eq!(turn(1), turn(2));
    let another = Program::connect_soon(&node.claims().join(uid(1)).join("scheduler.sock"));
    let rules_and_gangs = async || {
        let mut all: Vec<(String, usize)> =
            clients(&node).await.into_iter().map(|client| (client.rule, client.gang.len())).collect();
        all.sort();
        all
    };
    let of_claim = |number: u32, peers: usize| (format!("team-a/claim-{number}"), peers);
    assert_eq!(rules_and_gangs().await, [of_claim(1, 1), of_claim(1, 1), of_claim(2, 0)]);
    drop(another);
    until("it is gone", async || rules_and_gangs().await == [of_claim(1, 0), of_claim(2, 0)]).await;
    // The agent's configuration may allow more keys.
    std::fs::write(node.directory.join("agent.toml"), "[[namespaces]]\nname = \"*\"\nmay-set = [\"interactive\"]\n")
        .expect("a file");
    assert!(driver.prepare_one(&named(3)).await.is_ok());
}

#[tokio::test]
async fn a_container_with_several_claims_is_rejected_in_any_order() {
    let (node, api, _scheduler, _process, mut driver) = running(2).await;
    api.put_claim(claim(1, &[&device(&node, 0), &device(&node, 1)], "1Gi", "0", &[]));
    api.put_claim(claim(2, &[&device(&node, 1)], "2Gi", "0", &[]));
    let mut answers = driver.prepare(&[named(1), named(2)]).await;
    let [one, two] = [1, 2].map(|number| answers.remove(&uid(number)).expect("an answer").expect("it is right"));
    let create = |claims: &[&[Device]]| container(&node, claims).create(&beside("nvsharectl"));
    assert_eq!((create(&[&one]), create(&[&two])), (Ok(()), Ok(())));
    for both in [[&*one, &*two], [&*two, &*one]] {
        let refused = create(&both).expect_err("it has two claims");
        assert!(
            refused.contains("the container has several claims of nvshare (team-a/claim-1, team-a/claim-2)"),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn prepared_claims_survive_restarts_of_scheduler_and_driver() {
    let (node, mut api, scheduler, mut process, mut driver) = running(1).await;
    api.put_claim(claim(1, &[&device(&node, 0)], "1Gi", "0", &[]));
    let devices = driver.prepare_one(&named(1)).await.expect("it is right");
    let socket = socket(&node, &devices);
    let names = async || rules(&node).await.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    // The scheduler restarts. The socket exists before the driver connects, and the rule exists as
    // soon as the driver has connected.
    scheduler.kill();
    process.signal(libc::SIGSTOP);
    let scheduler = node.scheduler();
    let _program = Program::connect_soon(&socket);
    process.signal(libc::SIGCONT);
    until("its rule", async || names().await == ["team-a/claim-1"]).await;
    until("the program has it", async || clients(&node).await.iter().all(|client| client.rule == "team-a/claim-1"))
        .await;
    // The driver restarts without an API server.
    process.signal(libc::SIGTERM);
    assert!(process.wait().success());
    assert!(node.registry().read_dir().expect("the directory").next().is_none(), "kubelet sees that it is gone");
    api.stop();
    let cdi = node.cdi().join(format!("nvshare-claim-{}.json", uid(1)));
    std::fs::remove_file(&cdi).expect("as after a reboot");
    scheduler.kill();
    let _scheduler = node.scheduler();
    let process = node.plugin();
    let mut driver = Driver::find(&node.registry()).await;
    until("its rule", async || names().await == ["team-a/claim-1"]).await;
    until("its CDI device", async || cdi.exists()).await;
    // A restarted kubelet prepares the claim again, and gets the same answer.
    assert_eq!(driver.prepare_one(&named(1)).await.expect("it is known"), devices);
    process.log.wait("prepared claims: 1");
    driver.unprepare(&named(1)).await;
    assert!(names().await.is_empty());
}

#[tokio::test]
async fn a_claim_is_not_prepared_without_a_scheduler() {
    let (node, api, scheduler, process, mut driver) = running(1).await;
    api.put_claim(claim(1, &[&device(&node, 0)], "1Gi", "0", &[]));
    scheduler.kill();
    let refused = driver.prepare_one(&named(1)).await.expect_err("there is no scheduler");
    assert!(
        refused.contains("cannot connect to the scheduler at") || refused.contains("has not answered"),
        "{refused}"
    );
    let _scheduler = node.scheduler();
    until("it is prepared", async || {
        let mut driver = Driver::find(&node.registry()).await;
        driver.prepare_one(&named(1)).await.is_ok()
    })
    .await;
    assert_eq!(rules(&node).await.len(), 1);
    // The driver creates a removed socket again, and kubelet finds the driver again.
    std::fs::remove_file(&driver.info.endpoint).expect("it is there");
    process.log.wait("a socket of the driver has disappeared");
    let mut driver = Driver::find(&node.registry()).await;
    assert!(driver.prepare_one(&named(1)).await.is_ok());
}

#[test]
fn the_dra_driver_requires_its_node_name() {
    let node = Node::with_gpus(1);
    node.configure("offer = \"dra\"");
    let mut process = node.plugin();
    assert_eq!(process.wait().code(), Some(1));
    process.log.wait("offer = \"dra\" needs the name of this node. Set --node or the environment variable NODE_NAME");
    node.configure("offer = \"dra\"\ninject = \"mounts\"");
    let wrong = node.ask_plugin("--check-config");
    assert!(
        String::from_utf8_lossy(&wrong.stderr).contains("device-plugin.toml:1:9: offer = \"dra\" needs inject"),
        "{wrong:?}"
    );
}

#[test]
fn check_removal_fails_and_lists_the_claims_that_pods_use() {
    let (node, api) = node(1);
    let gpu = device(&node, 0);
    api.put_claim(claim(1, &[&gpu], "1Gi", "0", &[]));
    let mut unused = claim(2, &[&gpu], "0", "0", &[]);
    unused["status"].as_object_mut().expect("a status").remove("reservedFor");
    api.put_claim(unused.clone());
    let mut others = claim(3, &[&gpu], "0", "0", &[]);
    others["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.nvidia.com".into();
    api.put_claim(others.clone());
    let refused = node.ask_plugin("--check-removal");
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        said.contains("cannot remove the driver") && said.contains(": team-a/pod-1 (claim claim-1). Delete"),
        "{said}"
    );
    let [event] = &api.events()[..] else { panic!("{:?}", api.events()) };
    assert_eq!((&event["involvedObject"]["kind"], &event["involvedObject"]["name"]), (&"Pod".into(), &"pod-1".into()));
    assert!(event["message"].as_str().is_some_and(|text| text.contains("Delete the pod first")), "{event}");

    unused["metadata"]["name"] = "claim-1".into();
    api.put_claim(unused);
    assert!(node.ask_plugin("--check-removal").status.success());
    api.forbid(true);
    let refused = node.ask_plugin("--check-removal");
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("does not allow this program to list ResourceClaims"),
        "{refused:?}"
    );
}
