//! The environment variables for a program's own limits, and the messages that carry their values.
//! The library and `nvsharectl run` share this module. Only the scheduler interprets the values.

use crate::{
    ClientMessage,
    message::byte_enum,
    visible_devices::{PART, ascii},
};
use core::ffi::CStr;

/// The longest value that is sent, in bytes. A list of the full UUIDs of all GPUs that a client can
/// attach fits.
pub const LONGEST: usize = 4096;
/// Sent instead of a value longer than [`LONGEST`]. The scheduler reports this text as invalid.
const TOO_LONG: &[u8] = b"(too long)";

byte_enum! {
    /// The key of a rule that a variable tightens.
    pub enum LimitName {
        MemoryMax = 0,
        Weight = 1,
        AllowedGpus = 2,
    }
}

impl LimitName {
    pub const ALL: [Self; 3] = [Self::MemoryMax, Self::Weight, Self::AllowedGpus];

    /// The environment variable.
    pub const fn variable(self) -> &'static CStr {
        match self {
            Self::MemoryMax => c"NVSHARE_MEMORY_MAX",
            Self::Weight => c"NVSHARE_WEIGHT",
            Self::AllowedGpus => c"NVSHARE_ALLOWED_GPUS",
        }
    }
}

/// The messages that carry a value. An empty value needs no message, because an empty variable
/// counts as unset.
pub fn parts(limit: LimitName, value: &[u8]) -> impl Iterator<Item = ClientMessage> {
    let value = if value.len() > LONGEST { TOO_LONG } else { value };
    let last = value.len().div_ceil(PART).saturating_sub(1);
    let part = move |(at, part)| ClientMessage::EnvLimit { limit, more: u8::from(at < last), text: ascii(part) };
    value.chunks(PART).enumerate().map(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(limit: LimitName, value: &[u8]) -> String {
        let mut whole = String::new();
        let mut ends = 0;
        for part in parts(limit, value) {
            let ClientMessage::EnvLimit { limit: of, more, text } = part else { panic!("{part:?}") };
            assert_eq!((of, ends), (limit, 0), "nothing comes after the end");
            whole += text.as_str();
            ends += usize::from(more == 0);
        }
        assert_eq!(ends, usize::from(!value.is_empty()));
        whole
    }

    #[test]
    fn a_value_of_any_length_is_terminated() {
        for value in ["", "30%", &"GPU-0123,".repeat(100), &"x".repeat(PART), &"x".repeat(LONGEST)] {
            assert_eq!(said(LimitName::AllowedGpus, value.as_bytes()), *value);
        }
        assert_eq!(said(LimitName::Weight, &[b'1'; LONGEST + 1]), "(too long)");
        assert_eq!(said(LimitName::Weight, b"\xff5\n"), "?5?");
    }

    #[test]
    fn variables_and_numbers_are_unique() {
        for (n, one) in LimitName::ALL.iter().enumerate() {
            assert_eq!(*one as usize, n);
            assert!(LimitName::ALL.iter().filter(|other| other.variable() == one.variable()).count() == 1, "{one:?}");
        }
    }
}
