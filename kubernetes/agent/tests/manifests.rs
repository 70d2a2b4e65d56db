//! Checks that the manifests conform to Kubernetes' published schemas, by types generated from the
//! schemas. Each field must be known and have the right type. Also checks that the manifests
//! request no more privileges than the manual documents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, PodSpec, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub fn kubernetes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All documents of the manifests, with their files.
pub fn documents() -> Vec<(PathBuf, Value)> {
    let mut all = Vec::new();
    for directory in
        ["base", "mounts", "dra", "sleep", "read-only-etc", "examples", "examples/dra", "examples/volume-mounts"]
    {
        for entry in std::fs::read_dir(kubernetes().join(directory)).expect("the manifests") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a manifest");
            let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            all.extend(documents.into_iter().map(|document| (path.clone(), document)));
        }
    }
    assert!(all.len() >= 16, "{}", all.len());
    all
}

/// Returns the part of a document that the schema defines. Kubernetes ignores other fields.
fn known<T: DeserializeOwned + Serialize>(document: &Value) -> Result<Value, String> {
    let typed: T = serde_json::from_value(document.clone()).map_err(|e| e.to_string())?;
    serde_json::to_value(typed).map_err(|e| e.to_string())
}

/// Collects the fields of `written` that are missing or different in `known`.
fn unknown(written: &Value, known: &Value, at: &str, found: &mut Vec<String>) {
    match (written, known) {
        (Value::Object(written), Value::Object(known)) => {
            for (key, value) in written {
                match known.get(key) {
                    Some(other) => unknown(value, other, &format!("{at}.{key}"), found),
                    None => found.push(format!("{at}.{key}")),
                }
            }
        }
        (Value::Array(written), Value::Array(known)) if written.len() == known.len() => {
            for (number, (value, other)) in written.iter().zip(known).enumerate() {
                unknown(value, other, &format!("{at}[{number}]"), found);
            }
        }
        (written, known) if written == known => {}
        // Quantities and similar values are texts in the schema, but may be numbers in YAML.
        (Value::Number(number), Value::String(text)) if number.to_string() == *text => {}
        _ => found.push(format!("{at}: {written} is read as {known}")),
    }
}

#[test]
fn every_field_is_in_the_kubernetes_schema() {
    for (path, document) in documents() {
        let kind = document["kind"].as_str().unwrap_or_default();
        let known = match kind {
            "Namespace" => known::<Namespace>(&document),
            "ServiceAccount" => known::<ServiceAccount>(&document),
            "ClusterRole" => known::<ClusterRole>(&document),
            "ClusterRoleBinding" => known::<ClusterRoleBinding>(&document),
            "ConfigMap" => known::<ConfigMap>(&document),
            "DaemonSet" => known::<DaemonSet>(&document),
            "Job" => known::<Job>(&document),
            "Pod" => known::<Pod>(&document),
            "NetworkPolicy" => known::<NetworkPolicy>(&document),
            "RuntimeClass" => known::<RuntimeClass>(&document),
            "DeviceClass" => known::<DeviceClass>(&document),
            "ResourceClaim" => known::<ResourceClaim>(&document),
            "ResourceClaimTemplate" => known::<ResourceClaimTemplate>(&document),
            "ValidatingAdmissionPolicy" => known::<ValidatingAdmissionPolicy>(&document),
            "ValidatingAdmissionPolicyBinding" => known::<ValidatingAdmissionPolicyBinding>(&document),
            // These kinds belong to kubectl, Prometheus' operator, Kueue and Karpenter rather than to
            // Kubernetes' API.
            "Kustomization" | "Component" | "PodMonitor" | "PrometheusRule" | "ResourceFlavor" | "ClusterQueue"
            | "LocalQueue" | "NodeOverlay" => continue,
            other => panic!("{path:?}: {other:?} is checked by nothing here"),
        };
        let known = known.unwrap_or_else(|e| panic!("{path:?}: {kind}: {e}"));
        let mut found = Vec::new();
        unknown(&document, &known, kind, &mut found);
        assert!(found.is_empty(), "{path:?}: {found:?}");
    }
}

fn daemon_set() -> DaemonSet {
    let found = documents().into_iter().find(|(_, document)| document["kind"] == "DaemonSet").expect("a DaemonSet").1;
    serde_json::from_value(found).expect("a DaemonSet")
}

fn pod() -> PodSpec {
    daemon_set().spec.expect("a spec").template.spec.expect("a pod")
}

#[test]
fn no_container_is_privileged() {
    let pod = pod();
    let all = pod.containers.iter().chain(pod.init_containers.iter().flatten());
    for container in all {
        let context = container.security_context.as_ref().expect(&container.name);
        assert!(!context.privileged.unwrap_or(false), "{}", container.name);
        assert_eq!(context.allow_privilege_escalation, Some(false), "{}", container.name);
        assert_eq!(context.read_only_root_filesystem, Some(true), "{}", container.name);
        let capabilities = context.capabilities.as_ref().expect(&container.name);
        assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]), "{}", container.name);
        // `prepare` changes the owner of directories to the scheduler's user, which requires root
        // with CHOWN.
        let added = (container.name == "prepare").then(|| vec!["CHOWN".to_owned()]);
        assert_eq!(capabilities.add, added, "{}", container.name);
    }
    assert_eq!(pod.host_pid, Some(true));
    assert_eq!((pod.host_network, pod.host_ipc), (None, None));
}

/// Only this component adds a container with capabilities, and that container has no other
/// privilege.
#[test]
fn the_checkpoint_container_has_only_the_capabilities_that_it_needs() {
    let of_sleep = |(path, _): &(PathBuf, Value)| path.ends_with("sleep/daemonset.yaml");
    let patch = documents().into_iter().find(of_sleep).expect("the patch").1;
    let patch = &patch["spec"]["template"]["spec"];
    let [checkpoint, scheduler] = &patch["containers"].as_array().expect("containers")[..] else { panic!("{patch}") };
    let context = json!({
        "runAsUser": 0, "runAsGroup": 900_180, "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_OVERRIDE"]},
    });
    assert_eq!(checkpoint["securityContext"], context);
    let user = pod().containers[0].security_context.as_ref().and_then(|context| context.run_as_user);
    let command = checkpoint["command"].as_array().expect("a command");
    assert_eq!(command[2], format!("--scheduler={}", user.expect("the scheduler's user")));
    let mount = |path: &str| json!({"name": "checkpoint", "mountPath": path});
    let directory = "/run/nvshare-checkpoint";
    assert_eq!(command[1], format!("--listen={directory}/checkpoint.sock"));
    assert_eq!(format!("{directory}/checkpoint.sock"), nvshare::daemon::checkpoint::SOCKET);
    assert_eq!(checkpoint["volumeMounts"][0], mount(directory));
    assert_eq!(scheduler["name"], "scheduler");
    let mut read_only = mount(directory);
    read_only["readOnly"] = json!(true);
    assert_eq!(scheduler["volumeMounts"], json!([read_only]));
    let volumes = patch["volumes"].as_array().expect("volumes");
    assert!(volumes.iter().all(|volume| volume.get("hostPath").is_none()), "{volumes:?}");
}

#[test]
fn scheduler_and_agent_run_as_an_unprivileged_user() {
    let pod = pod();
    let group = pod.security_context.as_ref().and_then(|context| context.supplemental_groups.clone());
    let user = group.expect("the group of the control socket")[0];
    for container in &pod.containers {
        let context = container.security_context.as_ref().expect(&container.name);
        // The other containers use directories of the node that root owns.
        let expected = match &*container.name {
            "scheduler" | "agent" => (Some(user), Some(user), Some(true)),
            _ => (Some(0), None, None),
        };
        let found = (context.run_as_user, context.run_as_group, context.run_as_non_root);
        assert_eq!(found, expected, "{}", container.name);
    }
    let prepare = &pod.init_containers.expect("an init container")[0];
    let command = prepare.command.as_ref().expect("a command");
    assert!(command.contains(&format!("--owner={user}")), "{command:?}");
}

#[test]
fn the_control_socket_is_not_on_the_node() {
    let pod = pod();
    let volumes = pod.volumes.expect("volumes");
    let control = volumes.iter().find(|volume| volume.name == "control").expect("the volume");
    assert!(control.empty_dir.is_some() && control.host_path.is_none());
    let of_the_node: BTreeSet<&str> =
        volumes.iter().filter_map(|volume| Some(&*volume.host_path.as_ref()?.path)).collect();
    let expected = [
        "/etc/cdi",
        "/etc/containerd",
        "/run/nvshare",
        "/var/lib/kubelet/device-plugins",
        "/var/lib/nvshare-node",
        "/var/lib/nvshare-node/state",
        "/var/run/cdi",
    ];
    assert_eq!(of_the_node.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn mounts_name_volumes_and_only_the_agent_has_a_token() {
    let pod = pod();
    assert_eq!(pod.automount_service_account_token, None);
    let volumes: BTreeSet<String> = pod.volumes.iter().flatten().map(|volume| volume.name.clone()).collect();
    for container in pod.containers.iter().chain(pod.init_containers.iter().flatten()) {
        for mount in container.volume_mounts.iter().flatten() {
            assert!(volumes.contains(&mount.name), "{}: {}", container.name, mount.name);
            assert!(mount.name != "token" || container.name == "agent", "{}", container.name);
        }
    }
}

#[test]
fn readiness_probes_check_each_containers_task() {
    let pod = pod();
    let probe = |name: &str| {
        let container = pod.containers.iter().find(|container| container.name == name).expect(name);
        let probe = container.readiness_probe.as_ref().and_then(|probe| probe.exec.as_ref()?.command.clone());
        (container.command.clone().expect("a command"), probe.unwrap_or_else(|| panic!("{name} has no probe")))
    };
    assert_eq!(probe("device-plugin").1, ["/usr/bin/nvshare-device-plugin", "--ready"]);
    assert_eq!(probe("agent").1, ["/usr/bin/nvshare-agent", "--probe"]);
    // The probe compares the file with the content that the container would write.
    let (command, check) = probe("cdi");
    let without = |all: &[String], flag: &str| -> Vec<String> { all.iter().filter(|a| *a != flag).cloned().collect() };
    assert_eq!(without(&command, "--watch"), without(&check, "--check"));
    assert_ne!(command, check);
}

#[test]
fn cluster_roles_grant_only_the_required_permissions() {
    let roles = documents().into_iter().filter(|(_, document)| document["kind"] == "ClusterRole");
    let roles: Vec<(PathBuf, Value)> = roles.collect();
    let [(of_base, agent), (of_dra, driver)] = &roles[..] else { panic!("{roles:?}") };
    assert!(of_base.ends_with("base/access.yaml") && of_dra.ends_with("dra/access.yaml"));
    let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }]);
    assert_eq!(agent["rules"], rules);
    let rules = json!([
        { "apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list", "watch", "create", "update", "delete"] },
        { "apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get", "list"] },
        { "apiGroups": [""], "resources": ["nodes"], "verbs": ["get"] },
        { "apiGroups": [""], "resources": ["events"], "verbs": ["create"] },
    ]);
    assert_eq!(driver["rules"], rules);
}

/// Checks that the driver accepts the configurations in the examples' claims and classes.
#[test]
fn the_driver_accepts_the_example_claim_configurations() {
    let mut count = 0;
    for (path, document) in documents() {
        let claims = [&document["spec"]["spec"]["devices"], &document["spec"]["devices"], &document["spec"]];
        for config in claims.into_iter().filter_map(|claim| claim["config"].as_array()).flatten() {
            assert_eq!(config["opaque"]["driver"], "gpu.nvshare.com", "{path:?}");
            let source = if document["kind"] == "DeviceClass" { "FromClass" } else { "FromClaim" };
            let result = json!({"request": "r", "driver": "gpu.nvshare.com", "pool": "n", "device": "gpu-a",
                "consumedCapacity": {"memory": "0", "time": "0", "slots": "1"}});
            let config = json!({"source": source, "opaque": config["opaque"]});
            let claim: ResourceClaim = serde_json::from_value(json!({
                "metadata": {"name": "c", "namespace": "default", "uid": "u"}, "spec": {},
                "status": {"allocation": {"devices": {"results": [result], "config": [config]}}}
            }))
            .expect("a claim");
            let gpu = nvshare_device_plugin::devices::Gpu { uuid: "GPU-a".into(), ..Default::default() };
            let gpus = nvshare_device_plugin::devices::Devices { gpus: vec![gpu] };
            let permissions = nvshare_agent::permissions::Permissions::default();
            let read = nvshare_device_plugin::dra::claim::read(&claim, "n", &gpus, &permissions);
            let rule = read.unwrap_or_else(|e| panic!("{path:?}: {e}")).rule;
            let text = toml::Table::from_iter(rule.into_iter().filter(|(key, _)| key != "allowed-gpus")).to_string();
            let origin = nvshare::config::rules::Origin { file: path.clone(), line: 0 };
            nvshare::config::rules::read_one(&text, origin).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            count += 1;
        }
    }
    assert_eq!(count, 3);
}

#[test]
fn the_config_maps_settings_and_examples_are_valid() {
    let map = documents().into_iter().find(|(_, document)| document["kind"] == "ConfigMap").expect("a ConfigMap").1;
    let text = |file: &str| map["data"][file].as_str().unwrap_or_else(|| panic!("{file}")).to_owned();
    // Returns the text with its commented examples enabled.
    let with_examples = |text: String| -> String {
        let uncommented =
            text.lines().map(|line| line.strip_prefix("# ").filter(|line| line.contains(['=', '['])).unwrap_or(line));
        uncommented.fold(String::new(), |all, line| all + line + "\n")
    };
    nvshare::config::Config::parse(&text("nvshare.toml"), Path::new("nvshare.toml")).expect("nvshare.toml");
    let example = with_examples(text("nvshare.toml"));
    nvshare::config::Config::parse(&example, Path::new("nvshare.toml")).expect("its example");
    nvshare_agent::config::Config::parse(&text("agent.toml"), Path::new("agent.toml")).expect("agent.toml");
    let example = with_examples(text("agent.toml"));
    nvshare_agent::config::Config::parse(&example, Path::new("agent.toml")).expect("its example");
    nvshare_device_plugin::config::Config::parse(&text("device-plugin.toml"), Path::new("device-plugin.toml"))
        .expect("device-plugin.toml");
}

/// Returns the objects that `kubectl apply -k` would apply.
fn built_from(directory: &Path) -> Vec<Value> {
    let output = Command::new("kubectl").arg("kustomize").arg(directory).output().expect("kubectl");
    assert!(output.status.success(), "{directory:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{directory:?}: {e}"))
}

/// Builds the base of this directory with these components, as the README describes, and returns the
/// objects.
pub fn built_with(components: &[&str], directory: &str) -> Vec<Value> {
    if components.is_empty() {
        return built_list(directory);
    }
    let copy = tempfile::tempdir().expect("a directory");
    for part in ["base", "mounts", "dra", "sleep", "read-only-etc"] {
        std::fs::create_dir(copy.path().join(part)).expect("a directory");
        for entry in std::fs::read_dir(kubernetes().join(part)).expect("the manifests") {
            let entry = entry.expect("an entry");
            std::fs::copy(entry.path(), copy.path().join(part).join(entry.file_name())).expect("a copy");
        }
    }
    let base = copy.path().join("base/kustomization.yaml");
    let mut text = std::fs::read_to_string(&base).expect("a kustomization") + "components:\n";
    text.extend(components.iter().map(|component| format!("  - ../{component}\n")));
    std::fs::write(&base, text).expect("written");
    built_from(&copy.path().join(directory))
}

pub fn built_list(directory: &str) -> Vec<Value> {
    built_from(&kubernetes().join(directory))
}

/// The objects by kind.
fn built(directory: &str) -> BTreeMap<String, Value> {
    let by_kind = |object: Value| (object["kind"].as_str().unwrap_or_default().to_owned(), object);
    built_list(directory).into_iter().map(by_kind).collect()
}

/// Checks the additions of `dra` to the base: two flags, mounts, and the node's name. `helm.rs` checks the same for
/// the chart.
pub fn check_dra_additions(base: &[Value], dra: &BTreeMap<String, Value>) {
    let pod = &dra["DaemonSet"]["spec"]["template"]["spec"];
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let containers = [list(&pod["initContainers"]), list(&pod["containers"])].concat();
    for container in &containers {
        let name = container["name"].as_str().expect("a name");
        let (flag, expected): (Option<&str>, Vec<&str>) = match name {
            "prepare" => (Some("--give=/run/nvshare-claims"), vec!["/run/nvshare-claims"]),
            "scheduler" => (Some("--claims=/run/nvshare-claims"), vec!["/run/nvshare-claims"]),
            "device-plugin" => (
                None,
                vec![
                    "/var/lib/kubelet/plugins/gpu.nvshare.com",
                    "/var/lib/kubelet/plugins_registry",
                    "/var/run/secrets/kubernetes.io/serviceaccount",
                ],
            ),
            _ => (None, vec![]),
        };
        let command = list(&container["command"]);
        let flags: Vec<&str> =
            command.iter().filter_map(|flag| flag.as_str().filter(|f| f.contains("nvshare-claims"))).collect();
        assert_eq!(flags, flag.into_iter().collect::<Vec<_>>(), "{name}");
        let Some(before) = base.iter().find(|other| other["name"] == name) else { continue };
        let paths = |container: &Value| -> BTreeSet<String> {
            list(&container["volumeMounts"])
                .iter()
                .map(|mount| mount["mountPath"].as_str().expect("a path").to_owned())
                .collect()
        };
        let (now, then) = (paths(container), paths(before));
        assert_eq!(now.difference(&then).collect::<Vec<_>>(), expected, "{name}");
        assert!(then.is_subset(&now) && now.len() == list(&container["volumeMounts"]).len(), "{name}");
        let has_node = list(&container["env"]).iter().any(|variable| variable["name"] == "NODE_NAME");
        assert_eq!(has_node, ["agent", "device-plugin"].contains(&name), "{name}");
    }
    let plugin = containers.iter().find(|container| container["name"] == "device-plugin").expect("the plugin");
    let cdi = list(&plugin["volumeMounts"])
        .into_iter()
        .find(|mount| mount["mountPath"] == "/var/run/cdi")
        .expect("the mount");
    assert_ne!(cdi["readOnly"], true);
    assert!(list(&plugin["env"]).iter().any(|variable| variable["name"] == "NVIDIA_VISIBLE_DEVICES"));
    let volumes: BTreeSet<String> =
        list(&pod["volumes"]).iter().map(|volume| volume["name"].as_str().expect("a name").to_owned()).collect();
    let named = containers.iter().flat_map(|container| list(&container["volumeMounts"]));
    assert!(named.into_iter().all(|mount| volumes.contains(mount["name"].as_str().expect("a name"))), "{volumes:?}");
    let text = dra["ConfigMap"]["data"]["device-plugin.toml"].as_str().expect("a text");
    let config =
        nvshare_device_plugin::config::Config::parse(text, Path::new("device-plugin.toml")).expect("it is right");
    assert_eq!(config.offer, nvshare_device_plugin::config::Offer::Dra);
    assert!(!config.offers_by(nvshare_device_plugin::config::Offer::DevicePlugin));
    for kind in ["DeviceClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"] {
        assert!(dra.contains_key(kind), "{kind}");
    }
}

#[test]
#[ignore = "needs kubectl: make check-kubernetes"]
fn overlays_make_only_the_intended_changes_to_the_base() {
    let base = built("base");
    let containers = |built: &BTreeMap<String, Value>| -> Vec<Value> {
        built["DaemonSet"]["spec"]["template"]["spec"]["containers"].as_array().expect("containers").clone()
    };
    let without_cdi = built("mounts");
    let mut expected = containers(&base);
    expected.retain(|container| container["name"] != "cdi");
    assert_eq!(containers(&without_cdi), expected);
    let text = |built: &BTreeMap<String, Value>| {
        let text = built["ConfigMap"]["data"]["device-plugin.toml"].as_str().expect("a text").to_owned();
        nvshare_device_plugin::config::Config::parse(&text, Path::new("device-plugin.toml")).expect("it is right")
    };
    let (mut config, before) = (text(&without_cdi), text(&base));
    assert_eq!(config.inject, nvshare_device_plugin::config::Inject::Mounts);
    config.inject = before.inject;
    assert_eq!(config, before);

    check_dra_additions(&containers(&base), &built("dra"));

    let by_mounts = built("examples/volume-mounts");
    for container in containers(&by_mounts) {
        let mounts = container["volumeMounts"].as_array().expect("mounts");
        let asks = mounts.iter().any(|mount| mount["mountPath"] == "/var/run/nvidia-container-devices/all");
        let needs_gpus =
            container["env"].as_array().is_some_and(|env| env.iter().any(|v| v["name"] == "NVIDIA_VISIBLE_DEVICES"));
        assert_eq!(asks, needs_gpus, "{}", container["name"]);
    }
}
