//! The free space of a swap file.

use alloc::{collections::BTreeMap, vec::Vec};

/// A part of a file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub offset: u64,
    pub len: u64,
}

/// The free parts of a file. An allocation may consist of several parts, so fragmentation never makes
/// it fail.
#[derive(Debug, Default)]
pub(super) struct Extents {
    /// Lengths of the free parts, by offset. No two parts are adjacent.
    free: BTreeMap<u64, u64>,
    /// The sum of the lengths.
    bytes: u64,
}

impl Extents {
    /// The number of free bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `len` bytes, lowest offsets first; `None` if fewer are free.
    pub fn take(&mut self, len: u64) -> Option<Vec<Extent>> {
        if len > self.bytes {
            return None;
        }
        let (mut taken, mut lacking) = (Vec::new(), len);
        while lacking > 0 {
            let (offset, len) = self.free.pop_first()?;
            let used = len.min(lacking);
            if used < len {
                self.free.insert(offset + used, len - used);
            }
            taken.push(Extent { offset, len: used });
            lacking -= used;
        }
        self.bytes -= len;
        Some(taken)
    }

    /// Adds free space: a part that was taken before, or new space at the end of the file.
    pub fn give(&mut self, Extent { mut offset, mut len }: Extent) {
        if len == 0 {
            return;
        }
        self.bytes += len;
        if let Some((before, size)) = self.free.range(..offset).next_back().map(|(at, size)| (*at, *size))
            && before + size == offset
        {
            self.free.remove(&before);
            (offset, len) = (before, len + size);
        }
        if let Some(size) = self.free.remove(&(offset + len)) {
            len += size;
        }
        self.free.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, len: u64) -> Extent {
        Extent { offset, len }
    }

    #[test]
    fn an_allocation_is_split_only_if_no_extent_is_large_enough() {
        let mut free = Extents::default();
        free.give(extent(0, 100));
        assert_eq!(free.take(30), Some(std::vec![extent(0, 30)]));
        assert_eq!(free.take(30), Some(std::vec![extent(30, 30)]));
        free.give(extent(0, 30));
        assert_eq!(free.take(50), Some(std::vec![extent(0, 30), extent(60, 20)]));
        assert_eq!((free.take(21), free.bytes()), (None, 20), "all or nothing");
        assert_eq!(free.take(20), Some(std::vec![extent(80, 20)]));
        assert_eq!(free.take(0), Some(std::vec![]));
    }

    #[test]
    fn adjacent_free_extents_merge() {
        let mut free = Extents::default();
        free.give(extent(0, 10));
        free.give(extent(20, 10));
        free.give(extent(10, 10));
        free.give(extent(30, 0));
        assert_eq!((free.free.len(), free.bytes()), (1, 30));
        assert_eq!(free.take(30), Some(std::vec![extent(0, 30)]));
    }

    /// Taken parts never overlap, and in the end all space can be taken again.
    #[test]
    fn extents_never_overlap_and_no_space_leaks() {
        let mut free = Extents::default();
        free.give(extent(0, 1000));
        let (mut held, mut seed) = (Vec::<Vec<Extent>>::new(), 12345u64);
        for _ in 0..5000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let random = seed >> 33;
            if random & 1 == 0
                && let Some(taken) = free.take(random / 2 % 90)
            {
                held.push(taken);
            } else if !held.is_empty() {
                let at = random as usize % held.len();
                held.swap_remove(at).into_iter().for_each(|extent| free.give(extent));
            }
            let mut all: Vec<Extent> = held.iter().flatten().copied().collect();
            all.extend(free.free.iter().map(|(offset, len)| extent(*offset, *len)));
            all.sort_by_key(|extent| extent.offset);
            let mut end = 0;
            for extent in all {
                assert_eq!(extent.offset, end);
                end += extent.len;
            }
            assert_eq!(end, 1000);
        }
    }
}
