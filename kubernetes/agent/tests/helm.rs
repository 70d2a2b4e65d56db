//! Checks that the Helm chart installs the objects of `kubernetes/base`, with the changes that the
//! chart's values describe. Without `helm`, only the checks that do not need `helm` run.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use k8s_openapi::api::batch::v1::Job;
use kubernetes_test_support::api_server::{Answer, ApiServer, Method, Watchers, World, refused, whole};
use serde_json::{Value, json};

use crate::manifests::{built_with, check_dra_additions, documents, kubernetes};

fn chart() -> std::path::PathBuf {
    kubernetes().join("helm/nvshare")
}

fn read(name: &str) -> String {
    let path = chart().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn the_chart_embeds_the_manifests_and_has_the_programs_version() {
    for file in [
        "base/access.yaml",
        "base/config.yaml",
        "base/daemonset.yaml",
        "dra/access.yaml",
        "dra/daemonset.yaml",
        "sleep/daemonset.yaml",
    ] {
        assert_eq!(read(file), std::fs::read_to_string(kubernetes().join(file)).expect("a manifest"), "{file}");
    }
    let chart: Value = serde_saphyr::from_str(&read("Chart.yaml")).expect("YAML");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!((&chart["version"], &chart["appVersion"]), (&json!(version), &json!(version)));
    // The template must use exactly the values that can be set.
    let values: Value = serde_saphyr::from_str(&read("values.yaml")).expect("YAML");
    let template = read("templates/nvshare.yaml");
    for key in values.as_object().expect("values").keys() {
        let is_used = [format!("$values.{key}"), format!("\"{key}\"")].iter().any(|use_| template.contains(use_));
        assert!(is_used, "{key}");
    }
    for used in template.split("$values.").skip(1) {
        let path: Vec<&str> =
            used.split(|c: char| !(c.is_alphanumeric() || c == '.')).next().unwrap_or_default().split('.').collect();
        let found = path.iter().try_fold(&values, |value, key| value.get(key));
        assert!(found.is_some(), "{path:?} is in no values");
    }
}

/// A misspelt value is refused, and every value of `values.yaml` is accepted.
#[test]
fn the_schema_lists_exactly_the_charts_values() {
    fn compare(path: &str, values: &Value, schema: &Value) {
        let (Some(values), Some(known)) = (values.as_object(), schema["properties"].as_object()) else { return };
        assert_eq!(schema["additionalProperties"], json!(false), "{path}");
        for (key, value) in values {
            let path = format!("{path}.{key}");
            compare(&path, value, known.get(key).unwrap_or_else(|| panic!("{path} is not in the schema")));
        }
        // Under `resources`, the keys are names of containers. Helm itself sets `global`.
        for key in known.keys().filter(|key| *key != "global" && !path.ends_with(".resources")) {
            assert!(values.contains_key(key), "{path}.{key} is in no values");
        }
    }
    let schema: Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    let values: Value = serde_saphyr::from_str(&read("values.yaml")).expect("YAML");
    compare("", &values, &schema);
}

#[test]
#[ignore = "needs kubectl: make check-kubernetes"]
fn the_schema_names_every_container() {
    let schema: Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    let named = |object: &Value| object["name"].as_str().expect("a name").to_owned();
    let mut containers: Vec<String> = built_with(&["sleep"], "dra")
        .iter()
        .filter(|object| object["kind"] == "DaemonSet")
        .flat_map(|object| {
            let pod = &object["spec"]["template"]["spec"];
            ["initContainers", "containers"]
                .iter()
                .flat_map(|list| pod[*list].as_array().cloned().unwrap_or_default())
                .map(|container| named(&container))
                .collect::<Vec<_>>()
        })
        .collect();
    containers.sort();
    let known = schema.pointer("/properties/resources/properties").and_then(Value::as_object).expect("containers");
    let mut known: Vec<&String> = known.keys().collect();
    known.sort();
    assert_eq!(known, containers.iter().collect::<Vec<_>>());
}

fn is_hook(object: &Value) -> bool {
    object.pointer("/metadata/annotations").is_some_and(|all| all.get("helm.sh/hook").is_some())
}

/// Returns the objects that the chart installs with these values.
fn rendered_list(values: &Value) -> Vec<Value> {
    let all = rendered_with_hooks(values).into_iter();
    all.filter(|object| !is_hook(object)).collect()
}

/// Returns the objects of the chart with these values, including hooks.
fn rendered_with_hooks(values: &Value) -> Vec<Value> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), values.to_string()).expect("values");
    let mut helm = Command::new("helm");
    helm.args(["template", "nvshare"]).arg(chart()).args(["--namespace", "nvshare", "--values"]).arg(file.path());
    let output = helm.output().expect("helm");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let all: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    all.into_iter().filter(|object| !object.is_null()).collect()
}

/// The rendered objects by kind.
fn rendered(values: &Value) -> BTreeMap<String, Value> {
    let by_kind = |object: Value| (object["kind"].as_str().unwrap_or_default().to_owned(), object);
    rendered_list(values).into_iter().map(by_kind).collect()
}

/// Returns the object without the chart's own additions, with parsed settings, and with containers
/// and volumes sorted by name.
fn plain(mut object: Value) -> Value {
    for key in ["labels", "namespace"] {
        object["metadata"].as_object_mut().expect("metadata").remove(key);
    }
    if let Some(template) = object.pointer_mut("/spec/template") {
        template["metadata"].as_object_mut().expect("metadata").remove("annotations");
        for list in ["containers", "initContainers", "volumes"] {
            let list = template["spec"][list].as_array_mut().expect(list);
            list.sort_by_key(|named| named["name"].to_string());
            for container in list {
                let container = container.as_object_mut().expect("a container");
                container.retain(|key, _| !["image", "imagePullPolicy"].contains(&key.as_str()));
            }
        }
    }
    if let Some(data) = object.get_mut("data").and_then(Value::as_object_mut) {
        for (file, text) in data {
            let (source, path) = (text.as_str().expect("a text").to_owned(), Path::new(file));
            *text = json!(match file.as_str() {
                "nvshare.toml" => format!("{:?}", nvshare::config::Config::parse(&source, path).expect("it is right")),
                "agent.toml" =>
                    format!("{:?}", nvshare_agent::config::Config::parse(&source, path).expect("it is right")),
                _ => format!("{:?}", nvshare_device_plugin::config::Config::parse(&source, path).expect("it is right")),
            });
        }
    }
    object
}

#[test]
#[ignore = "needs helm: make check-kubernetes"]
fn default_values_render_the_kustomize_base() {
    let rendered = rendered(&json!({}));
    let base = documents().into_iter().filter(|(path, _)| path.parent().is_some_and(|parent| parent.ends_with("base")));
    let mut count = 0;
    for (_, object) in base {
        let kind = object["kind"].as_str().expect("a kind").to_owned();
        // Helm creates the namespace itself.
        if ["Namespace", "Kustomization"].contains(&&*kind) {
            continue;
        }
        let chart = plain(rendered.get(&kind).unwrap_or_else(|| panic!("{kind} is missing")).clone());
        assert_eq!(chart, plain(object), "{kind}");
        count += 1;
    }
    assert_eq!(rendered.len(), count);
}

#[test]
#[ignore = "needs helm: make check-kubernetes"]
fn the_chart_passes_helm_lint() {
    let output = Command::new("helm").args(["lint", "--strict"]).arg(chart()).output().expect("helm");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "needs helm: make check-kubernetes"]
fn uninstalling_checks_for_remaining_claims() {
    let hooks = |values: Value| -> Vec<Value> { rendered_with_hooks(&values).into_iter().filter(is_hook).collect() };
    assert!(hooks(json!({})).is_empty());
    let image = json!({"repository": "registry/nvshare", "tag": "1"});
    let values = json!({"dra": {"enabled": true}, "image": image, "imagePullSecrets": [{"name": "pull"}]});
    let [job] = &hooks(values)[..] else { panic!("one hook") };
    assert_eq!((&job["kind"], &job["metadata"]["annotations"]["helm.sh/hook"]), (&json!("Job"), &json!("pre-delete")));
    let known: Job = serde_json::from_value(job.clone()).expect("a Job");
    assert_eq!(&serde_json::to_value(&known).expect("JSON"), job, "a key is unknown");
    let pod = &job["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(container["command"], json!(["/usr/bin/nvshare-device-plugin", "--check-removal"]));
    assert_eq!(
        (&container["image"], &pod["imagePullSecrets"][0]["name"]),
        (&json!("registry/nvshare:1"), &json!("pull"))
    );
    // The DaemonSet's selector must not match the Job's pod.
    assert_eq!(job.pointer("/spec/template/metadata/labels"), None);
    let account = rendered(&json!({"dra": {"enabled": true}}))["ServiceAccount"]["metadata"]["name"].clone();
    assert_eq!(pod["serviceAccountName"], account);
}

/// A cluster in which these objects are installed. The keys are their paths.
#[derive(Debug)]
struct Installed {
    objects: BTreeMap<&'static str, Value>,
    watchers: Watchers,
}

impl World for Installed {
    fn answer(&mut self, _: &Method, uri: &str, _: &[u8]) -> Answer {
        let kinds = [
            ("/api/v1", "v1", "ServiceAccount ConfigMap"),
            ("/apis/apps/v1", "apps/v1", "DaemonSet"),
            ("/apis/batch/v1", "batch/v1", "Job"),
            ("/apis/rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io/v1", "ClusterRole ClusterRoleBinding"),
            ("/apis/resource.k8s.io/v1", "resource.k8s.io/v1", "DeviceClass"),
            (
                "/apis/admissionregistration.k8s.io/v1",
                "admissionregistration.k8s.io/v1",
                "ValidatingAdmissionPolicy ValidatingAdmissionPolicyBinding",
            ),
        ];
        let path = uri.split('?').next().unwrap_or_default();
        let plural = |kind: &str| match kind.to_lowercase() {
            kind if kind.ends_with('s') => format!("{kind}es"),
            kind if kind.ends_with("cy") => format!("{}ies", kind.trim_end_matches('y')),
            kind => format!("{kind}s"),
        };
        match path {
            "/version" => whole(200, &json!({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})),
            "/api" => whole(200, &json!({"kind": "APIVersions", "versions": ["v1"]})),
            "/apis" => {
                let group = |(_, name, _): &(&str, &str, &str)| {
                    let version = json!({"groupVersion": name, "version": "v1"});
                    json!({"name": name.trim_end_matches("/v1"), "versions": [version], "preferredVersion": version})
                };
                let groups: Vec<Value> = kinds[1..].iter().map(group).collect();
                whole(200, &json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
            }
            _ => match (kinds.iter().find(|(at, ..)| *at == path), self.objects.get(path)) {
                (Some((_, version, kinds)), _) => {
                    let resource = |kind: &str| {
                        let namespaced = ["ServiceAccount", "ConfigMap", "DaemonSet", "Job"].contains(&kind);
                        json!({"name": plural(kind), "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": ["get"]})
                    };
                    let resources: Vec<Value> = kinds.split(' ').map(resource).collect();
                    whole(200, &json!({"kind": "APIResourceList", "groupVersion": version, "resources": resources}))
                }
                (None, Some(object)) => whole(200, object),
                (None, None) => refused(404, "NotFound", path),
            },
        }
    }

    fn watchers(&mut self) -> &mut Watchers {
        &mut self.watchers
    }
}

/// Upgrades a release with the installed objects `objects` to new chart values. Returns the result, or
/// the reason why the upgrade is refused.
fn upgraded(objects: &[(&'static str, Value)], values: &Value) -> Result<String, String> {
    let own = |(path, object): &(&'static str, Value)| {
        let mut object = object.clone();
        object["metadata"]["labels"] = json!({"app.kubernetes.io/managed-by": "Helm"});
        object["metadata"]["annotations"] =
            json!({"meta.helm.sh/release-name": "nvshare", "meta.helm.sh/release-namespace": "nvshare"});
        (*path, object)
    };
    let objects = objects.iter().map(own).collect();
    let api = ApiServer::start(Installed { objects, watchers: Watchers::default() });
    let directory = tempfile::tempdir().expect("a directory");
    let [kubeconfig, file] = ["kubeconfig", "values.json"].map(|name| directory.path().join(name));
    std::fs::write(&kubeconfig, api.kubeconfig()).expect("a file");
    std::fs::write(&file, values.to_string()).expect("a file");
    let mut helm = Command::new("helm");
    helm.args(["template", "nvshare"]).arg(chart()).args(["--namespace", "nvshare", "--values"]).arg(file);
    helm.args(["--dry-run=server", "--disable-openapi-validation", "--kubeconfig"]).arg(kubeconfig);
    let output = helm.output().expect("helm");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
#[ignore = "needs helm: make check-kubernetes"]
fn an_upgrade_that_removes_sleep_or_dra_must_be_confirmed() {
    let containers = json!([{"name": "checkpoint"}, {"name": "scheduler"}]);
    let daemon_set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "nvshare", "namespace": "nvshare"},
        "spec": {"template": {"spec": {"containers": containers}}}});
    let with_sleep = [("/apis/apps/v1/namespaces/nvshare/daemonsets/nvshare", daemon_set)];
    let refused = upgraded(&with_sleep, &json!({})).expect_err("programs may sleep");
    assert!(refused.contains("then add --set sleep.remove=true"), "{refused}");
    for values in [json!({"sleep": {"enabled": true}}), json!({"sleep": {"remove": true}})] {
        upgraded(&with_sleep, &values).expect("nothing is lost");
    }

    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "nvshare-dra"}});
    let with_claims = [("/apis/rbac.authorization.k8s.io/v1/clusterroles/nvshare-dra", role)];
    let to_slots = upgraded(&with_claims, &json!({})).expect("the hook decides");
    assert!(to_slots.contains("helm.sh/hook: pre-upgrade") && to_slots.contains("--check-removal"), "{to_slots}");
    let stays = upgraded(&with_claims, &json!({"dra": {"enabled": true}})).expect("nothing is lost");
    assert!(stays.contains("helm.sh/hook: pre-delete") && !stays.contains("pre-upgrade"), "{stays}");
    assert!(!upgraded(&[], &json!({})).expect("it is installed").contains("helm.sh/hook"));
}

#[test]
#[ignore = "needs helm and kubectl: make check-kubernetes"]
fn every_combination_of_features_renders_the_kustomize_output() {
    let sleep = json!({"enabled": true});
    let features: [(&str, &[&str], Value); 7] = [
        ("base", &[], json!({})),
        ("base", &["sleep"], json!({"sleep": sleep})),
        ("mounts", &[], json!({"inject": "mounts"})),
        ("mounts", &["sleep"], json!({"inject": "mounts", "sleep": sleep})),
        ("dra", &[], json!({"dra": {"enabled": true}})),
        ("dra", &["sleep"], json!({"dra": {"enabled": true}, "sleep": sleep})),
        ("base", &["sleep", "read-only-etc"], json!({"sleep": sleep, "readOnlyEtc": true})),
    ];
    for (directory, components, values) in features {
        let built = built_with(components, directory);
        let chart = rendered_list(&values);
        for object in chart.iter().chain(&built).filter(|object| object["kind"] == "DaemonSet") {
            let pod = &object["spec"]["template"]["spec"];
            let containers = ["initContainers", "containers"].into_iter().filter_map(|list| pod[list].as_array());
            for container in containers.flatten() {
                assert_eq!(
                    container["image"],
                    concat!("nvshare:", env!("CARGO_PKG_VERSION")),
                    "{directory}: {container}"
                );
            }
        }
        let by_name = |all: Vec<Value>| -> BTreeMap<String, Value> {
            let named = all.into_iter().filter(|object| object["kind"] != "Namespace").map(|object| {
                let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
                (name, plain(object))
            });
            named.collect()
        };
        let (chart, built) = (by_name(chart), by_name(built));
        assert_eq!(chart.keys().collect::<Vec<_>>(), built.keys().collect::<Vec<_>>(), "{directory}");
        for (name, object) in &chart {
            assert_eq!(object, &built[name], "{directory}, {components:?}: {name}");
        }
    }
}

#[test]
#[ignore = "needs helm: make check-kubernetes"]
fn dra_values_render_the_kustomize_output() {
    let without = rendered(&json!({}));
    let with = rendered(&json!({"dra": {"enabled": true}}));
    let base = without["DaemonSet"]["spec"]["template"]["spec"]["containers"].as_array().expect("containers");
    check_dra_additions(base, &with);
}

#[test]
#[ignore = "needs helm: make check-kubernetes"]
fn values_change_the_rendered_manifests() {
    let values = json!({
        "image": {"repository": "registry.example/nvshare", "tag": "1.2.3"}, "inject": "mounts", "slots": 3, "agent": {"enabled": false},
        "metrics": {"enabled": true, "port": 1234, "podMonitor": true}, "nodeSelector": {"nvidia.com/gpu.present": null, "a": "b"}, "tolerations": [],
        "runtimeClassName": "", "containerdDirectory": "/var/lib/containerd", "resources": {"scheduler": {"limits": {"memory": "1Gi"}}},
        "config": {"nvshare": "[[rule]]\nname = \"a\"\npod = \"a/*\"\nweight = 5\n", "devicePlugin": "allocation = \"pack\"\n"},
    });
    let rendered = rendered(&values);
    let kinds: Vec<&str> = rendered.keys().map(String::as_str).collect();
    assert_eq!(kinds, ["ConfigMap", "DaemonSet", "PodMonitor", "ServiceAccount"]);
    let pod = &rendered["DaemonSet"]["spec"]["template"]["spec"];
    let containers = pod["containers"].as_array().expect("containers");
    let names: Vec<&str> = containers.iter().filter_map(|container| container["name"].as_str()).collect();
    assert_eq!(names, ["scheduler", "device-plugin"]);
    assert!(containers.iter().all(|container| container["image"] == "registry.example/nvshare:1.2.3"));
    assert_eq!(containers[0]["ports"], json!([{"name": "metrics", "containerPort": 1234}]));
    assert_eq!(containers[0]["resources"], json!({"limits": {"memory": "1Gi"}}));
    assert_eq!(
        (&pod["nodeSelector"], pod.get("tolerations"), pod.get("runtimeClassName")),
        (&json!({"a": "b"}), None, None)
    );
    let volumes = pod["volumes"].as_array().expect("volumes");
    let of = |name: &str| volumes.iter().find(|volume| volume["name"] == name);
    assert_eq!(of("containerd").expect("the volume")["hostPath"]["path"], "/var/lib/containerd");
    assert!(of("token").is_none());
    assert_eq!(rendered["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["portNumber"], 1234);
    let text = |file: &str| rendered["ConfigMap"]["data"][file].as_str().expect(file).to_owned();
    let config = nvshare::config::Config::parse(&text("nvshare.toml"), Path::new("nvshare.toml")).expect("it is right");
    assert_eq!(config.metrics.to_string(), "0.0.0.0:1234");
    let plugin =
        nvshare_device_plugin::config::Config::parse(&text("device-plugin.toml"), Path::new("x")).expect("it is right");
    assert_eq!((plugin.slots, plugin.inject), (3, nvshare_device_plugin::config::Inject::Mounts));
    assert_eq!(plugin.allocation, nvshare_device_plugin::config::Allocation::Pack);
    assert_eq!(plugin.mounts.library, Path::new("/var/lib/nvshare-node/libnvshare.so"));
    let with_class = self::rendered(&json!({"createRuntimeClass": true, "runtimeClassName": "gpus"}));
    assert_eq!(with_class["RuntimeClass"]["metadata"]["name"], "gpus");
    assert_eq!(with_class["RuntimeClass"]["handler"], "nvidia");
}
