//! Contexts: their memory, their fatal errors, and the current context of a thread.

mod primary;

pub use primary::*;

use crate::{
    device,
    error::{Done, Error},
    memory, module, out,
    registry::{Registry, handle_of},
    stream::{Point, Stream},
};
use cuda_sim_gpus::{Account, Config, MAX_GPUS};
use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};

/// A context of one GPU.
#[derive(Debug)]
pub struct Context {
    pub id: u64,
    pub gpu: usize,
    flags: AtomicU32,
    version: u32,
    kind: Kind,
    /// The error that killed the context; 0 for none.
    error: AtomicU32,
    destroyed: AtomicBool,
    /// Locked while work is submitted, so that all streams have the same order of submission.
    pub order: Mutex<()>,
    null: OnceLock<Arc<Stream>>,
    streams: Mutex<Vec<Arc<Stream>>>,
    of_threads: Mutex<HashMap<ThreadId, Arc<Stream>>>,
    /// Points that every stream created later must wait for (`cuCtxWaitEvent`).
    pub gate: Mutex<Vec<Point>>,
    limits: Mutex<HashMap<u32, usize>>,
    /// The number of growth steps so far (`CUDA_SIM_CONTEXT_GROWTH`).
    grown: Mutex<u64>,
}

/// The kind of a context.
#[derive(Debug)]
enum Kind {
    Plain,
    Primary,
    /// A part of the primary context that shares its memory and lifetime, but has separate streams.
    Green(Arc<Context>),
}

static CONTEXTS: Registry<Context> = Registry::new();
/// The handles of destroyed contexts. A later context may have the same handle.
static DESTROYED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

#[derive(Debug)]
struct Primary {
    context: Option<Arc<Context>>,
    references: u32,
    flags: u32,
}

static PRIMARIES: [Mutex<Primary>; MAX_GPUS] =
    [const { Mutex::new(Primary { context: None, references: 0, flags: 0 }) }; MAX_GPUS];

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Context {
    fn new(gpu: usize, flags: u32, version: u32, kind: Kind) -> Result<Arc<Context>, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let green = matches!(kind, Kind::Green(_));
        if !green {
            take(gpu)?;
        }
        let context = Arc::new(Context {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            gpu,
            flags: AtomicU32::new(flags),
            version,
            kind,
            error: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            order: Mutex::new(()),
            null: OnceLock::new(),
            streams: Mutex::default(),
            of_threads: Mutex::default(),
            gate: Mutex::default(),
            limits: Mutex::default(),
            grown: Mutex::default(),
        });
        CONTEXTS.add(context.clone());
        Ok(context)
    }

    /// Creates a green context of a GPU. The primary context must outlive the green context.
    pub fn green(primary: Arc<Context>) -> Result<Arc<Context>, Error> {
        Context::new(primary.gpu, 0, primary.version, Kind::Green(primary))
    }

    pub fn handle(self: &Arc<Self>) -> usize {
        handle_of(self)
    }

    /// Returns the context itself, or the primary context of a green context.
    fn root(self: &Arc<Self>) -> &Arc<Context> {
        if let Kind::Green(primary) = &self.kind { primary } else { self }
    }

    /// Whether two contexts share memory and handles.
    pub fn same(self: &Arc<Self>, other: &Arc<Context>) -> bool {
        Arc::ptr_eq(self.root(), other.root())
    }

    /// Returns this context. For a primary context, also returns its green contexts, because calls
    /// for the primary context apply to them too.
    pub fn family(self: &Arc<Self>) -> Vec<Arc<Context>> {
        let green = |c: &Arc<Context>| matches!(&c.kind, Kind::Green(primary) if Arc::ptr_eq(primary, self));
        let mut family = vec![self.clone()];
        if matches!(self.kind, Kind::Primary) {
            family.extend(CONTEXTS.all().into_iter().filter(green));
        }
        family
    }

    /// Returns the error that killed this context.
    pub fn error(&self) -> Done {
        if let Kind::Green(primary) = &self.kind {
            primary.error()?;
        }
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }

    /// Kills the context. From now on, submitted work is skipped, and calls return this error.
    pub fn fail(&self, error: Error) {
        if let Kind::Green(primary) = &self.kind
            && error != Error::CONTEXT_IS_DESTROYED
        {
            return primary.fail(error);
        }
        let _ = self.error.compare_exchange(0, error.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns the legacy default stream. Creates it if necessary.
    pub fn null(self: &Arc<Self>) -> Arc<Stream> {
        self.null.get_or_init(|| Stream::null(self.clone())).clone()
    }

    /// Returns the legacy default stream if the program has used it.
    pub fn null_if_used(&self) -> Option<&Arc<Stream>> {
        self.null.get()
    }

    /// Returns the calling thread's own default stream.
    pub fn of_thread(self: &Arc<Self>) -> Arc<Stream> {
        let mut of_threads = lock(&self.of_threads);
        let stream = of_threads.entry(thread::current().id()).or_insert_with(|| {
            let stream = Stream::of_thread(self.clone());
            self.join(&stream);
            stream
        });
        stream.clone()
    }

    /// Adds a stream to this context.
    pub fn join(&self, stream: &Arc<Stream>) {
        let mut streams = lock(&self.streams);
        streams.retain(|s| !s.over());
        streams.push(stream.clone());
    }

    /// Returns all streams except the legacy default stream.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        lock(&self.streams).clone()
    }

    /// Returns the current point of each stream with pending work, including streams of green
    /// contexts. All submitted work is done when all points are reached.
    pub fn points(self: &Arc<Self>) -> Vec<Point> {
        let points = |context: &Arc<Context>| -> Vec<Point> {
            let streams = context.streams();
            context.null.get().into_iter().chain(&streams).filter(|s| s.pending()).map(|s| s.point()).collect()
        };
        self.family().iter().flat_map(points).collect()
    }

    /// Waits for all work, even if it fails.
    pub fn wait(self: &Arc<Self>) {
        for point in self.points() {
            point.wait();
        }
    }

    /// Waits for all work, and returns the error that has killed the context.
    pub fn synchronise(self: &Arc<Self>) -> Done {
        self.wait();
        self.error()
    }

    /// Waits for the context's work, destroys the context and frees its memory.
    pub fn destroy(self: &Arc<Self>) {
        self.wait();
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        lock(&DESTROYED).insert(self.handle());
        self.fail(Error::CONTEXT_IS_DESTROYED);
        self.wait();
        crate::capture::forget(self);
        let streams = std::mem::take(&mut *lock(&self.streams));
        lock(&self.of_threads).clear();
        crate::stream::forget(&streams);
        if let Some(null) = self.null.get() {
            null.close();
        }
        memory::space_mut().forget_context(self.handle());
        crate::alloc::forget_context(self.handle());
        module::forget_context(self);
        let _ = CONTEXTS.remove(self.handle());
        if !matches!(self.kind, Kind::Green(_)) {
            let grown = (0..*lock(&self.grown)).map(growth).sum::<u64>();
            Account::get().give(self.gpu, Config::get().context + grown);
        }
    }

    /// Grows the context after a module load or a launch, because newly loaded code takes memory.
    pub fn grow(self: &Arc<Self>) -> Done {
        let mut grown = lock(&self.root().grown);
        let bytes = growth(*grown);
        if bytes == 0 {
            return Ok(());
        }
        if !Account::get().take(self.gpu, bytes) {
            return Err(Error::OUT_OF_MEMORY);
        }
        *grown += 1;
        Ok(())
    }
}

/// Returns the number of bytes of a growth step. Steps are counted from 0.
fn growth(step: u64) -> u64 {
    let Config { context_growth: bytes, context_growth_steps: steps, .. } = *Config::get();
    if step >= steps { 0 } else { bytes * (step + 1) / steps - bytes * step / steps }
}

/// The number of steps in which a new context's bytes are allocated.
const STEPS: u32 = 8;
/// Each step except the last allocates the context's bytes divided by this number. The last step
/// allocates the rest, because on a GPU most bytes are allocated late.
const STEP_PART: u64 = 32;

/// Allocates a context's memory, completely or not at all.
fn take(gpu: usize) -> Done {
    let Config { context: bytes, context_time: time, .. } = *Config::get();
    let mut taken = 0;
    if !time.is_zero() {
        for _ in 1..STEPS {
            let step = bytes / STEP_PART;
            if !Account::get().take(gpu, step) {
                Account::get().give(gpu, taken);
                return Err(Error::OUT_OF_MEMORY);
            }
            taken += step;
            thread::sleep(time / STEPS);
        }
        thread::sleep(time / STEPS);
    }
    if !Account::get().take(gpu, bytes - taken) {
        Account::get().give(gpu, taken);
        return Err(Error::OUT_OF_MEMORY);
    }
    Ok(())
}

/// Whether some submitted work is not done.
pub fn any_pending() -> bool {
    CONTEXTS.all().iter().any(|context| !context.points().is_empty())
}

/// Returns the context behind a handle.
pub fn of(handle: usize) -> Result<Arc<Context>, Error> {
    CONTEXTS.find(handle).ok_or(Error::INVALID_CONTEXT)
}

/// Returns the calling thread's current context.
pub fn current() -> Result<Arc<Context>, Error> {
    let context = STACK.with(|stack| stack.borrow().last().cloned()).ok_or(Error::INVALID_CONTEXT)?;
    if context.destroyed.load(Ordering::Acquire) { Err(Error::CONTEXT_IS_DESTROYED) } else { Ok(context) }
}

/// Returns the calling thread's current context, unless an error has killed it.
pub fn healthy() -> Result<Arc<Context>, Error> {
    let context = current()?;
    context.error()?;
    Ok(context)
}

fn push_current(context: Arc<Context>) {
    STACK.with(|stack| stack.borrow_mut().push(context));
}

fn pop_current() -> Option<Arc<Context>> {
    STACK.with(|stack| stack.borrow_mut().pop())
}

/// `cuCtxCreate`, `_v2`
pub fn create(context: *mut usize, flags: u32, device: i32) -> Done {
    if context.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    let new = Context::new(device::gpu(device)?, flags, 3020, Kind::Plain)?;
    push_current(new.clone());
    out(context, new.handle())
}

/// `cuCtxCreate_v3`
pub fn create_v3(context: *mut usize, _affinity: *mut u8, affinities: i32, flags: u32, device: i32) -> Done {
    if affinities != 0 { Err(Error::NOT_SUPPORTED) } else { create(context, flags, device) }
}

/// `cuCtxCreate_v4`
pub fn create_v4(context: *mut usize, _params: *mut u8, flags: u32, device: i32) -> Done {
    create(context, flags, device)
}

/// `cuCtxDestroy`
pub fn destroy(context: usize) -> Done {
    let context = of(context)?;
    if !matches!(context.kind, Kind::Plain) {
        return Err(Error::INVALID_CONTEXT);
    }
    STACK.with(|stack| {
        let mut stack = stack.borrow_mut();
        if stack.last().is_some_and(|top| Arc::ptr_eq(top, &context)) {
            stack.pop();
        }
    });
    context.destroy();
    Ok(())
}

/// `cuCtxAttach`, `cuCtxDetach`
pub fn attach(context: *mut usize, _flags: u32) -> Done {
    out(context, current()?.handle())
}

/// `cuCtxPushCurrent`. With the driver, pushing a destroyed context succeeds and corrupts the driver's
/// memory. So the simulator ends the process.
pub fn push(context: usize) -> Done {
    let known = of(context);
    if known.is_err() && lock(&DESTROYED).contains(&context) {
        eprintln!("cuda-sim: cuCtxPushCurrent of a context that was destroyed");
        std::process::abort();
    }
    push_current(known?);
    Ok(())
}

/// `cuCtxPopCurrent`
pub fn pop(context: *mut usize) -> Done {
    let popped = pop_current().ok_or(Error::INVALID_CONTEXT)?;
    if !context.is_null() {
        out(context, popped.handle())?;
    }
    Ok(())
}

/// `cuCtxSetCurrent`
pub fn set(context: usize) -> Done {
    let new = if context == 0 { None } else { Some(of(context)?) };
    pop_current();
    new.into_iter().for_each(push_current);
    Ok(())
}

/// `cuCtxGetCurrent`
pub fn get(context: *mut usize) -> Done {
    let top = STACK.with(|stack| stack.borrow().last().map_or(0, |c| c.handle()));
    out(context, top)
}

/// `cuCtxGetDevice`
pub fn get_device(device: *mut i32) -> Done {
    out(device, device::ordinal(current()?.gpu))
}

/// `cuCtxGetDevice_v2`
pub fn get_device_v2(device: *mut i32, context: usize) -> Done {
    let context = if context == 0 { current()? } else { of(context)? };
    out(device, device::ordinal(context.gpu))
}

/// `cuCtxGetFlags`
pub fn get_flags(flags: *mut u32) -> Done {
    out(flags, current()?.flags.load(Ordering::Relaxed))
}

/// `cuCtxSetFlags`
pub fn set_flags(flags: u32) -> Done {
    current()?.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

/// `cuCtxGetId`
pub fn get_id(context: usize, id: *mut u64) -> Done {
    let context = if context == 0 { current()? } else { of(context)? };
    out(id, context.id)
}

/// `cuCtxGetApiVersion`
pub fn api_version(context: usize, version: *mut u32) -> Done {
    let context = if context == 0 { current()? } else { of(context)? };
    out(version, context.version)
}

/// `cuCtxSynchronize`
pub fn synchronise() -> Done {
    let context = healthy()?;
    crate::capture::forbid_in(&context)?;
    context.synchronise()
}

/// `cuCtxSynchronize_v2`
pub fn synchronise_v2(context: usize) -> Done {
    let context = if context == 0 { current()? } else { of(context)? };
    context.error()?;
    crate::capture::forbid_in(&context)?;
    context.synchronise()
}

/// `cuCtxGetLimit`
pub fn get_limit(value: *mut usize, limit: u32) -> Done {
    let default = match limit {
        0 => 1024,
        1 => 1 << 20,
        2 => 8 << 20,
        3 => 2,
        4 => 2048,
        5 => 64,
        6 => 0,
        _ => return Err(Error::UNSUPPORTED_LIMIT),
    };
    let context = current()?;
    let set = lock(&context.limits).get(&limit).copied();
    out(value, set.unwrap_or(default))
}

/// `cuCtxSetLimit`
pub fn set_limit(limit: u32, value: usize) -> Done {
    if limit > 6 {
        return Err(Error::UNSUPPORTED_LIMIT);
    }
    lock(&current()?.limits).insert(limit, value);
    Ok(())
}

/// `cuCtxGetCacheConfig`, `cuCtxGetSharedMemConfig`
pub fn get_config(config: *mut u32) -> Done {
    current()?;
    out(config, 0)
}

/// `cuCtxSetCacheConfig`, `cuCtxSetSharedMemConfig`
pub fn set_config(_config: u32) -> Done {
    current().map(drop)
}

/// `cuCtxResetPersistingL2Cache`
pub fn reset_l2() -> Done {
    current().map(drop)
}

/// `cuCtxGetStreamPriorityRange`
pub fn priority_range(least: *mut i32, greatest: *mut i32) -> Done {
    current()?;
    crate::out_if(least, 0);
    crate::out_if(greatest, crate::stream::GREATEST_PRIORITY);
    Ok(())
}
