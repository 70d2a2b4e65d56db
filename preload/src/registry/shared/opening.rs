//! Opening a handle. If the handle's range is not mapped yet, the range is fetched from the
//! exporter and mapped.

use super::{
    export,
    handle::{ExportHandle, IpcHandle},
    imports::{self, ANY_IMPORTS, Import, REGISTRY},
    question::{ExporterAnswer, ask},
};
use crate::{
    connection::outbox,
    driver::types::*,
    env::trace::trace,
    gpu::Gpu,
    memory::engine::GRANULE,
    sys::sync::{Mutex, Rank},
};
use core::sync::atomic::Ordering;
use nvshare_wire::ClientMessage;

/// The maximum size of a range in bytes, more than the memory of any GPU.
const MAX_BYTES: u64 = 1 << 46;

/// Opens a handle of this library in this context of that GPU. Returns the address of the allocation in
/// this process.
pub fn open(handle: &IpcHandle, gpu: &'static Gpu, context: usize) -> Result<u64, CUresult> {
    static ONE: Mutex<()> = Mutex::new(Rank::Opening, ());
    let handle = ExportHandle::read(handle).ok_or(ERROR_INVALID_VALUE)?;
    if export::key() == Some(handle.exporter) {
        return Err(ERROR_INVALID_CONTEXT);
    }
    let _one = ONE.lock();
    if let Some(opened) = REGISTRY.lock().open(&handle, context) {
        return opened;
    }
    REGISTRY.lock().opening = Some((handle.range_id(), false));
    let mut import: Option<Import> = None;
    let result = bring_in(&handle, gpu, &mut import);
    match (result, import) {
        (Ok(()), Some(import)) => {
            trace!("GPU {}: imported {} bytes at {:#x}", gpu.index, import.bytes, import.at);
            let mut registry = REGISTRY.lock();
            registry.imports.insert(handle.range_id(), import);
            ANY_IMPORTS.store(true, Ordering::SeqCst);
            let opened = registry.open(&handle, context).unwrap_or(Err(ERROR_MAP_FAILED));
            let opening = registry.opening.take();
            drop(registry);
            if let Some((_, true)) = opening {
                imports::adopt(handle.exporter, handle.range);
            }
            opened
        }
        (result, import) => {
            if let Some(import) = import {
                import.unmap();
            }
            REGISTRY.lock().opening = None;
            // The message also covers chunks that may still arrive.
            outbox::push([ClientMessage::Closed { exporter: handle.exporter, range: handle.range }]);
            outbox::flush();
            Err(result.err().unwrap_or(ERROR_MAP_FAILED))
        }
    }
}

/// Fetches and maps a range. After an error, `import` contains the parts that must be undone.
fn bring_in(handle: &ExportHandle, gpu: &'static Gpu, import: &mut Option<Import>) -> Result<(), CUresult> {
    let mut layout = None;
    loop {
        let done = import.as_ref().map_or(0, |i| i.mapped);
        let first = layout.map_or(0, |(_, chunk)| done / chunk) as u32;
        let ExporterAnswer { bytes, chunk, descriptors, .. } = ask(handle, first)?;
        let end = u64::from(handle.offset).saturating_add(handle.size);
        let whole = |n: u64| n > 0 && n.is_multiple_of(GRANULE) && n <= MAX_BYTES;
        if !whole(bytes) || !whole(chunk) || end > bytes || layout.is_some_and(|known| known != (bytes, chunk)) {
            return Err(ERROR_MAP_FAILED);
        }
        layout = Some((bytes, chunk));
        let import = match import {
            Some(import) => import,
            None => import.insert(Import::reserve(bytes, gpu)?),
        };
        for descriptor in descriptors {
            if import.mapped < bytes {
                import.map(&descriptor, chunk.min(bytes - import.mapped))?;
            }
        }
        if import.mapped == bytes {
            return import.give_access();
        }
        if import.mapped == done {
            return Err(ERROR_MAP_FAILED);
        }
    }
}
