//! The limits that the scheduler's rules set on the program's memory on each GPU, and permissions
//! there. The limits also apply to the sizes that the program sees ([`super::memory_info`]), even
//! before it uses the GPU.

use crate::{
    env::settings,
    submit,
    sys::sync::{Mutex, Rank},
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};
use nvshare_wire::Uuid;

/// What applies on one GPU.
#[derive(Debug, Clone, Copy)]
struct GpuRules {
    gpu: Uuid,
    /// The limit in bytes; 0 for none.
    memory_max: u64,
    /// Flags of the scheduler's message, such as `FABRIC_HANDLES`.
    permissions: u32,
}

/// The scheduler's latest rules for each GPU. They stay in force when the scheduler ends.
static RULES: Mutex<Vec<GpuRules>> = Mutex::new(Rank::Rules, Vec::new());
/// Whether a limit was ever set. Most programs have none and skip the lookups.
static IS_LIMITED: AtomicBool = AtomicBool::new(false);

/// The most GPUs that a scheduler may name: more than any host has.
const MAX_GPUS: usize = 1024;

fn change(gpu: Uuid, change: impl FnOnce(&mut GpuRules)) {
    let mut rules = RULES.lock();
    if let Some(known) = rules.iter_mut().find(|known| known.gpu == gpu) {
        change(known);
    } else if rules.len() < MAX_GPUS {
        let mut fresh = GpuRules { gpu, memory_max: 0, permissions: 0 };
        change(&mut fresh);
        rules.push(fresh);
    }
}

fn of(gpu: Uuid) -> Option<GpuRules> {
    RULES.lock().iter().find(|known| known.gpu == gpu).copied()
}

/// Sets the limit on this GPU, in bytes; 0 for none.
pub fn limit(gpu: Uuid, bytes: u64) {
    change(gpu, |rules| rules.memory_max = bytes);
    IS_LIMITED.fetch_or(bytes != 0, Ordering::Release);
}

/// Sets the permissions on this GPU: flags of the scheduler's message `GpuRules`.
pub fn permit(gpu: Uuid, permissions: u32) {
    change(gpu, |rules| rules.permissions = permissions);
}

/// Returns the limit on this GPU, in bytes; 0 for none.
pub fn memory_max(gpu: Uuid) -> u64 {
    of(gpu).map_or(0, |rules| rules.memory_max)
}

/// Whether the scheduler has given the program this permission on this GPU.
pub fn permits(gpu: Uuid, permission: u32) -> bool {
    of(gpu).is_some_and(|rules| rules.permissions & permission != 0)
}

/// Whether any limit may apply to this program.
pub fn are_limits_set() -> bool {
    submit::is_active() && (IS_LIMITED.load(Ordering::Acquire) || settings::get().memory_max.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_limit_of_each_gpu_applies() {
        let gpus = [1, 2, 3].map(|n| Uuid([n; 16]));
        limit(gpus[0], 0);
        permit(gpus[0], 2);
        assert!(!IS_LIMITED.load(Ordering::Relaxed), "none does");
        limit(gpus[0], 7);
        limit(gpus[1], 8);
        limit(gpus[0], 9);
        assert_eq!(gpus.map(memory_max), [9, 8, 0]);
        limit(gpus[1], 0);
        assert_eq!(gpus.map(memory_max), [9, 0, 0]);
        assert_eq!(gpus.map(|gpu| permits(gpu, 2)), [true, false, false]);
        permit(gpus[0], 1);
        assert_eq!([1, 2].map(|permission| permits(gpus[0], permission)), [true, false]);
        // Limits for nonexistent GPUs cannot use unlimited memory.
        (0..4 * MAX_GPUS as u64).for_each(|n| limit(Uuid((u128::from(n) << 64).to_le_bytes()), 1));
        assert_eq!(RULES.lock().len(), MAX_GPUS);
        assert_eq!(memory_max(gpus[0]), 9);
    }
}
