//! Memory shared between processes with `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`.
//!
//! A handle of 64 bytes names an allocation. It contains the exporter's key, the number of the range, a
//! secret, and the place of the allocation in the range. The process that opens the handle sends a
//! request to the scheduler. The scheduler identifies the exporter by its key, and forwards the
//! request. Only a process that knows the secret gets an answer. The exporter sends descriptors of the
//! range's chunks back the same way, and the importer maps them.
//!
//! Exported memory is pinned on the GPU until the exporter frees it. Imported memory is foreign: it
//! does not move. The scheduler counts it with its exporter until the exporter frees it or ends. Then
//! the scheduler tells one of the importers to adopt it, and counts it with that importer.
//!
//! - [`handle`]: the handles. [`export`]: creating handles, and answering requests for their memory.
//! - [`opening`]: opening a handle. [`question`]: requests to the exporter. [`imports`]: the memory
//!   that has been opened.

mod export;
mod handle;
mod imports;
mod opening;
mod question;

pub use export::{Attempt, answer, export};
pub use handle::{IpcHandle, is_ours};
pub use imports::{adopt, close, drop_context, find, has_imports, introduce, unmap_closed};
pub use opening::open;
pub use question::answered;

use crate::connection::outbox;
use nvshare_wire::ClientMessage;

/// Begins a new connection. If this process has exported memory, the first message names it as an
/// exporter.
pub fn announce_exporter() {
    outbox::restart(|| export::key().map(|key| ClientMessage::Exporter { key }));
}
