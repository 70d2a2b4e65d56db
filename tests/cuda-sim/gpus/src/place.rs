//! Maps a process's GPU numbers to the machine's GPU numbers. Both are equal until the process is
//! restored on other GPUs. The process then keeps its own numbers. Shared state uses the machine's
//! numbers.

use crate::MAX_GPUS;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The offset of each GPU's number in the machine from its number in the process, modulo
/// [`MAX_GPUS`]. In most processes, the offset is 0.
static SHIFTS: [AtomicUsize; MAX_GPUS] = [const { AtomicUsize::new(0) }; MAX_GPUS];

/// Returns the machine's number of a GPU of this process.
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

/// Returns the machine's numbers of this process's GPUs after a restore. The permutation `to`
/// contains the new GPU for each GPU of the machine.
pub(crate) fn moved(to: &[usize; MAX_GPUS]) -> [usize; MAX_GPUS] {
    all().map(|place| to[place])
}

pub(crate) fn set(places: &[usize; MAX_GPUS]) {
    for (gpu, place) in places.iter().enumerate() {
        SHIFTS[gpu].store((place + MAX_GPUS - gpu) % MAX_GPUS, Ordering::Relaxed);
    }
}
