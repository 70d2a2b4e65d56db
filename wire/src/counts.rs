//! What a client has counted on one GPU since its process began. Only ever more; whoever reads it counts the difference.

use crate::{
    WireError,
    codec::{Field, Packet, Reader},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Bytes that were moved from the GPU to host memory, and from there to the GPU.
    pub swapped_out: u64,
    pub swapped_in: u64,
    /// Bytes that left the GPU or came back, and that nothing had to be moved for: constant, or in host memory still.
    pub unmoved: u64,
    /// Allocations that failed since there was to be no memory for them.
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
