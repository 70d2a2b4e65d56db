//! What a program is told of a GPU's memory where a rule or its environment bounds it: the same by CUDA and by NVML
//! ([`crate::hooks::told`], [`crate::hooks::nvml`]), and before it uses the GPU already, since programs plan with it.

use crate::{client, gpu::Gpu, memory::space::Account, settings, sys::sync::Mutex};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};
use nvshare_wire::Uuid;

/// What rules allow on each GPU, as the scheduler said; it stays when the scheduler goes.
static RULED: Mutex<Vec<(Uuid, u64)>> = Mutex::new(Vec::new());
/// Whether a rule has ever been heard of: most programs have none, and nothing more is looked at for them.
static IS_RULED: AtomicBool = AtomicBool::new(false);

/// GPUs that a scheduler may speak of: more is none of this host's.
const MOST_GPUS: usize = 1024;

/// A rule allows so much of that GPU from now on; 0: no rule does.
pub fn rule(gpu: Uuid, bytes: u64) {
    let mut ruled = RULED.lock();
    if let Some((_, before)) = ruled.iter_mut().find(|(other, _)| *other == gpu) {
        *before = bytes;
    } else if ruled.len() < MOST_GPUS {
        ruled.push((gpu, bytes));
    }
    IS_RULED.fetch_or(bytes != 0, Ordering::Release);
}

/// What a rule allows of that GPU; 0: none does.
pub fn ruled(gpu: Uuid) -> u64 {
    RULED.lock().iter().find(|(other, _)| *other == gpu).map_or(0, |(_, bytes)| *bytes)
}

/// Whether anybody may bound this program's memory anywhere.
pub fn is_bounded() -> bool {
    client::is_on() && (IS_RULED.load(Ordering::Acquire) || settings::get().memory_max.is_some())
}

/// What a program is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    pub total: u64,
    pub free: u64,
}

/// Of a GPU with so much memory, or so it says; `really` gives what is free for anybody.
pub fn of(gpu: &Gpu, total: u64, really: impl FnOnce() -> Option<u64>) -> Told {
    let Some(account) = gpu.account() else {
        // It has nothing there yet.
        let total = total.min(gpu.bound());
        return Told { total, free: total };
    };
    let told = of_account(&account, total);
    if client::is_connected() {
        return told;
    }
    // Nobody makes room: what others use is lacking.
    Told { free: really().map_or(told.free, |free| told.free.min(free)), ..told }
}

fn of_account(account: &Account, total: u64) -> Told {
    let total = account.at_most(total);
    Told { total, free: account.free().min(total) }
}
