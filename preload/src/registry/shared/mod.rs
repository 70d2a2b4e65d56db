//! Memory shared between processes with `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`.
//!
//! A handle of 64 bytes names an allocation. It contains the exporter's key, the number of the
//! range, a secret, and the place of the allocation in the range. The process that opens the handle
//! sends a request to the scheduler. The scheduler identifies the exporter by its key, and forwards
//! the request. The exporter sends descriptors of the range's chunks back the same way, but only to
//! a process that knows the secret. The importer maps the chunks.
//!
//! Exported memory is pinned on the GPU until the last importer has closed it. If a process opens it
//! later, the exporter restores it first, and pins it again. Imported memory is foreign: it does not
//! move. The scheduler counts the memory as the exporter's until the exporter frees it or
//! ends. Then the scheduler tells one of the importers to adopt the memory, and counts it as that
//! importer's.
//!
//! - [`handle`]: the handles. [`export`]: creating handles, and answering requests for their memory.
//! - [`open`]: opening a handle. [`question`]: requests to the exporter. [`imports`]: the memory
//!   that has been opened.

mod export;
mod handle;
mod imports;
mod open;
mod question;

pub use export::{answer, export, on_unused};
pub use handle::{IpcHandle, is_ours};
pub use imports::{adopt, close, drop_context, find, has_imports, introduce, unmap_closed};
pub use open::open;
pub use question::on_answer;

use crate::{connection::outbox, gpu, memory::space::Space};
use nvshare_wire::ClientMessage;

/// Begins a new connection. If this process has exported memory, the first message names the
/// process as an exporter.
pub fn announce_exporter() {
    for gpu in gpu::in_use() {
        gpu.change(Space::keep_opened);
    }
    outbox::restart(|| export::key().map(|key| ClientMessage::Exporter { key }));
}
