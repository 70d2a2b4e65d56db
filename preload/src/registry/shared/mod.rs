//! Memory shared between processes, as by `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`.
//!
//! A handle of 64 bytes names an allocation: it holds the exporter's key, the number of the range, a secret, and the
//! place of the allocation in the range. The process that opens the handle sends a request to the scheduler, which
//! identifies the exporter by its key and forwards the request; only a process that knows the secret gets an answer.
//! Descriptors of the range's chunks come back the same way, and the importer maps them.
//!
//! Exported memory is pinned on the GPU until the exporter frees it. Imported memory is foreign: it does not move, and
//! it counts with its exporter until the exporter frees it or ends. Then the scheduler tells one of the importers to
//! adopt it, and it counts with that importer.
//!
//! - [`handle`]: the handles. [`export`]: creating handles, and answering requests for their memory.
//! - [`opening`]: opening a handle. [`question`]: the requests to the exporter. [`imports`]: the memory that has been
//!   opened.

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

/// Begins a new connection: the first message names this process as an exporter, if it has exported anything.
pub fn announce_exporter() {
    outbox::restart(|| export::key().map(|key| ClientMessage::Exporter { key }));
}
