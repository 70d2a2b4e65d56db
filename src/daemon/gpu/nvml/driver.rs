//! Detects whether the driver is loaded, and which GPUs it has. Reads only files, so that the driver is
//! not used.

use std::fs;
use std::path::{Path, PathBuf};

/// The driver's directory, which exists while the kernel module is loaded.
const PROC: &str = "/proc/driver/nvidia";
/// Opening this file makes the kernel load the module.
const DEVICE: &str = "/dev/nvidiactl";

/// Maximum number of files that are compared. Eight GPUs with seven slices each have fewer.
const MAX_FILES: usize = 1024;

/// The driver's files, and their state at the last check.
#[derive(Debug)]
pub struct Driver {
    proc: PathBuf,
    device: PathBuf,
    /// Paths of the files that show the driver's version, its GPUs and the MIG slices.
    seen: Vec<PathBuf>,
    was_loaded: bool,
}

impl Driver {
    pub fn new() -> Self {
        Self::at(PROC.into(), DEVICE.into())
    }

    fn at(proc: PathBuf, device: PathBuf) -> Self {
        let mut driver = Self { proc, device, seen: Vec::new(), was_loaded: false };
        driver.has_changed();
        driver
    }

    /// True if the driver was loaded or unloaded since the last check, or its GPUs or slices changed.
    pub fn has_changed(&mut self) -> bool {
        let mut files = Vec::new();
        let version = self.proc.join("version");
        if version.exists() {
            self.was_loaded = true;
            files.push(version);
            list(&self.proc.join("gpus"), &mut files);
            list(&self.proc.join("capabilities"), &mut files);
        }
        files.sort();
        let has_changed = files != self.seen;
        self.seen = files;
        has_changed
    }

    /// True if the driver is certainly not loaded. NVML must then not be used. NVML would open the
    /// device, and the kernel would load the module again after an administrator's `modprobe -r`.
    /// On systems that do not show the driver, such as WSL, neither its `version` file nor the
    /// device file exists, and the result is false.
    pub fn is_unloaded(&self) -> bool {
        !self.proc.join("version").exists() && (self.was_loaded || self.device.exists())
    }
}

/// Adds the paths of all files below a directory.
fn list(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if files.len() >= MAX_FILES {
            return;
        }
        files.push(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&entry.path(), files);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Files(tempfile::TempDir);

    impl Files {
        fn put(&self, path: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            fs::write(path, "").expect("a file");
        }

        fn take(&self, path: &str) {
            fs::remove_dir_all(self.0.path().join(path)).expect("a directory");
        }
    }

    fn files() -> (Files, Driver) {
        let files = Files(tempfile::tempdir().expect("a directory"));
        let driver = Driver::at(files.0.path().join("proc"), files.0.path().join("nvidiactl"));
        (files, driver)
    }

    #[test]
    fn loading_and_unloading_of_the_driver_is_detected() {
        let (files, mut driver) = files();
        assert!(!driver.has_changed() && !driver.is_unloaded(), "a system that shows no driver may have one");
        files.put("proc/version");
        files.put("proc/gpus/0000:17:00.0/information");
        assert!(driver.has_changed() && !driver.is_unloaded());
        assert!(!driver.has_changed());
        files.take("proc");
        assert!(driver.is_unloaded());
        assert!(driver.has_changed());
    }

    #[test]
    fn a_device_file_without_a_driver_is_not_opened() {
        let (files, mut driver) = files();
        files.put("nvidiactl");
        assert!(driver.is_unloaded());
        files.put("proc/version");
        assert!(driver.has_changed() && !driver.is_unloaded());
    }

    #[test]
    fn added_and_removed_gpus_and_mig_slices_are_detected() {
        let (files, mut driver) = files();
        files.put("proc/version");
        files.put("proc/gpus/0000:17:00.0/information");
        driver.has_changed();
        for path in ["proc/gpus/0000:65:00.0/information", "proc/capabilities/gpu0/mig/gi1/ci0/access"] {
            files.put(path);
            assert!(driver.has_changed(), "{path}");
            assert!(!driver.has_changed());
        }
        files.take("proc/capabilities/gpu0/mig/gi1");
        assert!(driver.has_changed());
        files.take("proc/gpus/0000:65:00.0");
        assert!(driver.has_changed());
    }
}
