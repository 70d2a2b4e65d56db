//! Errors in a packet. Each error names the value found, and the expected value if there is one.

use core::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireError {
    /// The packet is shorter than a header, or shorter than the body of its kind.
    Truncated { have: usize, need: usize },
    /// The packet is longer than [`MAX_LEN`](crate::MAX_LEN).
    Oversized { have: usize },
    /// The length in the header differs from the length of the packet.
    Length { header: u32, packet: usize },
    /// Bytes follow the last field.
    Trailing { extra: usize },
    /// The kind does not exist in this direction.
    Kind { kind: u16 },
    /// The version differs from the agreed version (0 during the handshake).
    Version { got: u16, expected: u16 },
    /// A field has an undefined value.
    Value { field: &'static str, value: u64 },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { have, need } => write!(f, "truncated: {have} bytes where {need} are needed"),
            Self::Oversized { have } => write!(f, "oversized: {have} bytes, at most {} are allowed", crate::MAX_LEN),
            Self::Length { header, packet } => {
                write!(f, "the header announces {header} bytes, but the packet has {packet}")
            }
            Self::Trailing { extra } => write!(f, "{extra} bytes after the last field"),
            Self::Kind { kind } => write!(f, "unknown message kind {kind}"),
            Self::Version { got, expected } => write!(f, "protocol version {got} instead of the negotiated {expected}"),
            Self::Value { field, value } => write!(f, "field {field} cannot be {value}"),
        }
    }
}

impl core::error::Error for WireError {}
