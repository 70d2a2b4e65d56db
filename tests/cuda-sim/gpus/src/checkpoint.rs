//! Checkpoints and restores a process at the request of another process. The requester writes the
//! request into the process's account, and a thread of the process carries it out and answers. So a
//! stopped process does not respond, and a request is completed even if the requester has ended.

use crate::{
    Account, Config, Engine, EngineKind, MAX_GPUS,
    account::{self, Process},
    lock::{flock, open_shared},
    place::{self, place},
};
use std::{
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::Path,
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

/// The number of an account's words for checkpoints.
pub(crate) const WORDS: usize = PAIRS + MAX_GPUS;
const STATE: usize = 0;
/// The number of the last request, and the number of the last answered request.
const ASKED: usize = 1;
const ANSWERED: usize = 2;
const OPERATION: usize = 3;
/// Timeout of a lock in milliseconds. 0 means no timeout.
const TIMEOUT: usize = 4;
/// The code of the last answer.
const RESULT: usize = 5;
/// The ID of the thread that serves requests, in the process's own PID namespace. The ID is 0
/// before the thread exists.
const THREAD: usize = 6;
/// The new GPU for each GPU of the machine.
const PAIRS: usize = 7;

/// Interval between checks that the other process is alive.
const LOOK: Duration = Duration::from_millis(50);

/// `CUprocessState`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    Running = 0,
    Locked = 1,
    Checkpointed = 2,
    Failed = 3,
}

impl State {
    fn of(word: &AtomicU64) -> State {
        match word.load(Ordering::Acquire) {
            0 => State::Running,
            1 => State::Locked,
            2 => State::Checkpointed,
            _ => State::Failed,
        }
    }
}

/// Whether a process was checkpointed when it last wrote these words of its account.
pub(crate) fn is_checkpointed(account: &[u8]) -> bool {
    let (words, _) = account.as_chunks::<8>();
    let state = words.get(account::CHECKPOINT + STATE).map(|word| u64::from_ne_bytes(*word));
    state == Some(State::Checkpointed as u64)
}

/// A request to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Blocks new calls of the program, and waits until running calls have returned and submitted
    /// work is done.
    Lock {
        timeout: Option<Duration>,
    },
    Checkpoint,
    /// The new GPU for each GPU of the machine.
    Restore {
        to: Destinations,
    },
    Unlock,
}

/// The new GPU for each GPU of the machine, or `None` if the request names no new GPU.
pub type Destinations = [Option<u8>; MAX_GPUS];

/// Destinations that restore each GPU's memory on the same GPU.
pub fn same_places() -> Destinations {
    std::array::from_fn(|gpu| Some(gpu as u8))
}

/// The value that stands for no GPU.
const NONE: u64 = u64::MAX;

/// A process that receives requests. While this value exists, no other process can send requests to
/// that process.
#[derive(Debug)]
pub struct Target {
    words: *mut [AtomicU64; account::WORDS],
    account: File,
    _asking: File,
}

/// The error for a process that cannot receive requests, or that has ended before its answer.
#[derive(Debug)]
pub struct Gone;

impl Drop for Target {
    fn drop(&mut self) {
        // SAFETY: `open` has mapped the words, and no reference to them is left.
        unsafe { libc::munmap(self.words.cast(), account::WORDS * 8) };
    }
}

impl Target {
    /// Opens the process with that pid or thread ID in the caller's PID namespace. Waits while
    /// another process has a pending request for the opened process.
    ///
    /// # Errors
    /// The process does not exist, does not use CUDA, or may not be traced by the caller.
    pub fn open(pid: i32) -> Result<Target, Gone> {
        let process = find(pid).ok_or(Gone)?;
        // Like the driver, requires permission to trace the process and to open its files [H100,
        // driver 580.159].
        File::open(format!("/proc/{pid}/environ")).map_err(|_| Gone)?;
        let name = process.path().file_name().ok_or(Gone)?.to_owned();
        let asking = open_shared(&Config::get().dir.join("asking").join(name)).map_err(|_| Gone)?;
        while !flock(&asking, libc::LOCK_EX) {}
        let (account, words) = map(process.path()).map_err(|_| Gone)?;
        Ok(Target { words, account, _asking: asking })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the words are mapped while `self` lives.
        unsafe { &(*self.words)[account::CHECKPOINT + at] }
    }

    pub fn state(&self) -> State {
        State::of(self.word(STATE))
    }

    /// Returns the ID of the thread that serves requests. Waits until the thread exists.
    ///
    /// # Errors
    /// The process has ended.
    pub fn thread(&self) -> Result<i32, Gone> {
        loop {
            match self.word(THREAD).load(Ordering::Acquire) {
                0 if flock(&self.account, libc::LOCK_EX | libc::LOCK_NB) => return Err(Gone),
                0 => wait(self.word(THREAD), 0, LOOK),
                thread => return Ok(thread as i32),
            }
        }
    }

    /// Sends a request, and waits for the result code.
    pub fn ask(&self, operation: Operation) -> Result<u32, Gone> {
        self.finished()?; // waits for a request whose requester has been killed
        let number = match operation {
            Operation::Lock { timeout } => {
                let timeout = timeout.map_or(0, |timeout| (timeout.as_millis() as u64).max(1));
                self.word(TIMEOUT).store(timeout, Ordering::Relaxed);
                0
            }
            Operation::Checkpoint => 1,
            Operation::Restore { to } => {
                for (gpu, pair) in (0..MAX_GPUS).zip(to) {
                    self.word(PAIRS + gpu).store(pair.map_or(NONE, u64::from), Ordering::Relaxed);
                }
                2
            }
            Operation::Unlock => 3,
        };
        self.word(OPERATION).store(number, Ordering::Relaxed);
        let asked = self.word(ASKED);
        asked.store(asked.load(Ordering::Relaxed) + 1, Ordering::Release);
        wake(asked);
        self.finished()?;
        Ok(self.word(RESULT).load(Ordering::Relaxed) as u32)
    }

    fn finished(&self) -> Result<(), Gone> {
        loop {
            let answered = self.word(ANSWERED).load(Ordering::Acquire);
            if answered == self.word(ASKED).load(Ordering::Acquire) {
                return Ok(());
            }
            if flock(&self.account, libc::LOCK_EX | libc::LOCK_NB) {
                return Err(Gone);
            }
            wait(self.word(ANSWERED), answered, LOOK);
        }
    }
}

/// Finds the process with this pid, or with a thread of this ID.
fn find(pid: i32) -> Option<Process> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let leader = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()?;
    account::processes().into_iter().find(|process| process.pid_here() == leader)
}

fn map(path: &Path) -> io::Result<(File, *mut [AtomicU64; account::WORDS])> {
    let file = File::options().read(true).write(true).open(path)?;
    let (len, prot) = (account::WORDS * 8, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: this is a new mapping at an address of the kernel's choice. Its file is long enough
    // and never shrinks.
    let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok((file, at.cast())) }
}

/// The side that serves requests.
#[derive(Debug)]
pub struct Own(&'static [AtomicU64]);

/// The GPUs have no room for the restore.
#[derive(Debug)]
pub struct NoRoom;

impl Own {
    /// Registers the calling thread as the thread that serves requests.
    pub fn serve() -> Own {
        let own = Own(&Account::get().words()[account::CHECKPOINT..account::CHECKPOINT + WORDS]);
        // SAFETY: `gettid` has no preconditions.
        own.0[THREAD].store(unsafe { libc::gettid() } as u64, Ordering::Release);
        own
    }

    /// Waits for the next request.
    pub fn next(&self) -> Operation {
        let answered = self.0[ANSWERED].load(Ordering::Relaxed);
        while self.0[ASKED].load(Ordering::Acquire) == answered {
            wait(&self.0[ASKED], answered, Duration::MAX);
        }
        match self.0[OPERATION].load(Ordering::Relaxed) {
            0 => {
                let timeout = self.0[TIMEOUT].load(Ordering::Relaxed);
                Operation::Lock { timeout: (timeout > 0).then(|| Duration::from_millis(timeout)) }
            }
            1 => Operation::Checkpoint,
            2 => {
                let pair = |gpu: usize| self.0[PAIRS + gpu].load(Ordering::Relaxed);
                let to = |gpu| Some(pair(gpu)).filter(|to| *to != NONE).map(|to| to as u8);
                Operation::Restore { to: std::array::from_fn(to) }
            }
            _ => Operation::Unlock,
        }
    }

    pub fn answer(&self, code: u32) {
        self.0[RESULT].store(code.into(), Ordering::Relaxed);
        self.0[ANSWERED].store(self.0[ASKED].load(Ordering::Relaxed), Ordering::Release);
        wake(&self.0[ANSWERED]);
    }

    pub fn state(&self) -> State {
        State::of(&self.0[STATE])
    }

    pub fn set_state(&self, state: State) {
        self.0[STATE].store(state as u64, Ordering::Release);
    }

    /// Releases all bytes of this process, and takes the time of copying them. Returns the bytes of
    /// each GPU.
    pub fn leave(&self) -> [u64; MAX_GPUS] {
        let bytes = Account::get().plain();
        for (gpu, bytes) in bytes.into_iter().enumerate() {
            take_time(gpu, EngineKind::Out, bytes);
        }
        Account::get().give_all();
        bytes
    }

    /// Allocates these bytes on the GPUs `to`, and takes the time of copying them.
    ///
    /// # Errors
    /// A GPU has no room. Then no memory is allocated.
    pub fn come_back(&self, bytes: &[u64; MAX_GPUS], to: &[usize; MAX_GPUS]) -> Result<(), NoRoom> {
        let (from, after) = (place::all(), place::moved(to));
        place::set(&after);
        let back = |gpu: usize| (place(gpu), bytes[from[gpu]]);
        for gpu in 0..MAX_GPUS {
            if !Account::get().take(gpu, back(gpu).1) {
                (0..gpu).for_each(|gpu| Account::get().give(gpu, back(gpu).1));
                place::set(&from);
                return Err(NoRoom);
            }
        }
        for (at, bytes) in (0..MAX_GPUS).map(back) {
            take_time(at, EngineKind::In, bytes);
        }
        Ok(())
    }
}

/// Sleeps for the time of a copy. The driver copies to and from pageable memory.
fn take_time(place: usize, engine: EngineKind, bytes: u64) {
    if bytes > 0 {
        let cost = u128::from(bytes) * 1_000_000_000 / u128::from(Config::get().pageable_bandwidth);
        Engine::at(place, engine).run(Duration::from_nanos(cost as u64), || {});
    }
}

/// Returns the half of a word that the kernel compares.
fn futex(word: &AtomicU64) -> *const AtomicU32 {
    let half = if cfg!(target_endian = "big") { 1 } else { 0 };
    ptr::from_ref(word).cast::<AtomicU32>().wrapping_add(half)
}

/// Waits until the word differs from `value`, for at most `at_most`.
fn wait(word: &AtomicU64, value: u64, at_most: Duration) {
    let timeout = libc::timespec {
        tv_sec: at_most.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: at_most.subsec_nanos().into(),
    };
    let timeout = if at_most == Duration::MAX { ptr::null() } else { &raw const timeout };
    // SAFETY: the futex is in a mapped file, and the timeout outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, futex(word), libc::FUTEX_WAIT, value as u32, timeout) };
}

fn wake(word: &AtomicU64) {
    // SAFETY: the futex is in a mapped file.
    unsafe { libc::syscall(libc::SYS_futex, futex(word), libc::FUTEX_WAKE, i32::MAX) };
}
