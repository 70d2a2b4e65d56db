//! Counters of a client on one GPU since the client's process started. Counters never decrease.

use crate::{
    WireError,
    codec::{Field, Packet, Reader},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Bytes copied from the GPU to host memory (`swapped_out`) and from host memory to the GPU
    /// (`swapped_in`).
    pub swapped_out: u64,
    pub swapped_in: u64,
    /// Bytes evicted or restored without a copy, because they consist of one repeated value or are
    /// still valid in host memory.
    pub unmoved: u64,
    /// The number of refused allocations.
    pub refused: u64,
}

impl Field for Counts {
    fn put(&self, packet: &mut Packet) {
        [self.swapped_out, self.swapped_in, self.unmoved, self.refused].iter().for_each(|count| count.put(packet));
    }

    fn get(reader: &mut Reader<'_>, field: &'static str) -> Result<Self, WireError> {
        let mut next = || u64::get(reader, field);
        Ok(Self { swapped_out: next()?, swapped_in: next()?, unmoved: next()?, refused: next()? })
    }
}
