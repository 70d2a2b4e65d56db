//! The limits that the scheduler's rules set on the program's memory on each GPU. They also limit the
//! sizes that the program sees ([`super::memory_info`]), even before it uses the GPU.

use crate::{
    env::settings,
    submit,
    sys::sync::{Mutex, Rank},
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};
use nvshare_wire::Uuid;

/// The scheduler's latest limit for each GPU. The limits stay in force when the scheduler ends.
static RULED: Mutex<Vec<(Uuid, u64)>> = Mutex::new(Rank::RuledLimits, Vec::new());
/// Whether a limit was ever set. Most programs have none and skip the lookups.
static IS_RULED: AtomicBool = AtomicBool::new(false);

/// The most GPUs that a scheduler may name: more than any host has.
const MAX_GPUS: usize = 1024;

/// Sets the limit on this GPU, in bytes; 0 for none.
pub fn set(gpu: Uuid, bytes: u64) {
    let mut ruled = RULED.lock();
    if let Some((_, before)) = ruled.iter_mut().find(|(other, _)| *other == gpu) {
        *before = bytes;
    } else if ruled.len() < MAX_GPUS {
        ruled.push((gpu, bytes));
    }
    IS_RULED.fetch_or(bytes != 0, Ordering::Release);
}

/// Returns the limit on this GPU, in bytes; 0 for none.
pub fn of(gpu: Uuid) -> u64 {
    RULED.lock().iter().find(|(other, _)| *other == gpu).map_or(0, |(_, bytes)| *bytes)
}

/// Whether any limit may apply to this program.
pub fn are_set() -> bool {
    submit::is_active() && (IS_RULED.load(Ordering::Acquire) || settings::get().memory_max.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_limit_of_each_gpu_applies() {
        let gpus = [1, 2, 3].map(|n| Uuid([n; 16]));
        set(gpus[0], 0);
        assert!(!IS_RULED.load(Ordering::Relaxed), "none does");
        set(gpus[0], 7);
        set(gpus[1], 8);
        set(gpus[0], 9);
        assert_eq!(gpus.map(of), [9, 8, 0]);
        set(gpus[1], 0);
        assert_eq!(gpus.map(of), [9, 0, 0]);
        // Limits for nonexistent GPUs cannot use unlimited memory.
        (0..4 * MAX_GPUS as u64).for_each(|n| set(Uuid((u128::from(n) << 64).to_le_bytes()), 1));
        assert_eq!(RULED.lock().len(), MAX_GPUS);
        assert_eq!(of(gpus[0]), 9);
    }
}
