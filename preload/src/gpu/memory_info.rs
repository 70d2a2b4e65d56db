//! The memory sizes that the program sees. CUDA and NVML report the same free memory of a GPU on which
//! the program has a context. Under a limit from a rule or from the program's environment
//! ([`super::rules`]) they report the same sizes even earlier, because programs plan with these
//! sizes.

use super::Gpu;
use crate::connection;

/// Total and free memory as the program sees them, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    pub total: u64,
    pub free: u64,
}

/// Returns the sizes for a GPU with `total` bytes. `really` returns the bytes that are free on the
/// device.
pub fn of(gpu: &Gpu, total: u64, really: impl FnOnce() -> Option<u64>) -> MemoryInfo {
    let Some(space) = gpu.space() else {
        // The program has no memory on this GPU yet.
        let total = total.min(gpu.memory_limit());
        return MemoryInfo { total, free: total };
    };
    let told = {
        let mut space = space.lock();
        let total = space.account.at_most(total);
        MemoryInfo { total, free: space.visible_free().min(total).min(gpu.total()) }
    };
    if connection::is_connected() {
        return told;
    }
    // Without a scheduler, other programs make no room, so their memory is not available.
    MemoryInfo { free: really().map_or(told.free, |free| told.free.min(free)), ..told }
}
