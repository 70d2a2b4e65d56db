//! The decoder returns for any bytes, and a message that it accepts encodes to the same bytes.
//!
//! Run with `RUSTC_BOOTSTRAP=1 cargo fuzz run client_message` in `wire/`. `corpus/` contains one
//! message of each kind as a start.
#![no_main]

use nvshare_wire::{ClientMessage, version};

libfuzzer_sys::fuzz_target!(|packet: &[u8]| {
    for version in version::MIN..=version::MAX {
        if let Ok(message) = ClientMessage::decode(packet, version) {
            assert_eq!(message.encode(version).as_bytes(), packet);
        }
    }
});
