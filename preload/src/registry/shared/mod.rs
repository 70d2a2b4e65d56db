//! Memory that one program lets another
//!
//! - [`handle`]: such handles. [`export`]: making them, and answering for them.
//! - [`opening`]: opening one, over [`question`]s to the exporter. [`imports`]: what has been opened.

mod export;
mod handle;
mod imports;
mod opening;
mod question;

pub use export::{Attempt, answer, export, is_offered};
pub use handle::{IpcHandle, is_ours};
pub use imports::{adopt, close, drop_context, find, introduce, look_after};
pub use opening::open;
pub use question::answered;

use crate::connection::outbox;
use nvshare_wire::{ClientMessage, version};

/// A new connection of that protocol version: the scheduler learns first what this process exports under.
pub fn meet_scheduler(version: u16) {
    outbox::restart(|| {
        let key = export::key().filter(|_| version >= version::SHARING)?;
        Some(ClientMessage::Exporter { key })
    });
}
