//! NVIDIA's CDI file (`nvidia-ctk cdi generate`). It lists the driver's libraries, device nodes and
//! hooks that a GPU needs in a container. CDI cannot refer to another vendor's device, so nvshare
//! copies the edits.

use std::path::Path;

use serde_json::Value;

use super::edits::Edits;
use super::specs;
use crate::bus::Gpu;

/// The kind that `nvidia-ctk cdi generate` writes by default.
const KIND: &str = "nvidia.com/gpu";

/// A parsed CDI file of NVIDIA's.
#[derive(Debug, Clone, PartialEq)]
pub struct Nvidia {
    pub version: String,
    /// Edits for every device.
    pub edits: Edits,
    devices: Vec<(String, Edits)>,
}

impl Nvidia {
    /// Finds the file in these directories that names the most of these GPUs. Among equal files,
    /// prefers the kind `nvidia.com/gpu`, and then the last file. NVIDIA's device plugin and its
    /// operator write other kinds, such as `k8s.device-plugin.nvidia.com/gpu`. They also write
    /// `management.nvidia.com/gpu`. That kind is never used, because it has only the device `all`,
    /// which would give a container all GPUs.
    ///
    /// # Errors
    /// A sentence with the path, if a file of the kind `nvidia.com/gpu` does not conform to CDI.
    pub fn find(directories: &[&Path], gpus: &[Gpu]) -> Result<Option<Self>, String> {
        let mut found: Vec<((usize, bool), Self)> = Vec::new();
        for file in directories.iter().flat_map(|directory| specs::files(directory)) {
            // Invalid files are ignored, because they may belong to other vendors.
            let Ok(value) = specs::parse(&file) else { continue };
            let kind = specs::kind(&value);
            let is_usual = kind == KIND;
            if !is_nvidias(kind) {
                continue;
            }
            match Self::of(&value) {
                Ok(nvidia) => {
                    let named = gpus.iter().filter(|gpu| nvidia.device(gpu).is_some()).count();
                    if is_usual || named > 0 {
                        found.push(((named, is_usual), nvidia));
                    }
                }
                Err(why) if is_usual => return Err(format!("{}: {why}", file.display())),
                Err(_) => {}
            }
        }
        Ok(found.into_iter().max_by_key(|(rank, _)| *rank).map(|(_, nvidia)| nvidia))
    }

    pub fn read(file: &Path) -> Result<Self, String> {
        let value = specs::parse(file)?;
        let said = specs::kind(&value);
        let wrong = |why: String| format!("{}: {why}", file.display());
        if !is_nvidias(said) {
            return Err(wrong(format!("its kind is {said:?} instead of {KIND:?}")));
        }
        Self::of(&value).map_err(wrong)
    }

    fn of(value: &Value) -> Result<Self, String> {
        let version = value.get("cdiVersion").and_then(Value::as_str).ok_or("it has no cdiVersion")?;
        let devices = value.get("devices").and_then(Value::as_array).ok_or("it has no devices")?;
        let device = |device: &Value| Some((device.get("name")?.as_str()?.to_owned(), Edits::of(device)));
        Ok(Self {
            version: version.into(),
            edits: Edits::of(value),
            devices: devices.iter().filter_map(device).collect(),
        })
    }

    /// Returns the edits of a GPU, by its UUID or else its index. MIG slices are indexed
    /// differently, so the index is not used for them.
    pub fn device(&self, gpu: &Gpu) -> Option<&Edits> {
        let named = |name: &str| self.devices.iter().find(|(known, _)| known == name).map(|(_, edits)| edits);
        let number = gpu.index.filter(|_| gpu.kind != "mig").map(|index| index.to_string());
        named(&gpu.uuid).or_else(|| number.and_then(|number| named(&number)))
    }
}

/// Returns true for `nvidia.com/gpu`, and for GPUs of vendors below `nvidia.com`.
fn is_nvidias(kind: &str) -> bool {
    let vendor = kind.strip_suffix("/gpu");
    vendor.is_some_and(|vendor| vendor == "nvidia.com" || vendor.ends_with(".nvidia.com"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str = "---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib]
devices:
- name: \"0\"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- name: GPU-1
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia7
      fileMode: 438
";

    fn gpu(uuid: &str, index: Option<u32>, kind: &str) -> Gpu {
        Gpu { uuid: uuid.into(), index, kind: kind.into(), ..Gpu::default() }
    }

    #[test]
    fn a_gpu_is_found_by_uuid_or_else_by_index() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("nvidia.yaml");
        std::fs::write(&file, YAML).expect("the file");
        let nvidia = Nvidia::read(&file).expect("a CDI file");
        let node = |gpu: &Gpu| nvidia.device(gpu).map(|edits| edits.json()["deviceNodes"][0]["path"].clone());
        assert_eq!(node(&gpu("GPU-1", Some(0), "gpu")), Some("/dev/nvidia7".into()));
        assert_eq!(node(&gpu("GPU-2", Some(0), "gpu")), Some("/dev/nvidia0".into()));
        assert_eq!(node(&gpu("MIG-2", Some(0), "mig")), None);
        assert_eq!(node(&gpu("GPU-2", None, "gpu")), None);
        assert_eq!(nvidia.edits.json()["hooks"][0]["args"][3], "/usr/lib");
    }

    #[test]
    fn the_file_that_names_the_most_gpus_is_used() {
        let directories = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let paths = [directories[0].path(), directories[1].path()];
        let write = |at: usize, name: &str, kind: &str, device: &str| {
            let edits = format!(r#"{{"deviceNodes": [{{"path": "/dev/{kind}"}}]}}"#);
            let device = format!(r#"{{"name": "{device}", "containerEdits": {edits}}}"#);
            let text = format!(r#"{{"cdiVersion": "0.5.0", "kind": "{kind}", "devices": [{device}]}}"#);
            std::fs::write(paths[at].join(name), text).expect("a file");
        };
        let gpus = [gpu("GPU-1", Some(0), "gpu")];
        let found = || {
            let nvidia = Nvidia::find(&paths, &gpus).expect("the files are right")?;
            Some(nvidia.device(&gpus[0]).map(|edits| edits.json()["deviceNodes"][0]["path"].clone()))
        };
        assert_eq!(found(), None);
        // This file contains only the device `all`, which no container should get.
        write(1, "management.nvidia.com-gpu.json", "management.nvidia.com/gpu", "all");
        write(1, "other.json", "example.com/gpu", "GPU-1");
        write(1, "like.json", "notnvidia.com/gpu", "GPU-1");
        assert_eq!(found(), None);
        write(1, "plugin.json", "k8s.device-plugin.nvidia.com/gpu", "GPU-1");
        assert_eq!(found(), Some(Some("/dev/k8s.device-plugin.nvidia.com/gpu".into())));
        // A file that is older than the GPU does not hide another file that lists the GPU.
        write(0, "nvidia.json", "nvidia.com/gpu", "GPU-0");
        assert_eq!(found(), Some(Some("/dev/k8s.device-plugin.nvidia.com/gpu".into())));
        write(0, "nvidia.json", "nvidia.com/gpu", "0");
        assert_eq!(found(), Some(Some("/dev/nvidia.com/gpu".into())));
        std::fs::write(paths[1].join("z.json"), r#"{"kind": "nvidia.com/gpu"}"#).expect("a file");
        let said = Nvidia::find(&paths, &gpus).expect_err("it is not CDI's");
        assert!(said.contains("z.json: it has no cdiVersion"), "{said}");
    }

    #[test]
    fn foreign_and_invalid_files_are_rejected() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("other.json");
        for (text, why) in [
            ("{\"kind\": \"intel.com/gpu\"}", "intel.com/gpu"),
            ("{\"kind\": \"nvidia.com/gpu\"}", "cdiVersion"),
            ("{", "EOF"),
        ] {
            std::fs::write(&file, text).expect("the file");
            let said = Nvidia::read(&file).expect_err(text);
            assert!(said.contains(why) && said.contains("other.json"), "{said}");
        }
    }
}
