//! The first eight bytes of every packet: `version u16`, `kind u16`, `length u32` (header
//! included).

use crate::{WireError, codec::Reader};

pub const HEADER_LEN: usize = 8;

/// The maximum length of a message, in bytes. A buffer of this size can receive any valid packet.
/// `MSG_TRUNC` reveals longer packets.
pub const MAX_LEN: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub version: u16,
    pub kind: u16,
}

impl Header {
    /// Reads the header and checks its length against the length of the packet. The returned reader
    /// is positioned at the body.
    pub(crate) fn read(packet: &[u8]) -> Result<(Self, Reader<'_>), WireError> {
        if packet.len() > MAX_LEN {
            return Err(WireError::Oversized { have: packet.len() });
        }
        let mut reader = Reader::new(packet);
        let version = reader.u16()?;
        let kind = reader.u16()?;
        let length = reader.u32()?;
        if length as usize != packet.len() {
            return Err(WireError::Length { header: length, packet: packet.len() });
        }
        Ok((Self { version, kind }, reader))
    }
}
