//! NVIDIA's CDI file (`nvidia-ctk cdi generate`): the driver's libraries, device nodes and hooks that a GPU needs in
//! a container. CDI cannot refer to another vendor's device, so the edits are copied.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::edits::Edits;
use crate::bus::Gpu;

const KIND: &str = "nvidia.com/gpu";

/// Where runtimes look; what is in the last one counts.
const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// No such file is as large.
const LARGEST: u64 = 16 << 20;

/// Such a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Nvidia {
    pub version: String,
    /// For whatever device.
    pub edits: Edits,
    devices: Vec<(String, Edits)>,
}

impl Nvidia {
    /// The file that is in force on this host, if there is one.
    pub fn find() -> Result<Option<Self>, String> {
        let mut found = None;
        for directory in DIRECTORIES {
            let Ok(entries) = Path::new(directory).read_dir() else { continue };
            let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            files.sort();
            for file in files.iter().filter(|file| is_spec(file)) {
                // Those of others are their business, also where they are wrong.
                let Ok(value) = parse(file) else { continue };
                if kind(&value) == KIND {
                    found = Some(Self::of(&value).map_err(|why| format!("{}: {why}", file.display()))?);
                }
            }
        }
        Ok(found)
    }

    pub fn read(file: &Path) -> Result<Self, String> {
        let value = parse(file)?;
        let said = kind(&value);
        let wrong = |why: String| format!("{}: {why}", file.display());
        if said != KIND {
            return Err(wrong(format!("its kind is {said:?}, and NVIDIA's is {KIND:?}")));
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

    /// The edits of a GPU, by its UUID or else its index. MIG slices have other indices.
    pub fn device(&self, gpu: &Gpu) -> Option<&Edits> {
        let named = |name: &str| self.devices.iter().find(|(known, _)| known == name).map(|(_, edits)| edits);
        let number = gpu.index.filter(|_| gpu.kind != "mig").map(|index| index.to_string());
        named(&gpu.uuid).or_else(|| number.and_then(|number| named(&number)))
    }
}

fn is_spec(file: &Path) -> bool {
    file.extension().is_some_and(|extension| ["json", "yaml", "yml"].iter().any(|known| extension == *known))
}

fn kind(value: &Value) -> &str {
    value.get("kind").and_then(Value::as_str).unwrap_or_default()
}

fn parse(file: &Path) -> Result<Value, String> {
    let wrong = |why: String| format!("{}: {why}", file.display());
    let size = file.metadata().map_err(|e| wrong(e.to_string()))?.len();
    if size > LARGEST {
        return Err(wrong(format!("{size} bytes are more than a CDI file has")));
    }
    let text = std::fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    if file.extension().is_some_and(|extension| extension == "json") {
        return serde_json::from_str(&text).map_err(|e| wrong(e.to_string()));
    }
    serde_saphyr::from_str(&text).map_err(|e| wrong(e.to_string()))
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
    fn a_gpu_is_found_by_its_uuid_and_else_by_its_number() {
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
    fn what_is_not_nvidias_is_refused() {
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
