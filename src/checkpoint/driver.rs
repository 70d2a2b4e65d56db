//! The driver's calls that act on other processes, as the header of CUDA 13.0 declares them.

use libloading::Library;
use nvshare_checkpoint::Uuid;
use std::ptr;

/// `CUresult`
pub type Code = u32;
pub const SUCCESS: Code = 0;
pub const ILLEGAL_STATE: Code = 401;

/// `CUprocessState`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    Running,
    Locked,
    Checkpointed,
    Failed,
}

/// `CUcheckpointLockArgs`
#[repr(C)]
struct LockArgs {
    timeout_ms: u32,
    reserved0: u32,
    reserved1: [u64; 7],
}

/// `CUcheckpointGpuPair`
#[repr(C)]
struct Pair {
    old: Uuid,
    new: Uuid,
}

/// `CUcheckpointRestoreArgs`
#[repr(C)]
struct RestoreArgs {
    pairs: *const Pair,
    count: u32,
    reserved: [u8; 52 - size_of::<*const Pair>()],
    reserved1: u64,
}

type Call<T> = unsafe extern "C" fn(i32, T) -> Code;

/// The initialized driver. A restore requires `cuInit`.
pub struct Driver {
    state: Call<*mut u32>,
    lock: Call<*const LockArgs>,
    checkpoint: Call<*const u8>,
    restore: Call<*const RestoreArgs>,
    unlock: Call<*const u8>,
}

impl Driver {
    /// Loads and initializes the driver.
    ///
    /// # Errors
    /// Returns the driver's error, or 0 if the driver is missing or lacks these calls.
    pub fn load() -> Result<Self, Code> {
        // SAFETY: the initializers of the driver's library have no preconditions, so any program
        // may load it.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(|_| SUCCESS)?;
        // The library is never unloaded, so its functions stay valid.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the type is the declaration of `cuInit` in CUDA's header.
        let init = unsafe { library.get::<unsafe extern "C" fn(u32) -> Code>(b"cuInit\0") }.map_err(|_| SUCCESS)?;
        // SAFETY: each field's type is the function's declaration in CUDA's header.
        let driver = unsafe {
            Self {
                state: *library.get(b"cuCheckpointProcessGetState\0").map_err(|_| SUCCESS)?,
                lock: *library.get(b"cuCheckpointProcessLock\0").map_err(|_| SUCCESS)?,
                checkpoint: *library.get(b"cuCheckpointProcessCheckpoint\0").map_err(|_| SUCCESS)?,
                restore: *library.get(b"cuCheckpointProcessRestore\0").map_err(|_| SUCCESS)?,
                unlock: *library.get(b"cuCheckpointProcessUnlock\0").map_err(|_| SUCCESS)?,
            }
        };
        // SAFETY: `cuInit` has no preconditions.
        check(unsafe { init(0) })?;
        Ok(driver)
    }

    pub fn state(&self, pid: i32) -> Result<ProcessState, Code> {
        let mut state = u32::MAX;
        // SAFETY: `state` is valid for writing the result.
        check(unsafe { (self.state)(pid, &raw mut state) })?;
        match state {
            0 => Ok(ProcessState::Running),
            1 => Ok(ProcessState::Locked),
            2 => Ok(ProcessState::Checkpointed),
            _ => Ok(ProcessState::Failed),
        }
    }

    pub fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), Code> {
        let args = LockArgs { timeout_ms, reserved0: 0, reserved1: [0; 7] };
        // SAFETY: `args` has the declared layout and outlives the call.
        check(unsafe { (self.lock)(pid, &raw const args) })
    }

    pub fn checkpoint(&self, pid: i32) -> Result<(), Code> {
        // SAFETY: the driver accepts null for the optional arguments.
        check(unsafe { (self.checkpoint)(pid, ptr::null()) })
    }

    pub fn restore(&self, pid: i32, pairs: &[(Uuid, Uuid)]) -> Result<(), Code> {
        let pairs: Vec<Pair> = pairs.iter().map(|(old, new)| Pair { old: *old, new: *new }).collect();
        let count = pairs.len() as u32;
        let args = RestoreArgs { pairs: pairs.as_ptr(), count, reserved: [0; 44], reserved1: 0 };
        let args = if pairs.is_empty() { ptr::null() } else { &raw const args };
        // SAFETY: `args` is null, or has the declared layout and outlives the call.
        check(unsafe { (self.restore)(pid, args) })
    }

    pub fn unlock(&self, pid: i32) -> Result<(), Code> {
        // SAFETY: the driver accepts null for the optional arguments.
        check(unsafe { (self.unlock)(pid, ptr::null()) })
    }
}

fn check(code: Code) -> Result<(), Code> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}
