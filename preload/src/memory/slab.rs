//! A slab: one granule divided into units of 512 bytes, the driver's alignment of small allocations.

use super::engine::GRANULE;

pub const UNIT: u64 = 512;
const UNITS: usize = (GRANULE / UNIT) as usize;

/// The largest allocation that is placed in a slab, in bytes. The driver aligns larger allocations to 2
/// MiB.
pub const LARGEST: u64 = 512 << 10;

/// The allocation state of a slab's units.
#[derive(Debug)]
pub struct Slab {
    taken: [u64; UNITS / 64],
    free: usize,
}

impl Slab {
    pub fn new() -> Self {
        Self { taken: [0; UNITS / 64], free: UNITS }
    }

    pub fn is_empty(&self) -> bool {
        self.free == UNITS
    }

    fn is_taken(&self, unit: usize) -> bool {
        self.taken.get(unit / 64).is_none_or(|word| word >> (unit % 64) & 1 == 1)
    }

    fn set(&mut self, unit: usize, taken: bool) {
        if let Some(word) = self.taken.get_mut(unit / 64) {
            let bit = 1 << (unit % 64);
            if taken { *word |= bit } else { *word &= !bit }
        }
    }

    /// Allocates `size` bytes and returns their offset in the slab.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        let units = size.div_ceil(UNIT).max(1) as usize;
        if units > self.free {
            return None;
        }
        let mut start = 0;
        while start + units <= UNITS {
            match (start..start + units).rev().find(|u| self.is_taken(*u)) {
                Some(taken) => start = taken + 1,
                None => {
                    (start..start + units).for_each(|u| self.set(u, true));
                    self.free -= units;
                    return Some(start as u64 * UNIT);
                }
            }
        }
        None
    }

    pub fn give_back(&mut self, offset: u64, size: u64) {
        let units = size.div_ceil(UNIT).max(1) as usize;
        let start = (offset / UNIT) as usize;
        (start..start + units).for_each(|u| self.set(u, false));
        self.free += units;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn a_slab_is_filled_and_emptied() {
        let mut slab = Slab::new();
        let blocks: Vec<_> = std::iter::from_fn(|| slab.take(25_344).map(|at| (at, 25_344))).collect();
        assert_eq!(blocks.len() as u64, GRANULE / (25_344u64.div_ceil(UNIT) * UNIT));
        for pair in blocks.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "blocks overlap: {pair:?}");
        }
        for (at, size) in &blocks {
            assert_eq!(at % UNIT, 0);
            slab.give_back(*at, *size);
        }
        assert!(slab.is_empty());
        assert_eq!(slab.take(GRANULE), Some(0), "all of it is free again");
        assert_eq!(slab.take(1), None);
    }

    #[test]
    fn freed_holes_are_reused() {
        let mut slab = Slab::new();
        let (a, b, c) = (slab.take(1).unwrap(), slab.take(1024).unwrap(), slab.take(4).unwrap());
        assert_eq!((a, b, c), (0, 512, 1536));
        slab.give_back(b, 1024);
        assert_eq!(slab.take(513), Some(512));
        assert_eq!(slab.take(512), Some(2048));
    }
}
