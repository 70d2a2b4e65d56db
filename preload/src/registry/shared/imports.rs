//! Memory of other processes that this process has opened. The memory does not move. The scheduler
//! counts it as the exporter's until the exporter frees it or ends. Then the scheduler tells one of
//! the importers to adopt the memory.

use super::handle::{ExportHandle, RangeId};
use crate::{
    connection::outbox,
    driver::{self, check, query, types::*},
    env::trace::trace,
    gpu::{self, Gpu},
    memory::{
        engine::{self, GRANULE},
        space::Allocation,
    },
    submit::Fence,
    sys::sync::{Guard, Mutex, Rank},
};
use alloc::{collections::BTreeMap, vec::Vec};
use core::{
    ffi::c_void,
    ops::DerefMut,
    sync::atomic::{AtomicU64, Ordering},
};
use nvshare_wire::{ClientMessage, Secret};
use rustix::fd::{AsRawFd, OwnedFd};

/// The first id of imported allocations. It is above all ids of this process's own allocations.
const FOREIGN: u64 = 1 << 40;

pub static REGISTRY: Mutex<SharedMemoryRegistry> =
    Mutex::new(Rank::Imports, SharedMemoryRegistry { imports: BTreeMap::new(), opening: None });

#[derive(Debug)]
pub struct SharedMemoryRegistry {
    pub imports: BTreeMap<RangeId, Import>,
    /// The range that is being opened, and whether this client must adopt it afterwards.
    pub opening: Option<(RangeId, bool)>,
}

/// A range that this process has mapped.
#[derive(Debug)]
pub struct Import {
    pub at: u64,
    pub bytes: u64,
    /// The offset at which the mapped chunks end.
    pub mapped: u64,
    /// The GPU whose work uses the memory.
    user: &'static Gpu,
    /// The GPU that contains the memory, if this process uses that GPU.
    home: Option<&'static Gpu>,
    opens: Vec<Open>,
    /// True if the range counts towards this client's memory.
    adopted: bool,
    /// `Some` if the program has closed the range. The range is unmapped when the work before the
    /// fence is done.
    closing: Option<Option<Fence>>,
}

/// An allocation in the range that the program has opened.
#[derive(Debug)]
struct Open {
    at: u64,
    size: u64,
    id: u64,
    context: usize,
    references: u32,
}

/// Whether this process has opened memory of other processes.
pub fn has_imports() -> bool {
    !REGISTRY.lock().imports.is_empty()
}

/// Queues messages about the imports that this client has open on that GPU. Called when the GPU has
/// been introduced to the scheduler.
pub fn introduce(gpu: &Gpu) {
    // The registry stays locked until the messages are queued. If a range is closed concurrently,
    // the message about its end must follow.
    let registry = REGISTRY.lock();
    let here = registry.imports.iter().filter(|(_, i)| i.home.is_some_and(|home| core::ptr::eq(home, gpu)));
    outbox::push(here.map(|((exporter, range), i)| ClientMessage::Imported {
        slot: gpu.index,
        exporter: *exporter,
        range: *range,
        bytes: i.bytes,
        adopted: i.adopted.into(),
    }));
}

impl Import {
    pub fn reserve(bytes: u64, user: &'static Gpu) -> Result<Self, CUresult> {
        // SAFETY: the place is valid.
        let at = query::value(|at| unsafe { driver::cuMemAddressReserve(at, bytes as usize, GRANULE as usize, 0, 0) })?;
        Ok(Self { at, bytes, mapped: 0, user, home: None, opens: Vec::new(), adopted: false, closing: None })
    }

    /// Maps the next chunk. The mapping keeps the memory alive, so the descriptor and the handle are no
    /// longer needed.
    pub fn map(&mut self, descriptor: &OwnedFd, len: u64) -> Result<(), CUresult> {
        let shared = descriptor.as_raw_fd() as usize as *mut c_void;
        let (mut handle, mut prop) = (0, AllocationProp::default());
        // SAFETY: `handle` and `prop` outlive the calls, and the descriptor is open. The addresses are
        // reserved, and no memory is mapped there.
        unsafe {
            check(driver::cuMemImportFromShareableHandle(&mut handle, shared, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
                .map_err(|_| ERROR_MAP_FAILED)?;
            if driver::cuMemGetAllocationPropertiesFromHandle(&mut prop, handle) == SUCCESS {
                self.home =
                    gpu::by_ordinal(prop.location.id).filter(|_| prop.location.kind == MEM_LOCATION_TYPE_DEVICE);
            }
            let mapped = check(driver::cuMemMap(self.at + self.mapped, len as usize, 0, handle, 0));
            driver::cuMemRelease(handle);
            mapped.map_err(|_| ERROR_MAP_FAILED)?;
        }
        self.mapped += len;
        Ok(())
    }

    pub fn give_access(&self) -> Result<(), CUresult> {
        engine::let_in(self.user.index as CUdevice, self.at, self.bytes).map_err(|_| ERROR_MAP_FAILED)
    }

    /// Unmaps the range and frees its addresses. No running work may use it.
    pub fn unmap(&self) {
        // SAFETY: this import has mapped and reserved the range, and no work uses it.
        unsafe {
            if self.mapped > 0 {
                driver::cuMemUnmap(self.at, self.mapped as usize);
            }
            driver::cuMemAddressFree(self.at, self.bytes as usize);
        }
    }
}

impl SharedMemoryRegistry {
    /// Opens an allocation once more. Returns `None` if its range is not mapped here.
    pub fn open(&mut self, handle: &ExportHandle, context: usize) -> Option<Result<u64, CUresult>> {
        static IDS: AtomicU64 = AtomicU64::new(FOREIGN);
        let import = self.imports.get_mut(&handle.range_id())?;
        let at = import.at + u64::from(handle.offset);
        if u64::from(handle.offset).saturating_add(handle.size) > import.bytes {
            return Some(Err(ERROR_INVALID_VALUE));
        }
        // For each device, the driver lets only one context open memory of another process.
        if import.opens.iter().any(|open| open.context != context) {
            return Some(Err(ERROR_INVALID_HANDLE));
        }
        import.closing = None;
        match import.opens.iter_mut().find(|open| open.at == at) {
            Some(open) => open.references = open.references.saturating_add(1),
            None => import.opens.push(Open {
                at,
                size: handle.size,
                id: IDS.fetch_add(1, Ordering::Relaxed),
                context,
                references: 1,
            }),
        }
        Some(Ok(at))
    }
}

/// Drops one reference to the open allocation at this address. Returns `None` if this library has
/// not imported the allocation.
pub fn close(address: u64) -> Option<()> {
    {
        let mut registry = REGISTRY.lock();
        let import = registry.imports.values_mut().find(|i| i.opens.iter().any(|open| open.at == address))?;
        let which = import.opens.iter().position(|open| open.at == address)?;
        let open = import.opens.get_mut(which)?;
        open.references -= 1;
        if open.references == 0 {
            import.opens.swap_remove(which);
        }
        if import.opens.is_empty() {
            import.closing = Some(None);
        }
    }
    unmap_closed();
    Some(())
}

/// Unmaps closed ranges that no work uses any more. Returns `false` if some closed ranges remain.
pub fn unmap_closed() -> bool {
    let mut rest = false;
    let mut gone = Vec::new();
    let mut registry = REGISTRY.lock();
    for (name, import) in &mut registry.imports {
        let Some(fence) = &mut import.closing else { continue };
        let work = &import.user.work;
        let done = import.user.is_drained() || work.has_ended(fence, || work.fence());
        if done { gone.push(*name) } else { rest = true }
    }
    forget(registry, &gone);
    !rest
}

/// Closes all allocations that a destroyed context had open. If the context was the `last` one on
/// the GPU, closes all allocations that are open on that GPU.
pub fn drop_context(gpu: &Gpu, context: CUcontext, last: bool) {
    let mut registry = REGISTRY.lock();
    let mut gone = Vec::new();
    for (name, import) in registry.imports.iter_mut().filter(|(_, i)| core::ptr::eq(i.user, gpu)) {
        // Work in another context may still use a range that the program has closed. Such a range is unmapped
        // after that work.
        let was_open = !import.opens.is_empty();
        import.opens.retain(|open| !last && open.context != context as usize);
        if last || (was_open && import.opens.is_empty()) {
            gone.push(*name);
        }
    }
    forget(registry, &gone);
}

/// Unmaps ranges, and tells the scheduler that they are no longer open here. The registry is locked
/// until the messages are queued: otherwise a thread could open a range again before `Closed` is
/// sent, and the scheduler would take the range for unused.
fn forget<G: DerefMut<Target = SharedMemoryRegistry>>(mut registry: Guard<G>, gone: &[RangeId]) {
    let mut adopted = Vec::new();
    for (name, import) in gone.iter().filter_map(|name| registry.imports.remove_entry(name)) {
        import.unmap();
        trace!("closed the import at {:#x}", import.at);
        outbox::push([ClientMessage::Closed { exporter: name.0, range: name.1 }]);
        adopted.extend(import.home.filter(|_| import.adopted).map(|home| (home, import.bytes)));
    }
    drop(registry);
    for (home, bytes) in adopted {
        home.pin(|pinned| pinned.saturating_sub(bytes));
    }
    outbox::flush();
}

/// Counts a range as pinned memory of this client, because the exporter no longer counts it.
pub fn adopt(exporter: Secret, range: u32) {
    let (home, bytes) = {
        let mut registry = REGISTRY.lock();
        if let Some((_, wanted)) = registry.opening.as_mut().filter(|(name, _)| *name == (exporter, range)) {
            *wanted = true;
            return;
        }
        let Some(import) = registry.imports.get_mut(&(exporter, range)) else { return }; // closed by the program
        let Some(home) = import.home.filter(|_| !import.adopted) else { return };
        import.adopted = true;
        (home, import.bytes)
    };
    trace!("GPU {}: adopted {bytes} imported bytes", home.index);
    outbox::push([ClientMessage::Adopted { exporter, range }]);
    home.pin(|pinned| pinned.saturating_add(bytes));
}

/// Returns the imported allocation that contains this address, and the GPU whose work uses it.
pub fn find(address: u64) -> Option<(&'static Gpu, Allocation)> {
    let registry = REGISTRY.lock();
    registry.imports.values().find_map(|import| {
        let open = import.opens.iter().find(|open| address.wrapping_sub(open.at) < open.size)?;
        Some((import.user, Allocation::foreign(open.at, open.size, open.id, open.context)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::fake::Scheduler,
        driver::fake::Driver,
        gpu::fake::{attach_to_scheduler, busy_stream},
        submit::{captures, closed},
    };
    use rustix::fs::{Mode, OFlags, open};

    /// A range of two chunks, and an allocation in its second chunk.
    const BYTES: u64 = 2 * GRANULE;
    const OFFSET: u64 = GRANULE;

    struct Importer {
        driver: Driver,
        gpu: &'static Gpu,
        context: CUcontext,
        scheduler: Scheduler,
        handle: ExportHandle,
        /// The address of the range.
        at: u64,
    }

    impl Importer {
        fn new() -> Self {
            let driver = Driver::new();
            let (gpu, context, scheduler) = attach_to_scheduler(&driver);
            let mut import = Import::reserve(BYTES, gpu).expect("addresses");
            let descriptor = open(c"/dev/null", OFlags::RDONLY, Mode::empty()).expect("a file");
            (0..2).for_each(|_| import.map(&descriptor, GRANULE).expect("a chunk"));
            import.give_access().expect("access");
            let (exporter, secret) = (Secret([gpu.index as u8; 16]), Secret([0; 16]));
            let handle = ExportHandle { exporter, secret, size: GRANULE, id: 1, range: 5, offset: OFFSET as u32 };
            let at = import.at;
            REGISTRY.lock().imports = BTreeMap::from([(handle.range_id(), import)]);
            Self { driver, gpu, context, scheduler, handle, at }
        }

        fn open_in(&self, context: CUcontext) -> Result<u64, CUresult> {
            REGISTRY.lock().open(&self.handle, context as usize).expect("the range is mapped")
        }

        fn open(&self) -> u64 {
            self.open_in(self.context).expect("it opens")
        }

        fn is_mapped(&self) -> bool {
            let is_mapped = [0, GRANULE].map(|offset| self.driver.is_mapped(self.at + offset));
            assert_eq!(is_mapped[0], is_mapped[1]);
            is_mapped[0]
        }

        fn pinned(&self) -> u64 {
            self.gpu.account().expect("a space").pinned
        }
    }

    #[test]
    fn closed_memory_is_unmapped_after_the_work_that_may_use_it() {
        let importer = Importer::new();
        let stream = busy_stream(&importer.driver, importer.gpu, importer.context);
        assert_eq!(close(importer.open()), Some(()));
        assert!(!unmap_closed() && importer.is_mapped() && importer.scheduler.sent().is_empty());
        importer.driver.finish(stream);
        assert!(unmap_closed() && !importer.is_mapped() && !has_imports());
        assert_eq!(importer.driver.arguments("cuMemAddressFree"), [[importer.at, BYTES]]);
        let sent = importer.scheduler.sent();
        assert!(matches!(sent[..], [ClientMessage::Closed { range: 5, .. }]), "{sent:?}");
    }

    #[test]
    fn closed_memory_stays_mapped_while_a_capture_hides_running_work() {
        let importer = Importer::new();
        let stream = busy_stream(&importer.driver, importer.gpu, importer.context);
        importer.driver.set_capturing(stream, Some(1));
        assert_eq!(captures::begin(stream, || SUCCESS), SUCCESS);
        close(importer.open());
        importer.driver.finish(stream);
        assert!(!unmap_closed() && importer.is_mapped());
        importer.driver.set_capturing(stream, None);
        captures::end(stream);
        assert!(unmap_closed() && !importer.is_mapped());
    }

    #[test]
    fn memory_of_a_drained_gpu_is_unmapped_without_a_fence() {
        let importer = Importer::new();
        importer.gpu.work.note(importer.driver.new_stream(importer.context));
        importer.driver.fail("cuEventRecord", usize::MAX, ERROR_OUT_OF_MEMORY);
        close(importer.open());
        assert!(importer.is_mapped(), "no fence can be recorded");
        importer.gpu.gate.close(closed::LOCK);
        assert!(unmap_closed() && !importer.is_mapped());
    }

    #[test]
    fn destroying_another_context_unmaps_nothing_that_running_work_uses() {
        let importer = Importer::new();
        let other = importer.driver.new_context(importer.gpu.index as CUdevice);
        let address = importer.open();
        drop_context(importer.gpu, other, false);
        assert!(importer.is_mapped(), "the range is open in another context");
        let stream = busy_stream(&importer.driver, importer.gpu, importer.context);
        close(address);
        drop_context(importer.gpu, other, false);
        assert!(importer.is_mapped(), "running work may use the closed range");
        importer.driver.finish(stream);
        assert!(unmap_closed() && !importer.is_mapped());
    }

    #[test]
    fn memory_is_unmapped_with_the_context_that_opened_it() {
        let importer = Importer::new();
        importer.open();
        drop_context(importer.gpu, importer.context, false);
        assert!(!importer.is_mapped() && !has_imports());
    }

    #[test]
    fn closed_memory_is_unmapped_with_the_last_context() {
        let importer = Importer::new();
        busy_stream(&importer.driver, importer.gpu, importer.context);
        close(importer.open());
        assert!(importer.is_mapped());
        drop_context(importer.gpu, importer.context, true);
        assert!(!importer.is_mapped());
    }

    #[test]
    fn an_allocation_is_closed_with_its_last_reference() {
        let importer = Importer::new();
        let address = importer.open();
        assert_eq!((address, importer.open()), (importer.at + OFFSET, address));
        assert_eq!((close(address), importer.is_mapped()), (Some(()), true));
        assert_eq!((close(address), importer.is_mapped()), (Some(()), false));
        assert_eq!(close(address), None);
    }

    #[test]
    fn reopening_cancels_the_unmapping() {
        let importer = Importer::new();
        let stream = busy_stream(&importer.driver, importer.gpu, importer.context);
        close(importer.open());
        importer.open();
        importer.driver.finish(stream);
        assert!(unmap_closed() && importer.is_mapped());
    }

    #[test]
    fn only_one_context_opens_a_range_and_only_within_its_bounds() {
        let mut importer = Importer::new();
        importer.open();
        let other = importer.driver.new_context(importer.gpu.index as CUdevice);
        assert_eq!(importer.open_in(other), Err(ERROR_INVALID_HANDLE));
        importer.handle.size = BYTES - OFFSET + 1;
        assert_eq!(importer.open_in(importer.context), Err(ERROR_INVALID_VALUE));
    }

    #[test]
    fn adopted_memory_is_pinned_until_it_is_closed() {
        let importer = Importer::new();
        let address = importer.open();
        let ExportHandle { exporter, range, .. } = importer.handle;
        for _ in 0..2 {
            adopt(exporter, range);
            assert_eq!(importer.pinned(), BYTES);
        }
        let is_adopted = |message: &&ClientMessage| matches!(message, ClientMessage::Adopted { range: 5, .. });
        assert_eq!(importer.scheduler.sent().iter().filter(is_adopted).count(), 1);
        close(address);
        assert_eq!(importer.pinned(), 0);
        adopt(exporter, range);
        assert_eq!(importer.pinned(), 0, "the program has closed it");
    }

    #[test]
    fn an_imported_address_belongs_to_an_open_allocation() {
        let importer = Importer::new();
        assert!(find(importer.at + OFFSET).is_none(), "the allocation is not open");
        let address = importer.open();
        let (gpu, allocation) = find(address + GRANULE - 1).expect("the last byte");
        assert_eq!((gpu.index, allocation.base, allocation.size), (importer.gpu.index, address, GRANULE));
        assert!(allocation.is_foreign() && allocation.id >= FOREIGN);
        assert!(find(address + GRANULE).is_none() && find(importer.at).is_none());
    }

    #[test]
    fn a_chunk_that_cannot_be_mapped_is_released() {
        let importer = Importer::new();
        let mut import = Import::reserve(BYTES, importer.gpu).expect("addresses");
        importer.driver.forget_calls();
        importer.driver.fail("cuMemMap", 1, ERROR_OUT_OF_MEMORY);
        let descriptor = open(c"/dev/null", OFlags::RDONLY, Mode::empty()).expect("a file");
        assert_eq!(import.map(&descriptor, GRANULE), Err(ERROR_MAP_FAILED));
        assert_eq!((importer.driver.count("cuMemRelease"), import.mapped), (1, 0));
    }
}
