//! A record of the memory that the program reserves, creates and maps itself: reserved addresses,
//! memory by handle, and mappings. This module makes no driver calls. It also records memory that the
//! driver has created.
//!
//! This library's memory has a *virtual handle*, which denotes a range of a
//! [`Space`](crate::memory::space::Space). As memory moves, the chunks of the range are created and
//! freed, and the driver's handles change. Memory that is left to the driver has the driver's
//! handle.

use crate::{
    driver::types::*,
    gpu::Gpu,
    memory::engine::{Flags, GRANULE},
    sys::sync::{Mutex, Rank},
};
use alloc::{collections::BTreeMap, vec::Vec};

/// The upper bits of virtual handles. Addresses and counters do not have these bits.
const VIRTUAL: Handle = 0x6e76_0000_0000_0000;
const NUMBER: Handle = !0 >> 16;

pub static TABLE: Mutex<Table> = Mutex::new(Rank::VirtualMemory, Table::new());

#[derive(Debug)]
pub struct Table {
    /// Start and length of reserved addresses.
    reservations: BTreeMap<u64, u64>,
    memory: BTreeMap<Handle, Memory>,
    mappings: BTreeMap<u64, Mapping>,
    next: Handle,
}

/// The memory behind a virtual handle.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub gpu: &'static Gpu,
    /// The base of the memory's range.
    pub base: u64,
    pub len: u64,
    pub flags: Flags,
    /// The number of references by handles and by mappings. Each reference keeps the memory alive.
    handles: u32,
    mappings: u32,
}

#[derive(Debug, Clone, Copy)]
pub struct Mapping {
    pub at: u64,
    pub len: u64,
    /// The virtual handle of the mapped memory, or the driver's handle of memory that counts
    /// ([`super::driver_memory`]).
    pub handle: Option<Handle>,
    /// Distinguishes the mapping from earlier and later mappings at the same address.
    pub id: u64,
}

pub fn is_virtual(handle: Handle) -> bool {
    handle & !NUMBER == VIRTUAL
}

impl Table {
    pub const fn new() -> Self {
        Self { reservations: BTreeMap::new(), memory: BTreeMap::new(), mappings: BTreeMap::new(), next: 1 }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next & NUMBER
    }

    // ---- addresses ----

    pub fn reserve(&mut self, at: u64, len: u64) {
        // The driver rounds the length up.
        self.reservations.insert(at, len.checked_next_multiple_of(GRANULE).unwrap_or(len));
    }

    pub fn unreserve(&mut self, at: u64) {
        self.reservations.remove(&at);
    }

    /// Whether all these addresses are in one reservation.
    pub fn is_reserved(&self, at: u64, len: u64) -> bool {
        self.reservation(at).is_some_and(|(start, size)| len <= size - (at - start))
    }

    /// Returns the start and the length of the reservation that contains this address.
    pub fn reservation(&self, at: u64) -> Option<(u64, u64)> {
        let (start, len) = self.reservations.range(..=at).next_back()?;
        (at - start < *len).then_some((*start, *len))
    }

    // ---- memory ----

    /// Assigns a virtual handle to new memory.
    pub fn add(&mut self, gpu: &'static Gpu, base: u64, len: u64, flags: Flags) -> Handle {
        let handle = VIRTUAL | self.number();
        self.memory.insert(handle, Memory { gpu, base, len, flags, handles: 1, mappings: 0 });
        handle
    }

    /// Returns the memory behind a virtual handle, or `None` if the program has released the
    /// handle.
    pub fn memory(&self, handle: Handle) -> Option<Memory> {
        self.memory.get(&handle).filter(|memory| memory.handles > 0).copied()
    }

    /// Adds a reference by handle.
    pub fn retain(&mut self, handle: Handle) {
        if let Some(memory) = self.memory.get_mut(&handle) {
            memory.handles = memory.handles.saturating_add(1);
        }
    }

    /// Releases a reference by handle. Returns the memory if no references remain.
    pub fn release(&mut self, handle: Handle) -> Option<Memory> {
        self.without(handle, |memory| memory.handles = memory.handles.saturating_sub(1))
    }

    fn without(&mut self, handle: Handle, change: impl FnOnce(&mut Memory)) -> Option<Memory> {
        let memory = self.memory.get_mut(&handle)?;
        change(memory);
        if memory.handles == 0 && memory.mappings == 0 { self.memory.remove(&handle) } else { None }
    }

    // ---- mappings ----

    /// Records a mapping of memory with this handle.
    pub fn map(&mut self, at: u64, len: u64, handle: Option<Handle>) {
        let id = self.number();
        if let Some(memory) = handle.and_then(|handle| self.memory.get_mut(&handle)) {
            memory.mappings += 1;
        }
        self.mappings.insert(at, Mapping { at, len, handle, id });
    }

    /// Removes a mapping. Returns the memory if no references remain.
    pub fn unmap(&mut self, at: u64) -> Option<Memory> {
        let handle = self.mappings.remove(&at)?.handle?;
        self.without(handle, |memory| memory.mappings = memory.mappings.saturating_sub(1))
    }

    /// Returns the mapping of this library's memory that contains this address, and its memory.
    pub fn at(&self, address: u64) -> Option<(Mapping, Memory)> {
        let (_, mapping) = self.mappings.range(..=address).next_back()?;
        let memory = self.memory.get(&mapping.handle?)?;
        (address - mapping.at < mapping.len).then_some((*mapping, *memory))
    }

    /// Returns the mappings that overlap these addresses, in the order of their addresses.
    pub fn overlaps_of(&self, at: u64, len: u64) -> Vec<Mapping> {
        let end = at.saturating_add(len);
        let first = self.mappings.range(..at).next_back().filter(|(start, m)| at - *start < m.len);
        let rest = if at < end { Some(self.mappings.range(at..end)) } else { None };
        first.into_iter().chain(rest.into_iter().flatten()).map(|(_, mapping)| *mapping).collect()
    }

    /// Returns the mappings that overlap these addresses, if at least one maps this library's memory.
    pub fn ours_among(&self, at: u64, len: u64) -> Option<Vec<Mapping>> {
        let found = self.overlaps_of(at, len);
        found.iter().any(|mapping| self.behind(mapping).is_some()).then_some(found)
    }

    /// Returns the mapped memory, if it is this library's.
    pub fn behind(&self, mapping: &Mapping) -> Option<Memory> {
        self.memory.get(&mapping.handle?).copied()
    }
}

/// Whether each of these mappings is within the addresses. All mappings must overlap the addresses.
pub fn are_within(mappings: &[Mapping], at: u64, len: u64) -> bool {
    mappings.iter().all(|m| at <= m.at && m.at - at <= len && m.len <= len - (m.at - at))
}

/// Whether these mappings cover the addresses exactly and without a gap. All mappings must overlap
/// the addresses.
pub fn make_up(mappings: &[Mapping], at: u64, len: u64) -> bool {
    let end = mappings.iter().try_fold(at, |next, m| (m.at == next).then(|| m.at + m.len));
    end.is_some_and(|end| Some(end) == at.checked_add(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = GRANULE;

    fn table(mappings: &[(u64, u64)]) -> Table {
        let mut table = Table::new();
        table.reserve(8 * M, 8 * M);
        mappings.iter().for_each(|(at, len)| table.map(at * M, len * M, None));
        table
    }

    #[test]
    fn a_range_is_reserved_only_within_one_reservation() {
        let mut table = table(&[]);
        table.reserve(16 * M, 1);
        for (at, len, reserved) in
            [(8, 8, true), (9, 7, true), (9, 8, false), (7, 1, false), (16, 1, true), (17, 1, false)]
        {
            assert_eq!(table.is_reserved(at * M, len * M), reserved, "{at}+{len}");
        }
        assert!(!table.is_reserved(9 * M, u64::MAX));
        table.unreserve(8 * M);
        assert!(!table.is_reserved(8 * M, M));
    }

    #[test]
    fn mappings_that_exactly_cover_a_range_are_recognized() {
        let table = table(&[(8, 2), (10, 1), (12, 4)]);
        let found = |at: u64, len: u64| {
            let found = table.overlaps_of(at * M, len * M);
            (found.len(), make_up(&found, at * M, len * M))
        };
        for (at, len, want) in [
            (8, 2, (1, true)),
            (8, 3, (2, true)),
            (10, 1, (1, true)),
            (8, 1, (1, false)),
            (9, 1, (1, false)),
            (9, 2, (2, false)),
            (8, 4, (2, false)),
            (8, 8, (3, false)),
            (11, 1, (0, false)),
            (12, 4, (1, true)),
            (15, 3, (1, false)),
        ] {
            assert_eq!(found(at, len), want, "{at}+{len}");
        }
        for (at, len, want) in [(8, 2, true), (8, 4, true), (7, 9, true), (11, 1, true), (8, 5, false), (9, 3, false)] {
            let found = table.overlaps_of(at * M, len * M);
            assert_eq!(are_within(&found, at * M, len * M), want, "{at}+{len}");
        }
        assert_eq!(table.overlaps_of(8 * M, u64::MAX).len(), 3);
        assert!(!make_up(&[], u64::MAX, 2));
    }

    #[test]
    fn virtual_handles_differ_from_driver_handles() {
        let mut table = Table::new();
        assert!(is_virtual(VIRTUAL | table.number()));
        for drivers in [0, 1, 0x7fff_ffff_f000, 0xffff_8000_0000_0000, u64::MAX] {
            assert!(!is_virtual(drivers), "{drivers:#x}");
        }
    }
}
