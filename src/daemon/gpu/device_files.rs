//! The device files of GPUs. An open descriptor of a GPU's device file proves that a client may use
//! the GPU.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{major, minor};

use crate::sys::device_file::DeviceFile;

/// The major number of NVIDIA's device files. Minor number 255 is the control device.
const MAJOR: u32 = 195;
const CONTROL: u32 = 255;

/// The environment variable for the directory of the device files. Simulated GPUs have files elsewhere.
const VARIABLE: &str = "NVSHARE_DEVICES";

/// The path of a GPU's device file, by its minor number.
pub fn path(minor: u32) -> PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| std::env::var_os(VARIABLE).map_or_else(|| "/dev".into(), PathBuf::from));
    Path::join(directory, format!("nvidia{minor}"))
}

/// The device file of the GPU with the minor number `minor`.
pub fn of_gpu(minor: u32) -> DeviceFile {
    // The daemon's container need not contain the file.
    DeviceFile::at(&path(minor)).unwrap_or_else(|_| DeviceFile::numbered(MAJOR, minor))
}

/// True if this is the device file of any GPU.
pub fn is_of_gpu(file: DeviceFile) -> bool {
    matches!(file, DeviceFile::Device(number) if major(number) == MAJOR && minor(number) != CONTROL)
}
