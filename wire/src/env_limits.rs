//! What a program's own environment allows it: by which variables, and how their values are said; the same for the library
//! and for what starts programs. What a value means, and whether it means anything, is the scheduler's to say.

use crate::{
    ClientMessage,
    message::byte_enum,
    visible_devices::{PART, ascii},
};
use core::ffi::CStr;

/// Longer values are not said: a list of as many GPUs as a client can attach, each by its whole UUID, is no longer.
pub const LONGEST: usize = 4096;
/// Said in their place, which means nothing.
const TOO_LONG: &[u8] = b"(too long)";

byte_enum! {
    /// What a value is about: the keys of a rule.
    pub enum LimitName {
        MemoryMax = 0,
        MemoryLow = 1,
        SwapMax = 2,
        OnMemoryFull = 3,
        Weight = 4,
        TimeMax = 5,
        Priority = 6,
        Interactive = 7,
        AllowedGpus = 8,
    }
}

impl LimitName {
    pub const ALL: [Self; 9] = [
        Self::MemoryMax,
        Self::MemoryLow,
        Self::SwapMax,
        Self::OnMemoryFull,
        Self::Weight,
        Self::TimeMax,
        Self::Priority,
        Self::Interactive,
        Self::AllowedGpus,
    ];

    /// The variable in which a program says it.
    pub const fn variable(self) -> &'static CStr {
        match self {
            Self::MemoryMax => c"NVSHARE_MEMORY_MAX",
            Self::MemoryLow => c"NVSHARE_MEMORY_LOW",
            Self::SwapMax => c"NVSHARE_SWAP_MAX",
            Self::OnMemoryFull => c"NVSHARE_ON_MEMORY_FULL",
            Self::Weight => c"NVSHARE_WEIGHT",
            Self::TimeMax => c"NVSHARE_TIME_MAX",
            Self::Priority => c"NVSHARE_PRIORITY",
            Self::Interactive => c"NVSHARE_INTERACTIVE",
            Self::AllowedGpus => c"NVSHARE_ALLOWED_GPUS",
        }
    }
}

/// A value as it is said. An empty one says nothing, as everywhere.
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
    fn a_value_of_any_length_has_an_end() {
        for value in ["", "30%", &"GPU-0123,".repeat(100), &"x".repeat(PART), &"x".repeat(LONGEST)] {
            assert_eq!(said(LimitName::AllowedGpus, value.as_bytes()), *value);
        }
        assert_eq!(said(LimitName::Weight, &[b'1'; LONGEST + 1]), "(too long)");
        assert_eq!(said(LimitName::Weight, b"\xff5\n"), "?5?");
    }

    #[test]
    fn each_has_a_variable_and_a_number_of_its_own() {
        for (n, one) in LimitName::ALL.iter().enumerate() {
            assert_eq!(*one as usize, n);
            assert!(LimitName::ALL.iter().filter(|other| other.variable() == one.variable()).count() == 1, "{one:?}");
        }
    }
}
