//! Exporting: names memory of this process so that other processes can open it, and sends the memory's
//! chunks to them.

use super::handle::{ExportHandle, IpcHandle};
use crate::{
    connection::{self, outbox},
    driver::{self, types::*},
    gpu::{self, Gpu},
    memory::space::{Exported, Opening, Space},
    sys::{
        once::OnceBox,
        sync::{Mutex, Rank},
        time::{self, Instant},
    },
};
use alloc::{boxed::Box, vec::Vec};
use core::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use nvshare_wire::{ClientMessage, Secret, client::Sharing};
use rustix::{
    fd::{AsFd, FromRawFd, OwnedFd},
    rand::{GetRandomFlags, getrandom},
};

/// The longest time that an export tries to announce its key.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(200);
/// The key that names this process as an exporter. Created at the first export.
static KEY: OnceBox<Secret> = OnceBox::new();
/// Locked from the creation of the key until its announcement, so that no export uses the key earlier.
static ANNOUNCING: Mutex<()> = Mutex::new(Rank::ExportKey, ());

fn random() -> Option<Secret> {
    let mut bytes = [0; 16];
    let n = getrandom(&mut bytes, GetRandomFlags::NONBLOCK).ok()?;
    (n == bytes.len()).then_some(Secret(bytes))
}

/// Returns the key after announcing it to the scheduler, or `None` if the kernel has no random bytes
/// yet.
fn announce_key() -> Option<Secret> {
    let _one = ANNOUNCING.lock();
    if KEY.get().is_none() {
        let key = random()?;
        let _ = KEY.set(Box::new(key));
        outbox::push([ClientMessage::Exporter { key }]);
    }
    key()
}

/// Exports the allocation that contains this address. Its range stays on the GPU until the last process
/// that opens it has closed it.
pub fn export(gpu: &'static Gpu, address: u64) -> Option<IpcHandle> {
    static RANGES: AtomicU32 = AtomicU32::new(1);
    let key = announce_key()?;
    let begin = Instant::now();
    // Announces the key first, because a process that opens the handle finds this process by the key.
    while !outbox::flush() && connection::is_connected() && begin.elapsed() < ANNOUNCE_TIMEOUT {
        time::sleep(Duration::from_millis(1));
    }
    let new = || Some(Exported { range: RANGES.fetch_add(1, Ordering::Relaxed), secret: random()? });
    let exported = gpu.change(|space| space.export(address, |chunk| descriptor(chunk).is_some(), new));
    let (Exported { range, secret }, allocation, offset) = exported.flatten()?;
    let (size, id) = (allocation.size, allocation.id);
    Some(ExportHandle { exporter: key, secret, size, id, range, offset }.write())
}

/// Returns a descriptor of the chunk, for another process.
fn descriptor(chunk: Handle) -> Option<OwnedFd> {
    let mut descriptor = -1;
    // SAFETY: `descriptor` outlives the call, and the chunk is this library's. The descriptor is new and
    // has no other owner.
    unsafe {
        let place = (&raw mut descriptor).cast();
        let result = driver::cuMemExportToShareableHandle(place, chunk, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        (result == SUCCESS && descriptor >= 0).then(|| OwnedFd::from_raw_fd(descriptor))
    }
}

/// Answers a request for chunks, which the scheduler forwards from another process. Only a request
/// with the right secret gets chunks. Called only on the client's thread.
pub fn answer(ticket: u64, secret: Secret, range: u32, allocation: u64, first: u32) {
    let exported = Exported { range, secret };
    let mut outcome = Sharing::Unknown;
    for gpu in gpu::in_use() {
        // The space stays locked, so that the chunks are not freed before they are exported.
        let open = |space: &mut Space| {
            Some(match space.open_export(exported, allocation, first as usize)? {
                Opening::Away => None,
                Opening::Chunks { bytes, chunk, handles } => {
                    Some((bytes, chunk, handles.into_iter().map_while(descriptor).collect::<Vec<OwnedFd>>()))
                }
            })
        };
        let Some(opening) = gpu.change(open).flatten() else { continue };
        let Some((bytes, chunk, descriptors)) = opening else {
            // Like a thread that waits for its memory. The importer asks again.
            gpu.request();
            outcome = Sharing::Busy;
            break;
        };
        outcome = Sharing::Failed;
        if !descriptors.is_empty() {
            let answer = ClientMessage::Exported { ticket, outcome: Sharing::Done, slot: gpu.index, bytes, chunk };
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            if connection::send_with(&answer, &borrowed) {
                return;
            }
        }
        break;
    }
    outbox::push([ClientMessage::Exported { ticket, outcome, slot: 0, bytes: 0, chunk: 0 }]);
    outbox::flush();
}

/// Called when no other process has this range open any more.
pub fn on_unused(range: u32) {
    for gpu in gpu::in_use() {
        gpu.change(|space| space.on_unused(range));
    }
}

/// Returns the key of this process as an exporter, if it has exported memory.
pub fn key() -> Option<Secret> {
    KEY.get().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ() {
        assert_ne!(random(), random());
    }
}
