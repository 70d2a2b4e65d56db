//! The memory sizes that the program sees under a limit from a rule or from the program's
//! environment ([`super::memory_limits`]). CUDA and NVML report the same sizes, even before the
//! program uses the GPU, because programs plan with these sizes.

use super::Gpu;
use crate::{connection, memory::account::Account};

/// Total and free memory as the program sees them, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    pub total: u64,
    pub free: u64,
}

/// Returns the sizes for a GPU with `total` bytes. `really` returns the bytes that are free on the
/// device.
pub fn of(gpu: &Gpu, total: u64, really: impl FnOnce() -> Option<u64>) -> MemoryInfo {
    let Some(account) = gpu.account() else {
        // The program has no memory on this GPU yet.
        let total = total.min(gpu.memory_limit());
        return MemoryInfo { total, free: total };
    };
    let told = of_account(&account, total);
    if connection::is_connected() {
        return told;
    }
    // Without a scheduler, other programs make no room, so their memory is not available.
    MemoryInfo { free: really().map_or(told.free, |free| told.free.min(free)), ..told }
}

fn of_account(account: &Account, total: u64) -> MemoryInfo {
    let total = account.at_most(total);
    MemoryInfo { total, free: account.free().min(total) }
}
