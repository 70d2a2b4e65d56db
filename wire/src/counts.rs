//! Counters of a client on one GPU since its process started. They never decrease.

use crate::{
    WireError,
    codec::{Field, Packet, Reader},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Bytes copied from the GPU to host memory, and from host memory to the GPU.
    pub swapped_out: u64,
    pub swapped_in: u64,
    /// Bytes that left the GPU or returned without a copy, because they were constant or still in
    /// host memory.
    pub unmoved: u64,
    /// Allocations that were refused.
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
