//! The device nodes of a GPU, for hosts without NVIDIA's CDI file.

use std::path::Path;

use super::edits::Edits;

/// The directory in which the driver lists each GPU's minor number.
const GPUS: &str = "/proc/driver/nvidia/gpus";

/// Device files that every CUDA program needs.
const COMMON: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// Returns the device nodes that every GPU needs.
pub fn common() -> Edits {
    let mut edits = Edits::default();
    COMMON.into_iter().filter(|node| Path::new(node).exists()).for_each(|node| edits.device_node(node));
    edits
}

/// Returns the node of one GPU, by the GPU's UUID.
pub fn of(uuid: &str) -> Option<Edits> {
    let entries = Path::new(GPUS).read_dir().ok()?;
    let texts = entries.flatten().filter_map(|entry| std::fs::read_to_string(entry.path().join("information")).ok());
    let minor = texts.filter_map(|text| minor(&text, uuid)).next()?;
    let mut edits = Edits::default();
    edits.device_node(&format!("/dev/nvidia{minor}"));
    Some(edits)
}

/// Returns the number in `/dev/nvidia<number>`, which may differ from `nvidia-smi`'s index.
fn minor(information: &str, uuid: &str) -> Option<u32> {
    let value = |key: &str| {
        let mut pairs = information.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(known, _)| known.trim() == key).map(|(_, value)| value.trim())
    };
    (value("GPU UUID")? == uuid).then(|| value("Device Minor")?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_number_is_the_drivers_minor_number() {
        let text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 100\nGPU UUID: \t GPU-1\nBus Location: \t 0000:19:00.0\n\
                    Device Minor: \t 3\nGPU Excluded:\t No\n";
        assert_eq!(minor(text, "GPU-1"), Some(3));
        assert_eq!(minor(text, "GPU-2"), None);
        assert_eq!(minor("GPU UUID: GPU-1\n", "GPU-1"), None);
    }
}
