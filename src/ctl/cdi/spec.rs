//! The CDI file of nvshare. It defines the device `all`, and devices for each GPU that are named by
//! the GPU's number and UUID.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::edits::Edits;
use super::nvidia::Nvidia;
use super::{hook, nodes};
use crate::bus::Gpu;
use crate::config::paths::{LIBRARY_IN_CONTAINERS, PRELOAD_IN_CONTAINERS, SOCKETS_IN_CONTAINERS};

const KIND: &str = "nvshare.com/gpu";

/// The oldest version of CDI in which a device's name may begin with a digit.
const VERSION: &str = "0.5.0";

/// Paths on the host that nvshare mounts in containers.
#[derive(Debug, Clone)]
pub struct FromHost {
    pub library: String,
    pub preload_list: String,
    pub sockets: String,
    /// The path of this program, if the runtime can execute it. Without this program as a hook,
    /// nvshare's list hides an image's own list.
    pub hook: Option<String>,
}

/// The kind of the devices of Kubernetes' ResourceClaims.
pub const CLAIM_KIND: &str = "nvshare.com/claim";

/// Returns a CDI file with one device, whose name is the UID of a claim. The device mounts the
/// directory of the claim's socket in place of the usual directory. A container must list this
/// device after the device of a GPU, so that runtimes replace the GPU device's mount. The variable
/// tells the hook how many claims a container has.
pub fn of_claim(uid: &str, name: &str, sockets: &str) -> String {
    let mut edits = Edits::default();
    edits.mount(sockets, SOCKETS_IN_CONTAINERS);
    edits.variable(&format!("{}{}", hook::CLAIM_VARIABLE, uid.replace('-', "_")), name);
    let device = json!({ "name": uid, "containerEdits": edits.json() });
    format!("{:#}\n", json!({ "cdiVersion": VERSION, "kind": CLAIM_KIND, "devices": [device] }))
}

#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    version: String,
    edits: Edits,
    devices: BTreeMap<String, Edits>,
}

impl Spec {
    /// Creates the file from the edits of GPUs in NVIDIA's file. Without NVIDIA's file, uses only
    /// the GPUs' device nodes.
    pub fn of(
        gpus: &[Gpu],
        from_host: &FromHost,
        nvidia: Option<&Nvidia>,
        remarks: &mut Vec<String>,
    ) -> Result<Self, String> {
        let mut edits = nvidia.map_or_else(nodes::common, |nvidia| nvidia.edits.clone());
        // The library is not preloaded by LD_PRELOAD, because CDI would replace the image's own
        // value. Also, only glibc reads `/etc/ld.so.preload`, so programs with another C library
        // are unaffected.
        edits.mount(&from_host.preload_list, PRELOAD_IN_CONTAINERS);
        if let Some(program) = &from_host.hook {
            edits.create_hook(program, &["nvsharectl", "cdi", hook::COMMAND]);
        }
        edits.mount(&from_host.library, LIBRARY_IN_CONTAINERS);
        // The whole directory is mounted rather than the socket, because a restarted scheduler
        // creates a new socket in the directory.
        edits.mount(&from_host.sockets, SOCKETS_IN_CONTAINERS);
        let mut devices = BTreeMap::new();
        let mut all = Edits::default();
        for gpu in gpus {
            let found = match nvidia {
                Some(nvidia) => nvidia.device(gpu).cloned(),
                None => nodes::of(&gpu.uuid),
            };
            // Runtimes reject a device without edits.
            let Some(found) = found.filter(|edits| !edits.is_empty()) else {
                let uuid = &gpu.uuid;
                remarks.push(match (nvidia, &*gpu.kind) {
                    (Some(_), "mig") => format!(
                        "omitted {uuid}: NVIDIA's CDI file does not list its UUID. Run `nvidia-ctk cdi generate \
                         --device-name-strategy=uuid`"
                    ),
                    (Some(_), _) => {
                        format!(
                            "omitted {uuid}: NVIDIA's CDI file does not list the GPU. If the GPU is new, write that \
                             file again with `nvidia-ctk cdi generate`"
                        )
                    }
                    (None, _) => format!("omitted {uuid}: the driver does not report its device node"),
                });
                continue;
            };
            all.merge(&found);
            if let Some(index) = gpu.index.filter(|_| gpu.kind != "mig") {
                devices.insert(index.to_string(), found.clone());
            }
            devices.insert(gpu.uuid.clone(), found);
        }
        if devices.is_empty() {
            return Err(remarks.join("; "));
        }
        devices.insert("all".into(), all);
        let version = nvidia.map_or(VERSION, |nvidia| newer(&nvidia.version, VERSION)).to_owned();
        Ok(Self { version, edits, devices })
    }

    pub fn json(&self) -> Value {
        let device = |(name, own): (&String, &Edits)| json!({ "name": name, "containerEdits": own.json() });
        json!({
            "cdiVersion": self.version,
            "kind": KIND,
            "containerEdits": self.edits.json(),
            "devices": self.devices.iter().map(device).collect::<Vec<_>>(),
        })
    }

    /// The devices' qualified names.
    pub fn names(&self) -> String {
        let names: Vec<String> = self.devices.keys().map(|name| format!("{KIND}={name}")).collect();
        names.join(" ")
    }
}

/// Returns the newer of two versions of CDI.
fn newer<'a>(one: &'a str, other: &'a str) -> &'a str {
    let numbers = |version: &str| -> Vec<u32> {
        version.trim_start_matches('v').split('.').map(|part| part.parse().unwrap_or(0)).collect()
    };
    if numbers(one) > numbers(other) { one } else { other }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_host() -> FromHost {
        let [library, preload_list, sockets] = ["/l/libnvshare.so", "/l/ld.so.preload", "/s"].map(str::to_owned);
        FromHost { library, preload_list, sockets, hook: Some("/l/nvsharectl".into()) }
    }

    fn gpus() -> Vec<Gpu> {
        let gpu = |uuid: &str, index| Gpu { uuid: uuid.into(), index, kind: "gpu".into(), ..Gpu::default() };
        vec![gpu("GPU-a", Some(0)), gpu("GPU-b", Some(1))]
    }

    fn nvidia(version: &str) -> Nvidia {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("nvidia.json");
        let device = |name: &str, node: &str| json!({ "name": name, "containerEdits": { "deviceNodes": [{ "path": node }, { "path": "/dev/nvidiactl" }] } });
        let text = json!({
            "cdiVersion": version,
            "kind": "nvidia.com/gpu",
            "containerEdits": { "mounts": [{ "hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/usr/lib/libcuda.so.1", "options": ["ro", "bind"] }] },
            "devices": [device("0", "/dev/nvidia0"), device("1", "/dev/nvidia1")],
        });
        std::fs::write(&file, text.to_string()).expect("the file");
        Nvidia::read(&file).expect("a CDI file")
    }

    #[test]
    fn devices_are_named_by_number_by_uuid_and_all() {
        let mut remarks = Vec::new();
        let spec = Spec::of(&gpus(), &from_host(), Some(&nvidia("0.5.0")), &mut remarks).expect("a spec");
        assert!(remarks.is_empty(), "{remarks:?}");
        let json = spec.json();
        let names: Vec<&str> =
            json["devices"].as_array().expect("devices").iter().filter_map(|d| d["name"].as_str()).collect();
        assert_eq!(names, ["0", "1", "GPU-a", "GPU-b", "all"]);
        let nodes = |at: usize| {
            let nodes = json["devices"][at]["containerEdits"]["deviceNodes"].as_array().expect("nodes").iter();
            nodes.filter_map(|node| Some(node["path"].as_str()?.to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(nodes(1), ["/dev/nvidia1", "/dev/nvidiactl"]);
        assert_eq!(nodes(4), ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia1"]);
    }

    #[test]
    fn containers_mount_library_list_and_sockets_read_only() {
        let spec = Spec::of(&gpus(), &from_host(), Some(&nvidia("0.5.0")), &mut Vec::new()).expect("a spec").json();
        let mounts = spec["containerEdits"]["mounts"].as_array().expect("mounts");
        let pair = |mount: &Value| {
            format!("{} {}", mount["hostPath"].as_str().unwrap(), mount["containerPath"].as_str().unwrap())
        };
        let pairs: Vec<String> = mounts.iter().map(pair).collect();
        assert_eq!(
            pairs,
            [
                "/usr/lib/libcuda.so.1 /usr/lib/libcuda.so.1",
                "/l/ld.so.preload /etc/ld.so.preload",
                "/l/libnvshare.so /usr/lib/nvshare/libnvshare.so",
                "/s /run/nvshare",
            ]
        );
        let is_to_read = |mount: &Value| mount["options"].as_array().is_some_and(|all| all.contains(&"ro".into()));
        assert!(mounts.iter().all(is_to_read));
        assert!(mounts.iter().all(|mount| mount["type"] == "bind"), "crun restores no mount without a type");
        assert_eq!(spec["containerEdits"]["env"], Value::Null, "no variable of the image is replaced");
        let hook = json!({ "hookName": "createContainer", "path": "/l/nvsharectl", "args": ["nvsharectl", "cdi", "merge-preload"] });
        assert_eq!(spec["containerEdits"]["hooks"], json!([hook]));
        let without = FromHost { hook: None, ..from_host() };
        let spec = Spec::of(&gpus(), &without, Some(&nvidia("0.5.0")), &mut Vec::new()).expect("a spec").json();
        assert_eq!(spec["containerEdits"]["hooks"], Value::Null);
    }

    #[test]
    fn the_version_is_the_newest_that_any_part_needs() {
        for (theirs, expected) in [("0.3.0", "0.5.0"), ("0.5.0", "0.5.0"), ("0.7.0", "0.7.0"), ("0.10.0", "0.10.0")] {
            let spec = Spec::of(&gpus(), &from_host(), Some(&nvidia(theirs)), &mut Vec::new()).expect("a spec");
            assert_eq!(spec.json()["cdiVersion"], expected);
        }
    }

    #[test]
    fn a_gpu_missing_in_nvidias_file_is_omitted_with_a_remark() {
        let mut all = gpus();
        all.push(Gpu { uuid: "GPU-c".into(), index: Some(2), kind: "gpu".into(), ..Gpu::default() });
        all.push(Gpu { uuid: "MIG-d".into(), index: Some(0), kind: "mig".into(), ..Gpu::default() });
        let mut remarks = Vec::new();
        let spec = Spec::of(&all, &from_host(), Some(&nvidia("0.5.0")), &mut remarks).expect("a spec");
        assert!(!spec.names().contains("GPU-c") && !spec.names().contains("MIG-d"));
        assert!(remarks[0].contains("GPU-c") && remarks[1].contains("strategy=uuid"), "{remarks:?}");
        assert!(Spec::of(&all[2..], &from_host(), Some(&nvidia("0.5.0")), &mut Vec::new()).is_err(), "none is left");
    }
}
