//! Memory that one program lets another use (CUDA IPC), where it is ours and the driver's own handles do not work for it.
//!
//! A handle is 64 bytes that name an allocation: the exporter's key, the range and a secret. Whoever opens it asks the
//! scheduler, which asks the exporter; descriptors of the range's chunks come back and are mapped. What is exported stays
//! on the GPU, pinned, until it is freed. What is imported is foreign memory: it does not move, and it counts with its
//! exporter, until that frees it or ends; then the scheduler tells one of the importers to adopt it.

use super::{
    engine::{GRANULE, check},
    space::{Allocation, Export, Exported},
};
use crate::{
    client,
    cuda::*,
    driver::*,
    futex,
    gpu::{self, Gpu},
    sys::{
        sync::{Mutex, OnceLock},
        time::{self, Instant},
    },
    trace::trace,
    work::Fence,
};
use alloc::{
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};
use nvshare_wire::{ClientMessage, MAX_DESCRIPTORS, Secret, client::Sharing, version};
use rustix::{
    fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    rand::{GetRandomFlags, getrandom},
};

/// `CUipcMemHandle`.
pub type IpcHandle = [u8; 64];

/// What handles of ours begin with. The driver's begin with an address of the exporter's, which this can never be.
const MAGIC: [u8; 8] = *b"nvshare\xfe";
/// How long an exporter may take to answer: it may be moving its memory just now, or be stopped.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Between looks whether the scheduler is back, and between questions to an exporter that is busy.
const LOOK: Duration = Duration::from_millis(10);
/// How long the scheduler may take to read that this process exports.
const ANNOUNCE_PATIENCE: Duration = Duration::from_millis(200);
/// No GPU has as much.
const MAX_BYTES: u64 = 1 << 46;
/// The numbers of imported allocations, beyond all of our own.
const FOREIGN: u64 = 1 << 40;

/// This process's name as an exporter: made with its first export.
static KEY: OnceLock<Option<Secret>> = OnceLock::new();
static BOOK: Mutex<Book> = Mutex::new(Book { imports: BTreeMap::new(), coming: None, outgoing: VecDeque::new() });
/// Whether the book has imports, and messages: so that nobody need look.
static ANY_IMPORTS: AtomicBool = AtomicBool::new(false);
static ANY_OUTGOING: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Book {
    imports: BTreeMap<Name, Import>,
    /// One that is on its way here, and whether it is to be adopted once it is.
    coming: Option<(Name, bool)>,
    /// What the scheduler has to know before the next report of memory.
    outgoing: VecDeque<ClientMessage>,
}

/// A range of another process.
type Name = (Secret, u32);

/// One that this process has mapped.
#[derive(Debug)]
struct Import {
    at: u64,
    bytes: u64,
    /// Where its chunks end that are mapped.
    mapped: u64,
    /// Whose work can use it.
    user: &'static Gpu,
    /// Which GPU has it, if this process uses that one.
    home: Option<&'static Gpu>,
    opens: Vec<Open>,
    /// It counts as this client's.
    adopted: bool,
    /// It has been closed, and is unmapped when the work behind which the fence is has ended.
    closing: Option<Option<Fence>>,
}

/// An allocation in a range that the program has opened.
#[derive(Debug)]
struct Open {
    at: u64,
    size: u64,
    id: u64,
    context: usize,
    references: u32,
}

// ---- handles ----

#[derive(Debug, Clone, Copy)]
struct Handle64 {
    exporter: Secret,
    secret: Secret,
    /// The allocation.
    size: u64,
    id: u64,
    range: u32,
    offset: u32,
}

pub fn is_ours(handle: &IpcHandle) -> bool {
    handle.starts_with(&MAGIC)
}

impl Handle64 {
    fn write(&self) -> IpcHandle {
        let mut handle = [0; 64];
        let parts: [&[u8]; 7] = [
            &MAGIC,
            &self.exporter.0,
            &self.secret.0,
            &self.size.to_le_bytes(),
            &self.id.to_le_bytes(),
            &self.range.to_le_bytes(),
            &self.offset.to_le_bytes(),
        ];
        for (to, from) in handle.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        handle
    }

    fn read(handle: &IpcHandle) -> Option<Self> {
        let (_, rest) = handle.split_first_chunk::<8>()?;
        let (exporter, rest) = rest.split_first_chunk()?;
        let (secret, rest) = rest.split_first_chunk()?;
        let (size, rest) = rest.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let (range, rest) = rest.split_first_chunk()?;
        let (offset, _) = rest.split_first_chunk()?;
        Some(Self {
            exporter: Secret(*exporter),
            secret: Secret(*secret),
            size: u64::from_le_bytes(*size),
            id: u64::from_le_bytes(*id),
            range: u32::from_le_bytes(*range),
            offset: u32::from_le_bytes(*offset),
        })
    }

    fn name(&self) -> Name {
        (self.exporter, self.range)
    }
}

fn random() -> Option<Secret> {
    let mut bytes = [0; 16];
    let n = getrandom(&mut bytes, GetRandomFlags::NONBLOCK).ok()?;
    (n == bytes.len()).then_some(Secret(bytes))
}

// ---- exporting ----

/// How an attempt to export went.
#[derive(Debug)]
pub enum Attempt {
    Done(IpcHandle),
    /// Not all of it is on the GPU now.
    Away,
    /// It cannot be: the driver says what is wrong.
    Impossible,
}

/// Whether memory of ours can be had by others: unless the scheduler is one that knows nothing of it.
pub fn is_offered() -> bool {
    !client::is_connected() || client::speaks(version::SHARING)
}

/// Names the allocation of ours that has this address. From now on its range stays on the GPU.
pub fn export(gpu: &'static Gpu, address: u64) -> Attempt {
    static RANGES: AtomicU32 = AtomicU32::new(1);
    let Some(key) = *KEY.get_or_init(|| random().inspect(|key| say(ClientMessage::Exporter { key: *key }))) else {
        return Attempt::Impossible;
    };
    let Some(space) = gpu.space() else { return Attempt::Impossible };
    let begin = Instant::now();
    // Who opens the handle must find this process.
    while !flush() && client::is_connected() && begin.elapsed() < ANNOUNCE_PATIENCE {
        time::sleep(Duration::from_millis(1));
    }
    let mut guard = space.lock();
    let before = guard.account;
    let new = || Some(Exported { range: RANGES.fetch_add(1, Ordering::Relaxed), secret: random()? });
    let attempt = match guard.export(address, |chunk| descriptor(chunk).is_some(), new) {
        Export::Done(Exported { range, secret }, allocation, offset) => {
            let (size, id) = (allocation.size, allocation.id);
            Attempt::Done(Handle64 { exporter: key, secret, size, id, range, offset }.write())
        }
        Export::Away => Attempt::Away,
        Export::Impossible => Attempt::Impossible,
    };
    let after = guard.account;
    gpu.account_changed(&before, &after);
    attempt
}

/// What the chunk is passed on as.
fn descriptor(chunk: Handle) -> Option<OwnedFd> {
    let mut descriptor = -1;
    // SAFETY: a valid place and a chunk of ours; the descriptor is new and nobody else's.
    unsafe {
        let place = (&raw mut descriptor).cast();
        let result = cuMemExportToShareableHandle(place, chunk, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        (result == SUCCESS && descriptor >= 0).then(|| OwnedFd::from_raw_fd(descriptor))
    }
}

/// The scheduler asks for chunks on behalf of somebody who may have them. Only the link's thread is asked.
pub fn answer(ticket: u64, secret: Secret, range: u32, allocation: u64, first: u32) {
    let exported = Exported { range, secret };
    let mut outcome = Sharing::Unknown;
    for gpu in gpu::attached() {
        let Some(space) = gpu.space() else { continue };
        let guard = space.lock();
        let Some((bytes, chunk, handles)) = guard.exported(exported, allocation, first as usize) else { continue };
        // Under the lock: nobody frees the chunks meanwhile.
        let descriptors: Vec<OwnedFd> = handles.take(MAX_DESCRIPTORS).map_while(descriptor).collect();
        drop(guard);
        outcome = Sharing::Failed;
        if !descriptors.is_empty() {
            let answer = ClientMessage::Exported { ticket, outcome: Sharing::Done, slot: gpu.index, bytes, chunk };
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            if client::send_with(&answer, &borrowed) {
                return;
            }
        }
        break;
    }
    say(ClientMessage::Exported { ticket, outcome, slot: 0, bytes: 0, chunk: 0 });
    flush();
}

/// An exported range is freed: the scheduler learns that before it learns of fewer bytes.
pub fn withdraw(range: u32) {
    say(ClientMessage::Withdrawn { range });
}

// ---- what the scheduler is told ----

fn say(message: ClientMessage) {
    let mut book = BOOK.lock();
    // Under the lock: the link empties the book before there is another connection, perhaps to an older scheduler.
    if client::speaks(version::SHARING) {
        book.outgoing.push_back(message);
        ANY_OUTGOING.store(true, Ordering::SeqCst);
    }
}

/// Sends what the scheduler has to know before the next report; `false` if it did not all go.
pub fn flush() -> bool {
    if !ANY_OUTGOING.load(Ordering::SeqCst) {
        return true;
    }
    let mut book = BOOK.lock();
    while let Some(message) = book.outgoing.front() {
        if !client::send(message) {
            return false;
        }
        book.outgoing.pop_front();
    }
    ANY_OUTGOING.store(false, Ordering::SeqCst);
    true
}

/// A new connection of that protocol version: what was to be said on the one before is forgotten.
pub fn meet_scheduler(version: u16) {
    let mut book = BOOK.lock();
    book.outgoing.clear();
    if let (Some(Some(key)), version::SHARING..) = (KEY.get(), version) {
        book.outgoing.push_back(ClientMessage::Exporter { key: *key });
    }
    ANY_OUTGOING.store(!book.outgoing.is_empty(), Ordering::SeqCst);
}

/// The scheduler has been told of that GPU: it is to know what of it this client has open.
pub fn introduce(gpu: &Gpu) {
    let mut book = BOOK.lock();
    if !client::speaks(version::SHARING) {
        return;
    }
    let Book { imports, outgoing, .. } = &mut *book;
    let here = imports.iter().filter(|(_, i)| i.home.is_some_and(|home| core::ptr::eq(home, gpu)));
    outgoing.extend(here.map(|((exporter, range), i)| ClientMessage::Imported {
        slot: gpu.index,
        exporter: *exporter,
        range: *range,
        bytes: i.bytes,
        adopted: i.adopted.into(),
    }));
    ANY_OUTGOING.store(!outgoing.is_empty(), Ordering::SeqCst);
}

// ---- importing ----

/// The question that is open, if one is: one at a time.
static QUESTION: Mutex<Option<Question>> = Mutex::new(None);
/// Counts answers, for those who wait.
static ANSWERS: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
struct Question {
    ticket: u32,
    answer: Option<Answer>,
}

#[derive(Debug)]
struct Answer {
    outcome: Sharing,
    bytes: u64,
    chunk: u64,
    descriptors: Vec<OwnedFd>,
}

/// An answer has come. What nobody asked for is closed.
pub fn answered(ticket: u32, outcome: Sharing, bytes: u64, chunk: u64, descriptors: Vec<OwnedFd>) {
    if let Some(question) = QUESTION.lock().as_mut().filter(|q| q.ticket == ticket && q.answer.is_none()) {
        question.answer = Some(Answer { outcome, bytes, chunk, descriptors });
    }
    ANSWERS.fetch_add(1, Ordering::SeqCst);
    futex::wake_all(&ANSWERS);
}

/// Asks the exporter for its chunks from number `first` on.
fn ask(handle: &Handle64, first: u32) -> Result<Answer, CUresult> {
    static TICKETS: AtomicU32 = AtomicU32::new(0);
    let begin = Instant::now();
    let mut asked = false;
    let mut met = client::schedulers_met();
    let result = loop {
        let seen = ANSWERS.load(Ordering::SeqCst);
        let mut question = QUESTION.lock();
        let late = begin.elapsed() >= ANSWER_PATIENCE;
        match question.as_mut().and_then(|q| q.answer.take()) {
            Some(Answer { outcome: Sharing::Busy, .. }) if !late => {
                drop(question);
                time::sleep(LOOK);
                asked = false;
                continue;
            }
            Some(answer) => break Ok(answer),
            None if late => break Err(ERROR_MAP_FAILED),
            None => {}
        }
        // Also when the scheduler was away meanwhile, and with it the question.
        let now_met = client::schedulers_met();
        asked &= client::is_connected() && core::mem::replace(&mut met, now_met) == now_met;
        if !asked {
            let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
            *question = Some(Question { ticket, answer: None });
            let Handle64 { exporter, secret, range, id: allocation, .. } = *handle;
            drop(question);
            let open = ClientMessage::Open { ticket, exporter, secret, range, allocation, first };
            asked = client::speaks(version::SHARING) && flush() && client::send(&open);
        } else {
            drop(question);
        }
        futex::wait(&ANSWERS, seen, LOOK);
    };
    *QUESTION.lock() = None;
    let answer = result?;
    match answer.outcome {
        Sharing::Done => Ok(answer),
        Sharing::Unknown => Err(ERROR_INVALID_VALUE), // as the driver says of memory that is gone
        Sharing::Failed | Sharing::Busy => Err(ERROR_MAP_FAILED),
    }
}

/// Opens a handle of ours in this context of that GPU: the allocation's address here.
pub fn open(handle: &IpcHandle, gpu: &'static Gpu, context: usize) -> Result<u64, CUresult> {
    static ONE: Mutex<()> = Mutex::new(());
    let handle = Handle64::read(handle).ok_or(ERROR_INVALID_VALUE)?;
    if let Some(Some(key)) = KEY.get()
        && *key == handle.exporter
    {
        return Err(ERROR_INVALID_CONTEXT);
    }
    let _one = ONE.lock();
    if let Some(opened) = BOOK.lock().open(&handle, context) {
        return opened;
    }
    BOOK.lock().coming = Some((handle.name(), false));
    let mut import: Option<Import> = None;
    let result = bring_in(&handle, gpu, &mut import);
    match (result, import) {
        (Ok(()), Some(import)) => {
            trace!("GPU {}: imported {} bytes at {:#x}", gpu.index, import.bytes, import.at);
            let mut book = BOOK.lock();
            book.imports.insert(handle.name(), import);
            ANY_IMPORTS.store(true, Ordering::SeqCst);
            let opened = book.open(&handle, context).unwrap_or(Err(ERROR_MAP_FAILED));
            let coming = book.coming.take();
            drop(book);
            if let Some((_, true)) = coming {
                adopt(handle.exporter, handle.range);
            }
            opened
        }
        (result, import) => {
            if let Some(import) = import {
                import.unmap();
            }
            BOOK.lock().coming = None;
            // Also of what may still arrive.
            say(ClientMessage::Closed { exporter: handle.exporter, range: handle.range });
            flush();
            Err(result.err().unwrap_or(ERROR_MAP_FAILED))
        }
    }
}

/// Fetches and maps a range. `import` has what there is to be undone where that fails.
fn bring_in(handle: &Handle64, gpu: &'static Gpu, import: &mut Option<Import>) -> Result<(), CUresult> {
    let mut layout = None;
    loop {
        let done = import.as_ref().map_or(0, |i| i.mapped);
        let first = layout.map_or(0, |(_, chunk)| done / chunk) as u32;
        let Answer { bytes, chunk, descriptors, .. } = ask(handle, first)?;
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

impl Import {
    fn reserve(bytes: u64, user: &'static Gpu) -> Result<Self, CUresult> {
        let mut at = 0;
        // SAFETY: a valid place.
        check(unsafe { cuMemAddressReserve(&mut at, bytes as usize, GRANULE as usize, 0, 0) })?;
        Ok(Self { at, bytes, mapped: 0, user, home: None, opens: Vec::new(), adopted: false, closing: None })
    }

    /// Maps the next chunk. The mapping keeps the memory; the descriptor and the handle are no longer needed.
    fn map(&mut self, descriptor: &OwnedFd, len: u64) -> Result<(), CUresult> {
        let shared = descriptor.as_raw_fd() as usize as *mut c_void;
        let (mut handle, mut prop) = (0, AllocationProp::default());
        // SAFETY: valid places and an open descriptor; the addresses are reserved and nothing is mapped there.
        unsafe {
            check(cuMemImportFromShareableHandle(&mut handle, shared, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
                .map_err(|_| ERROR_MAP_FAILED)?;
            if cuMemGetAllocationPropertiesFromHandle(&mut prop, handle) == SUCCESS {
                self.home =
                    gpu::by_ordinal(prop.location.id).filter(|_| prop.location.kind == MEM_LOCATION_TYPE_DEVICE);
            }
            let mapped = check(cuMemMap(self.at + self.mapped, len as usize, 0, handle, 0));
            cuMemRelease(handle);
            mapped.map_err(|_| ERROR_MAP_FAILED)?;
        }
        self.mapped += len;
        Ok(())
    }

    fn give_access(&self) -> Result<(), CUresult> {
        let location = Location { kind: MEM_LOCATION_TYPE_DEVICE, id: self.user.index as CUdevice };
        let access = AccessDesc { location, flags: MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: a valid place; all of it is mapped.
        check(unsafe { cuMemSetAccess(self.at, self.bytes as usize, &access, 1) }).map_err(|_| ERROR_MAP_FAILED)
    }

    /// Undoes what there is. No work that uses it may be running.
    fn unmap(&self) {
        // SAFETY: mapped and reserved by this, and nothing uses it.
        unsafe {
            if self.mapped > 0 {
                cuMemUnmap(self.at, self.mapped as usize);
            }
            cuMemAddressFree(self.at, self.bytes as usize);
        }
    }
}

impl Book {
    /// One more reference, if the range is here; `None` if it has to be fetched.
    fn open(&mut self, handle: &Handle64, context: usize) -> Option<Result<u64, CUresult>> {
        static IDS: AtomicU64 = AtomicU64::new(FOREIGN);
        let import = self.imports.get_mut(&handle.name())?;
        let at = import.at + u64::from(handle.offset);
        if u64::from(handle.offset).saturating_add(handle.size) > import.bytes {
            return Some(Err(ERROR_INVALID_VALUE));
        }
        // The driver lets one context of a device open what another process exports.
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

    /// Takes a range out whose last reference is gone and which no work uses; the caller unmaps it.
    fn take(&mut self, name: Name) -> Option<Import> {
        let import = self.imports.remove(&name)?;
        ANY_IMPORTS.store(!self.imports.is_empty(), Ordering::SeqCst);
        Some(import)
    }
}

/// One reference less to what was opened at this address; `None` if nothing of ours was.
pub fn close(address: u64) -> Option<()> {
    if !ANY_IMPORTS.load(Ordering::SeqCst) {
        return None;
    }
    {
        let mut book = BOOK.lock();
        let import = book.imports.values_mut().find(|i| i.opens.iter().any(|open| open.at == address))?;
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
    look_after();
    Some(())
}

/// Unmaps what was closed and is no longer used by any work. `false`: some of it still may be.
pub fn look_after() -> bool {
    if !ANY_IMPORTS.load(Ordering::SeqCst) {
        return true;
    }
    let mut rest = false;
    let mut gone = Vec::new();
    let mut book = BOOK.lock();
    for (name, import) in &mut book.imports {
        let Some(fence) = &mut import.closing else { continue };
        if fence.is_none() {
            *fence = import.user.work.fence();
        }
        let done = import.user.is_drained() || fence.as_mut().is_some_and(|fence| import.user.work.is_done(fence));
        if done { gone.push(*name) } else { rest = true }
    }
    let gone: Vec<_> = gone.into_iter().filter_map(|name| Some((name, book.take(name)?))).collect();
    // Before anybody can open it anew.
    gone.iter().for_each(|(_, import)| import.unmap());
    drop(book);
    gone.into_iter().for_each(|(name, import)| forget(name, &import));
    !rest
}

/// A context is gone (`last`: and no other is left on that GPU), and with it what it had open.
pub fn drop_context(gpu: &Gpu, context: CUcontext, last: bool) {
    if !ANY_IMPORTS.load(Ordering::SeqCst) {
        return;
    }
    let mut book = BOOK.lock();
    let mut gone = Vec::new();
    for (name, import) in book.imports.iter_mut().filter(|(_, i)| core::ptr::eq(i.user, gpu)) {
        import.opens.retain(|open| !last && open.context != context as usize);
        if import.opens.is_empty() {
            gone.push(*name);
        }
    }
    let gone: Vec<_> = gone.into_iter().filter_map(|name| Some((name, book.take(name)?))).collect();
    gone.iter().for_each(|(_, import)| import.unmap());
    drop(book);
    gone.into_iter().for_each(|(name, import)| forget(name, &import));
}

/// Tells the scheduler that a range is no longer open here.
fn forget((exporter, range): Name, import: &Import) {
    trace!("closed what was imported at {:#x}", import.at);
    say(ClientMessage::Closed { exporter, range });
    if let Some(home) = import.home.filter(|_| import.adopted) {
        home.pin(|pinned| pinned.saturating_sub(import.bytes));
    }
    flush();
}

/// The exporter no longer counts it: it is pinned memory of this client from now on.
pub fn adopt(exporter: Secret, range: u32) {
    let (home, bytes) = {
        let mut book = BOOK.lock();
        if let Some((_, wanted)) = book.coming.as_mut().filter(|(name, _)| *name == (exporter, range)) {
            *wanted = true;
            return;
        }
        let Some(import) = book.imports.get_mut(&(exporter, range)) else { return }; // closed meanwhile
        let Some(home) = import.home.filter(|_| !import.adopted) else { return };
        import.adopted = true;
        (home, import.bytes)
    };
    trace!("GPU {}: adopts {bytes} bytes that were imported", home.index);
    say(ClientMessage::Adopted { exporter, range });
    home.pin(|pinned| pinned.saturating_add(bytes));
}

/// The imported allocation that has this address, and the GPU whose work uses it.
pub fn find(address: u64) -> Option<(&'static Gpu, Allocation)> {
    if !ANY_IMPORTS.load(Ordering::SeqCst) {
        return None;
    }
    let book = BOOK.lock();
    book.imports.values().find_map(|import| {
        let open = import.opens.iter().find(|open| address.wrapping_sub(open.at) < open.size)?;
        Some((import.user, Allocation::foreign(open.at, open.size, open.id, open.context)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_says_what_it_was_made_of() {
        let (exporter, secret) = (Secret([1; 16]), Secret([2; 16]));
        let handle = Handle64 { exporter, secret, size: 3 << 40, id: 4, range: 5, offset: 6 };
        let bytes = handle.write();
        assert!(is_ours(&bytes) && !is_ours(&[0; 64]));
        let read = Handle64::read(&bytes).expect("64 bytes");
        assert_eq!((read.exporter, read.secret, read.size, read.id), (exporter, secret, 3 << 40, 4));
        assert_eq!((read.range, read.offset), (5, 6));
    }

    #[test]
    fn secrets_differ() {
        assert_ne!(random(), random());
    }
}
