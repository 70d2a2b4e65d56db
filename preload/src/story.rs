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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rules_allow_is_known_by_gpu_and_the_newest_counts() {
        let gpus = [1, 2, 3].map(|n| Uuid([n; 16]));
        rule(gpus[0], 0);
        assert!(!IS_RULED.load(Ordering::Relaxed), "none does");
        rule(gpus[0], 7);
        rule(gpus[1], 8);
        rule(gpus[0], 9);
        assert_eq!(gpus.map(ruled), [9, 8, 0]);
        rule(gpus[1], 0);
        assert_eq!(gpus.map(ruled), [9, 0, 0]);
        // A scheduler that makes GPUs up takes no more memory than that.
        (0..4 * MOST_GPUS as u64).for_each(|n| rule(Uuid((u128::from(n) << 64).to_le_bytes()), 1));
        assert_eq!(RULED.lock().len(), MOST_GPUS);
        assert_eq!(ruled(gpus[0]), 9);
    }
}
