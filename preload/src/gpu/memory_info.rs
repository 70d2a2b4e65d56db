//! What a program is told of a GPU's memory where a rule or its environment bounds it ([`super::memory_limits`]): the same by
//! CUDA and by NVML, and before it uses the GPU already, since programs plan with it.

use super::Gpu;
use crate::{connection, memory::account::Account};

/// What a program is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    pub total: u64,
    pub free: u64,
}

/// Of a GPU with so much memory, or so it says; `really` gives what is free for anybody.
pub fn of(gpu: &Gpu, total: u64, really: impl FnOnce() -> Option<u64>) -> MemoryInfo {
    let Some(account) = gpu.account() else {
        // It has nothing there yet.
        let total = total.min(gpu.bound());
        return MemoryInfo { total, free: total };
    };
    let told = of_account(&account, total);
    if connection::is_connected() {
        return told;
    }
    // Nobody makes room: what others use is lacking.
    MemoryInfo { free: really().map_or(told.free, |free| told.free.min(free)), ..told }
}

fn of_account(account: &Account, total: u64) -> MemoryInfo {
    let total = account.at_most(total);
    MemoryInfo { total, free: account.free().min(total) }
}
