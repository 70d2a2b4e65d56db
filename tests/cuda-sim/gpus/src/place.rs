//! Which GPU of the machine each of a process' GPUs is. It is the one of the same number until the process is restored from a
//! checkpoint on others; the process goes on to use its own numbers, and what processes share has the machine's.

use crate::MAX_GPUS;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How far each is from the one of the same number, modulo the most that there can be: 0 in most processes.
static SHIFTS: [AtomicUsize; MAX_GPUS] = [const { AtomicUsize::new(0) }; MAX_GPUS];

/// The machine's number of one of this process' GPUs.
pub fn place(gpu: usize) -> usize {
    (gpu + SHIFTS[gpu].load(Ordering::Relaxed)) % MAX_GPUS
}

/// The reverse of [`place`].
pub fn at_place(place: usize) -> usize {
    (0..MAX_GPUS).find(|gpu| self::place(*gpu) == place).unwrap_or(place)
}

pub(crate) fn all() -> [usize; MAX_GPUS] {
    std::array::from_fn(place)
}

/// Where each is when what was on each GPU of the machine is on another one: `to` has every GPU once.
pub(crate) fn moved(to: &[usize; MAX_GPUS]) -> [usize; MAX_GPUS] {
    all().map(|place| to[place])
}

pub(crate) fn set(places: &[usize; MAX_GPUS]) {
    for (gpu, place) in places.iter().enumerate() {
        SHIFTS[gpu].store((place + MAX_GPUS - gpu) % MAX_GPUS, Ordering::Relaxed);
    }
}
