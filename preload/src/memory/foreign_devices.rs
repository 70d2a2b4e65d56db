//! Devices other than GPUs that may access GPU memory directly: network cards, disks, and the
//! device of GDRCopy, which lets the CPU copy without the driver. The driver does not reveal which
//! memory such a device may access. However, a program that uses a device keeps the device's file
//! open.

use crate::sys::file;

/// InfiniBand and RoCE, Slingshot, Omni-Path, GPUDirect Storage, GDRCopy.
const DEVICES: [&[u8]; 5] = [b"/dev/infiniband/uverbs", b"/dev/cxi", b"/dev/hfi1_", b"/dev/nvidia-fs", b"/dev/gdrdrv"];

fn is_one(path: &[u8]) -> bool {
    DEVICES.iter().any(|device| path.starts_with(device))
}

/// Whether a device other than a GPU may access GPU memory of this program. Returns `false` if that
/// cannot be determined.
pub fn may_reach_memory() -> bool {
    let mut found = false;
    file::each_open(|_, path| {
        found |= is_one(path.as_bytes());
        !found
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn devices_that_can_access_gpu_memory_are_recognized() {
        for path in ["/dev/infiniband/uverbs0", "/dev/cxi0", "/dev/hfi1_0", "/dev/nvidia-fs12", "/dev/gdrdrv"] {
            assert!(is_one(path.as_bytes()), "{path}");
        }
        for path in ["/dev/nvidia0", "/dev/infiniband/rdma_cm", "socket:[1]", "/tmp/dev/gdrdrv", ""] {
            assert!(!is_one(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn ordinary_files_are_not_foreign_devices() {
        let _open: std::vec::Vec<_> = (0..200).map(|_| File::open("/dev/null").unwrap()).collect();
        assert!(!may_reach_memory());
    }
}
