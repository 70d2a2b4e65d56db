//! Opening a handle. If the handle's range is not mapped yet, the range is fetched from the
//! exporter and mapped.

use super::{
    export,
    handle::{ExportHandle, IpcHandle},
    imports::{self, Import, REGISTRY},
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::fake::Scheduler, driver::fake::Driver, gpu::fake::attach_to_scheduler, registry::shared::question,
    };
    use alloc::vec::Vec;
    use core::sync::atomic::AtomicBool;
    use core::sync::atomic::Ordering;
    use nvshare_wire::{Secret, client::Sharing};
    use rustix::fs::{self, Mode, OFlags};
    use std::thread;

    const BYTES: u64 = 3 * GRANULE;

    struct Opener {
        driver: Driver,
        gpu: &'static Gpu,
        context: usize,
        scheduler: Scheduler,
        handle: ExportHandle,
    }

    /// An answer of the exporter: its outcome, the size of the range and of its chunks, and the number of
    /// descriptors.
    type Answer = (Sharing, u64, u64, usize);

    const ONE_CHUNK: Answer = (Sharing::Done, BYTES, GRANULE, 1);
    const TWO_CHUNKS: Answer = (Sharing::Done, BYTES, GRANULE, 2);
    const UNKNOWN: Answer = (Sharing::Unknown, 0, 0, 0);

    impl Opener {
        fn new() -> Self {
            let driver = Driver::new();
            let (gpu, context, scheduler) = attach_to_scheduler(&driver);
            let (exporter, secret) = (Secret([gpu.index as u8; 16]), Secret([1; 16]));
            let handle = ExportHandle { exporter, secret, size: GRANULE, id: 1, range: 6, offset: GRANULE as u32 };
            driver.forget_calls();
            Self { driver, gpu, context: context as usize, scheduler, handle }
        }

        /// Opens the handle while an exporter gives these answers. Returns the result, and all messages.
        fn open_with(
            &self,
            answers: &[Answer],
            before_answering: impl Fn() + Sync,
        ) -> (Result<u64, CUresult>, Vec<ClientMessage>) {
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                let exporter = scope.spawn(|| {
                    let (mut answers, mut messages) = (answers.iter(), Vec::new());
                    loop {
                        let ends = is_over.load(Ordering::SeqCst);
                        while let Some(message) = self.scheduler.next() {
                            if let ClientMessage::Open { ticket, .. } = message {
                                before_answering();
                                let (outcome, bytes, chunk, count) = *answers.next().unwrap_or(&UNKNOWN);
                                let file = || fs::open(c"/dev/null", OFlags::RDONLY, Mode::empty()).expect("a file");
                                let descriptors = (0..count).map(|_| file());
                                question::on_answer(ticket, outcome, bytes, chunk, descriptors.collect());
                            }
                            messages.push(message);
                        }
                        if ends {
                            return messages;
                        }
                        thread::yield_now();
                    }
                });
                let result = open(&self.handle.write(), self.gpu, self.context);
                is_over.store(true, Ordering::SeqCst);
                (result, exporter.join().expect("no panic"))
            })
        }

        fn open(&self, answers: &[Answer]) -> (Result<u64, CUresult>, Vec<ClientMessage>) {
            self.open_with(answers, || {})
        }
    }

    fn first_chunks(messages: &[ClientMessage]) -> Vec<u32> {
        let first = |message: &ClientMessage| match message {
            ClientMessage::Open { first, .. } => Some(*first),
            _ => None,
        };
        messages.iter().filter_map(first).collect()
    }

    fn is_closed(messages: &[ClientMessage]) -> bool {
        messages.iter().any(|message| matches!(message, ClientMessage::Closed { range: 6, .. }))
    }

    #[test]
    fn all_chunks_of_a_range_are_mapped_from_several_answers() {
        let opener = Opener::new();
        let (result, messages) = opener.open(&[TWO_CHUNKS, ONE_CHUNK]);
        assert_eq!(first_chunks(&messages), [0, 2]);
        let mapped: Vec<u64> = opener.driver.arguments("cuMemMap").iter().map(|arguments| arguments[0]).collect();
        let at = mapped[0];
        assert_eq!((result, &mapped[..]), (Ok(at + GRANULE), &[at, at + GRANULE, at + 2 * GRANULE][..]));
        assert_eq!(opener.driver.count("cuMemSetAccess"), 1);
        assert!(!is_closed(&messages) && REGISTRY.lock().opening.is_none());
    }

    #[test]
    fn a_mapped_range_is_opened_again_without_a_request() {
        let mut opener = Opener::new();
        let (first, _) = opener.open(&[TWO_CHUNKS, ONE_CHUNK]);
        let (second, messages) = opener.open(&[]);
        assert_eq!((first, messages.len()), (second, 0));
        opener.context += 1;
        assert_eq!(opener.open(&[]).0, Err(ERROR_INVALID_HANDLE));
    }

    #[test]
    fn a_failed_open_is_undone_and_reported() {
        let opener = Opener::new();
        let used = opener.driver.used();
        for answers in [[TWO_CHUNKS, (Sharing::Failed, 0, 0, 0)], [TWO_CHUNKS, (Sharing::Done, BYTES, GRANULE, 0)]] {
            opener.driver.forget_calls();
            let (result, messages) = opener.open(&answers);
            assert_eq!((result, is_closed(&messages)), (Err(ERROR_MAP_FAILED), true));
            let at = opener.driver.arguments("cuMemMap")[0][0];
            assert_eq!(opener.driver.arguments("cuMemUnmap"), [[at, 2 * GRANULE]]);
            assert_eq!(opener.driver.arguments("cuMemAddressFree"), [[at, BYTES]]);
            assert_eq!((opener.driver.used(), REGISTRY.lock().opening.is_none()), (used, true));
        }
        assert!(!REGISTRY.lock().imports.contains_key(&opener.handle.range_id()));
    }

    #[test]
    fn memory_that_no_longer_exists_cannot_be_opened() {
        let opener = Opener::new();
        let (result, messages) = opener.open(&[UNKNOWN]);
        assert_eq!((result, is_closed(&messages)), (Err(ERROR_INVALID_VALUE), true));
        assert_eq!(opener.driver.count("cuMemAddressReserve"), 0);
    }

    #[test]
    fn an_exporter_with_an_impossible_layout_is_refused() {
        let opener = Opener::new();
        let layouts = [(BYTES + 1, GRANULE), (BYTES, 0), (0, GRANULE), (GRANULE, GRANULE), (2 * MAX_BYTES, GRANULE)];
        for (bytes, chunk) in layouts {
            let (result, _) = opener.open(&[(Sharing::Done, bytes, chunk, 1)]);
            assert_eq!(result, Err(ERROR_MAP_FAILED), "{bytes} {chunk}");
        }
        assert_eq!(opener.driver.count("cuMemMap"), 0);
        let (result, _) = opener.open(&[ONE_CHUNK, (Sharing::Done, BYTES, BYTES, 1)]);
        assert_eq!((result, opener.driver.count("cuMemMap")), (Err(ERROR_MAP_FAILED), 1), "the layout has changed");
    }

    #[test]
    fn memory_adopted_while_it_is_opened_counts_when_it_is_open() {
        let opener = Opener::new();
        let ExportHandle { exporter, range, .. } = opener.handle;
        let pinned = || opener.gpu.account().expect("a space").pinned;
        let (result, _) = opener.open_with(&[TWO_CHUNKS, ONE_CHUNK], || {
            imports::adopt(exporter, range);
            assert_eq!(pinned(), 0);
        });
        assert_eq!((result.is_ok(), pinned()), (true, BYTES));
    }

    #[test]
    fn an_allocation_that_ends_beyond_its_range_is_refused() {
        let mut opener = Opener::new();
        opener.handle.offset = u32::MAX;
        let (result, _) = opener.open(&[TWO_CHUNKS]);
        assert_eq!(result, Err(ERROR_MAP_FAILED));
        assert_eq!(opener.driver.count("cuMemAddressReserve"), 0);
    }
}
