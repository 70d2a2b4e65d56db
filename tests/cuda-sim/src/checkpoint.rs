//! Checkpoints. Another process can lock this process, so that this process's calls block. The
//! other process can then checkpoint this process, and restore it on the same GPUs or on others.
//!
//! [`serve`] starts the thread that serves requests of other processes. The `cuCheckpointProcess…`
//! calls send requests to other processes. Device memory is simulated in host memory, so a
//! checkpoint moves no bytes, and only changes the accounts.

use crate::{
    arg, context, device,
    error::{Done, Error},
    memory, out, stream,
};
use cuda_sim_gpus::{
    Account, Config, MAX_GPUS,
    checkpoint::{Destinations, Operation, Own, State, Target, same_places},
    device_file,
};
use std::{
    sync::{
        Condvar, Mutex, Once,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Interval between checks whether all calls have returned and all work is done.
const LOOK: Duration = Duration::from_micros(200);

/// The number of calls that have passed [`pass`] and have not returned.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static CLOSED: AtomicBool = AtomicBool::new(false);
/// Whether the process has failed permanently. Waiting threads read this flag.
static FAILED: Mutex<bool> = Mutex::new(false);
static OPENED: Condvar = Condvar::new();

/// A running call. A lock waits until no such value exists.
#[derive(Debug)]
pub struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Calls that the driver also answers in a locked process [H100, driver 580.159: `bench/RESULTS.md`].
const QUERIES: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxGetState",
    "cuDeviceTotalMem_v2",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuMemGetAddressRange_v2",
    "cuMemGetInfo_v2",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostGetFlags",
    "cuPointerGetAttribute",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuThreadExchangeStreamCaptureMode",
];

/// Blocks a call while the process is locked. Admits queries immediately.
pub fn pass(symbol: &str) -> Result<Inside, Error> {
    loop {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let inside = Inside;
        if !CLOSED.load(Ordering::SeqCst) {
            return Ok(inside);
        }
        if QUERIES.contains(&symbol) {
            let failed = *FAILED.lock().unwrap_or_else(|e| e.into_inner());
            return if failed { Err(Error::OPERATING_SYSTEM) } else { Ok(inside) };
        }
        drop(inside);
        let mut failed = FAILED.lock().unwrap_or_else(|e| e.into_inner());
        while CLOSED.load(Ordering::SeqCst) {
            if *failed {
                return Err(Error::OPERATING_SYSTEM);
            }
            failed = OPENED.wait(failed).unwrap_or_else(|e| e.into_inner());
        }
    }
}

fn open(failed: bool) {
    let mut has_failed = FAILED.lock().unwrap_or_else(|e| e.into_inner());
    *has_failed = failed;
    CLOSED.store(failed, Ordering::SeqCst);
    OPENED.notify_all();
}

/// Starts the thread that serves requests of other processes.
pub fn serve() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // From now on, other processes find this process, and their requests wait for the thread. This
        // function does not wait for the thread: a library's constructor may be running, and the thread may
        // need the loader's lock. A program without access to the simulator's directory cannot be found, and
        // can only make calls that need no memory.
        if Account::find().is_none() {
            return;
        }
        let started = stream::spawn(|| {
            let own = Own::serve();
            let mut saved = [0; MAX_GPUS];
            loop {
                let done = answer(&own, own.next(), &mut saved);
                own.answer(done.map_or_else(|e| e.0, |()| 0));
            }
        });
        started.expect("cuda-sim: no thread for checkpoints");
    });
}

fn answer(own: &Own, operation: Operation, saved: &mut [u64; MAX_GPUS]) -> Done {
    let needed = match operation {
        Operation::Lock { .. } => State::Running,
        Operation::Checkpoint | Operation::Unlock => State::Locked,
        Operation::Restore { .. } => State::Checkpointed,
    };
    match own.state() {
        State::Failed => return Err(Error::OPERATING_SYSTEM),
        state if state != needed => return Err(Error::ILLEGAL_STATE),
        _ => {}
    }
    match operation {
        Operation::Lock { timeout } => {
            let end = timeout.map(|timeout| Instant::now() + timeout);
            CLOSED.store(true, Ordering::SeqCst);
            while INSIDE.load(Ordering::SeqCst) > 0 || context::any_pending() {
                if end.is_some_and(|end| Instant::now() >= end) {
                    open(false);
                    return Err(Error::NOT_READY);
                }
                thread::sleep(LOOK);
            }
            own.set_state(State::Locked);
        }
        Operation::Checkpoint => {
            if Account::get().shares() || memory::space().has_managed() {
                return Err(Error::NOT_SUPPORTED);
            }
            *saved = own.leave();
            device_file::close();
            own.set_state(State::Checkpointed);
        }
        Operation::Restore { to } => {
            let to = destinations(&to)?;
            if own.come_back(saved, &to).is_err() {
                own.set_state(State::Failed);
                open(true);
                return Err(Error::OUT_OF_MEMORY);
            }
            device::open_files();
            own.set_state(State::Locked);
        }
        Operation::Unlock => {
            own.set_state(State::Running);
            open(false);
        }
    }
    Ok(())
}

/// Returns the new GPU for each GPU of the machine. The pairs must name every GPU, including
/// invisible ones, and the destinations must be distinct [two H100, driver 580.159].
fn destinations(pairs: &Destinations) -> Result<[usize; MAX_GPUS], Error> {
    let mut to = [MAX_GPUS; MAX_GPUS];
    let mut taken = [false; MAX_GPUS];
    for (from, pair) in pairs.iter().enumerate() {
        let Some(gpu) = pair.map(usize::from) else {
            if from < Config::get().gpus { return Err(Error::INVALID_VALUE) } else { continue }
        };
        if std::mem::replace(&mut taken[gpu], true) {
            return Err(Error::INVALID_VALUE);
        }
        to[from] = gpu;
    }
    // Numbers beyond the machine's GPUs are mapped to the remaining numbers, so that the result is
    // a permutation.
    let mut left = (0..MAX_GPUS).filter(|gpu| !taken[*gpu]);
    for gpu in to.iter_mut().filter(|gpu| **gpu == MAX_GPUS) {
        *gpu = left.next().ok_or(Error::INVALID_VALUE)?;
    }
    Ok(to)
}

/// `CUcheckpointLockArgs`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LockArgs {
    timeout_ms: u32,
    reserved0: u32,
    reserved1: [u64; 7],
}

/// `CUcheckpointCheckpointArgs`, `CUcheckpointUnlockArgs`
pub type NoArgs = [u64; 8];

/// `CUcheckpointGpuPair`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pair {
    old: [u8; 16],
    new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RestoreArgs {
    pairs: *const Pair,
    count: u32,
    reserved: [u8; 44],
    reserved1: u64,
}

fn target(pid: i32) -> Result<Target, Error> {
    Target::open(pid).map_err(|_| Error::INVALID_VALUE)
}

fn ask(pid: i32, operation: Operation) -> Done {
    match target(pid)?.ask(operation) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Error(code)),
        Err(_) => Err(Error::INVALID_VALUE),
    }
}

/// Reads optional arguments, and checks them with `is_valid`.
fn optional<T: Copy>(args: *const T, is_valid: impl Fn(&T) -> bool) -> Result<Option<T>, Error> {
    if args.is_null() {
        return Ok(None);
    }
    Some(arg(args)?).filter(is_valid).map(Some).ok_or(Error::INVALID_VALUE)
}

/// `cuCheckpointProcessGetRestoreThreadId`
pub fn thread_id(pid: i32, thread: *mut i32) -> Done {
    out(thread, target(pid)?.thread().map_err(|_| Error::INVALID_VALUE)?)
}

/// `cuCheckpointProcessGetState`
pub fn state(pid: i32, state: *mut u32) -> Done {
    out(state, target(pid)?.state() as u32)
}

/// `cuCheckpointProcessLock`
pub fn lock(pid: i32, args: *const LockArgs) -> Done {
    let args = optional(args, |args| args.reserved0 == 0 && args.reserved1 == [0; 7])?;
    let timeout = args.map(|args| args.timeout_ms).filter(|ms| *ms > 0);
    ask(pid, Operation::Lock { timeout: timeout.map(|ms| Duration::from_millis(ms.into())) })
}

/// `cuCheckpointProcessCheckpoint`
pub fn checkpoint(pid: i32, args: *const NoArgs) -> Done {
    optional(args, |args| *args == [0; 8])?;
    ask(pid, Operation::Checkpoint)
}

/// `cuCheckpointProcessRestore`: the caller must have initialised the driver.
pub fn restore(pid: i32, args: *const RestoreArgs) -> Done {
    if !device::initialised() {
        return Err(Error::NOT_INITIALIZED);
    }
    let args = optional(args, |args| args.reserved == [0; 44] && args.reserved1 == 0)?;
    let Some(args) = args.filter(|args| args.count > 0) else {
        return ask(pid, Operation::Restore { to: same_places() });
    };
    if args.pairs.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    let config = Config::get();
    let gpu = |uuid| (0..config.gpus).find(|gpu| config.uuid(*gpu) == uuid).ok_or(Error::INVALID_VALUE);
    // GPUs of another host are taken in the order of the list.
    let mut foreign = 0..config.gpus;
    let mut to = [None; MAX_GPUS];
    for index in 0..args.count as usize {
        // SAFETY: by the API's contract, the list has `args.count` pairs.
        let pair = unsafe { args.pairs.add(index).read_unaligned() };
        let old = gpu(pair.old).ok().or_else(|| foreign.next()).ok_or(Error::INVALID_VALUE)?;
        if to[old].replace(gpu(pair.new)? as u8).is_some() {
            return Err(Error::INVALID_VALUE);
        }
    }
    ask(pid, Operation::Restore { to })
}

/// `cuCheckpointProcessUnlock`
pub fn unlock(pid: i32, args: *const NoArgs) -> Done {
    optional(args, |args| *args == [0; 8])?;
    ask(pid, Operation::Unlock)
}
