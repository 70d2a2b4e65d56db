//! The encoding of fields: fixed sizes, little-endian, every access checked.

use crate::{HEADER_LEN, MAX_LEN, WireError, header::Header};
use core::fmt;

/// A GPU's (or MIG slice's) UUID, as returned by `cuDeviceGetUuid`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Parses the [`Display`](fmt::Display) format. Hyphens may be anywhere.
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        let mut digits = text.chars().filter(|c| *c != '-').map(|c| c.to_digit(16));
        for byte in &mut bytes {
            *byte = (digits.next()?? << 4 | digits.next()??) as u8;
        }
        digits.next().is_none().then_some(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    /// Formats the UUID as `nvidia-smi` does, without the prefix `GPU-` or `MIG-`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// 128 random bits that authorize a process to open memory. `Debug` hides the bits, so that they
/// are never logged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A short text of at most `N` bytes, padded with zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<const N: usize>([u8; N]);

impl<const N: usize> Text<N> {
    /// Truncates `text` at the last character boundary within `N` bytes, or at the first NUL.
    pub fn new(text: &str) -> Self {
        let mut bytes = [0; N];
        let mut end = 0;
        for c in text.chars().take_while(|c| *c != '\0') {
            let next = end + c.len_utf8();
            let Some(place) = bytes.get_mut(end..next) else { break };
            c.encode_utf8(place);
            end = next;
        }
        Self(bytes)
    }

    /// The text up to the first NUL or the first byte that is not valid UTF-8.
    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(N);
        let bytes = self.0.get(..end).unwrap_or(&[]);
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(e) => core::str::from_utf8(bytes.get(..e.valid_up_to()).unwrap_or(&[])).unwrap_or(""),
        }
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Reads the fields of a packet in order.
#[derive(Debug)]
pub struct Reader<'a> {
    packet: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(packet: &'a [u8]) -> Self {
        Self { packet, at: 0 }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let need = self.at + N;
        let bytes = self.packet.get(self.at..need).and_then(|b| b.try_into().ok());
        let bytes = bytes.ok_or(WireError::Truncated { have: self.packet.len(), need })?;
        self.at = need;
        Ok(bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.bytes().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.bytes().map(u32::from_le_bytes)
    }

    /// Checks that no bytes follow the last field.
    pub(crate) fn finish(self) -> Result<(), WireError> {
        match self.packet.len() - self.at {
            0 => Ok(()),
            extra => Err(WireError::Trailing { extra }),
        }
    }
}

/// An encoded message, sent as one packet.
#[derive(Clone, Copy)]
pub struct Packet {
    bytes: [u8; MAX_LEN],
    len: usize,
}

impl Packet {
    pub(crate) fn new(header: Header) -> Self {
        let mut packet = Self { bytes: [0; MAX_LEN], len: 0 };
        packet.put(&header.version.to_le_bytes());
        packet.put(&header.kind.to_le_bytes());
        packet.put(&[0; 4]); // the length, set by `finish`
        packet
    }

    /// Appends `bytes`. Bytes beyond [`MAX_LEN`] would be dropped, but every message fits:
    /// `tests/round_trip.rs` checks this.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if let Some(place) = self.bytes.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
            self.len = end;
        }
    }

    pub(crate) fn finish(mut self) -> Self {
        let length = (self.len as u32).to_le_bytes();
        if let Some(place) = self.bytes.get_mut(HEADER_LEN - 4..HEADER_LEN) {
            place.copy_from_slice(&length);
        }
        self
    }

    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Packet").field(&self.as_bytes()).finish()
    }
}

/// A type that can be a field of a message.
pub trait Field: Sized {
    fn put(&self, packet: &mut Packet);
    fn get(reader: &mut Reader<'_>, name: &'static str) -> Result<Self, WireError>;
}

macro_rules! integer_fields {
    ($($t:ty),*) => {$(
        impl Field for $t {
            fn put(&self, packet: &mut Packet) {
                packet.put(&self.to_le_bytes());
            }
            fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, WireError> {
                reader.bytes().map(Self::from_le_bytes)
            }
        }
    )*};
}
integer_fields!(u8, u16, u32, u64);

impl Field for Uuid {
    fn put(&self, packet: &mut Packet) {
        packet.put(&self.0);
    }
    fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, WireError> {
        reader.bytes().map(Self)
    }
}

impl Field for Secret {
    fn put(&self, packet: &mut Packet) {
        packet.put(&self.0);
    }
    fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, WireError> {
        reader.bytes().map(Self)
    }
}

impl<const N: usize> Field for Text<N> {
    fn put(&self, packet: &mut Packet) {
        packet.put(&self.0);
    }
    fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, WireError> {
        reader.bytes().map(Self)
    }
}
