//! The memory of each process on each GPU. Each process has a small file that contains its numbers
//! of bytes. The file counts while the process lives.

use crate::{
    Config, MAX_GPUS, checkpoint,
    fork::close_in_child,
    lock::{LockFile, flock, open_shared},
    place::place,
    shared::{self, Shared},
    trouble::{self, Stranger},
};
use std::{
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// The memory of one process on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that stay allocated until they are freed: contexts, allocations, physical chunks.
    pub plain: u64,
    /// Resident bytes of managed memory. Any process that needs the room may evict these bytes.
    pub managed: u64,
    /// Bytes of managed memory that was prefetched to the host. They stay in use until plain allocations
    /// or other managed memory need them.
    pub kept: u64,
}

/// One living process.
#[derive(Clone, Debug)]
pub struct Process {
    /// The pid in the process's own PID namespace.
    pub pid: u32,
    pub gpus: [Usage; MAX_GPUS],
    /// Chunks that the process shares with other processes.
    pub(crate) shared: Vec<Shared>,
    path: PathBuf,
}

/// The number of words in a process's file: its pid, `plain`, `managed` and `kept` for each GPU of the
/// machine, its shared chunks, and the words of [`checkpoint`].
pub(crate) const WORDS: usize = CHECKPOINT + checkpoint::WORDS;
const SHARED: usize = 1 + 3 * MAX_GPUS;
pub(crate) const CHECKPOINT: usize = SHARED + shared::WORDS;

fn plain_word(gpu: usize) -> usize {
    1 + 3 * gpu
}

fn managed_word(gpu: usize) -> usize {
    2 + 3 * gpu
}

fn kept_word(gpu: usize) -> usize {
    3 + 3 * gpu
}

static ACCOUNT: OnceLock<io::Result<Account>> = OnceLock::new();

/// This process's account. The account's functions take the process's own GPU numbers, which
/// [`place`] translates into the machine's numbers.
#[derive(Debug)]
pub struct Account {
    words: &'static [AtomicU64; WORDS],
    path: PathBuf,
    _lock: File,
    _pid: File,
}

impl Account {
    /// Returns the account of this process. The first call opens it.
    ///
    /// # Panics
    /// If the simulator's directory cannot be used: without the directory, a simulated machine has
    /// no memory.
    pub fn get() -> &'static Account {
        match ACCOUNT.get_or_init(Account::open) {
            Ok(account) => account,
            Err(e) => panic!("cuda-sim: cannot use CUDA_SIM_DIR {}: {e}", Config::get().dir.display()),
        }
    }

    /// Returns the account of this process, or `None` if the simulator's directory cannot be used.
    pub fn find() -> Option<&'static Account> {
        ACCOUNT.get_or_init(Account::open).as_ref().ok()
    }

    fn open() -> io::Result<Account> {
        let _all = Everybody::lock()?;
        let born = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let path = processes_dir().join(format!("{}-{born}", process::id()));
        let file = open_shared(&path)?;
        file.set_len(WORDS as u64 * 8)?;
        file.write_all_at(&u64::from(process::id()).to_ne_bytes(), 0)?;
        close_in_child(file.as_raw_fd());
        if !flock(&file, libc::LOCK_EX | libc::LOCK_NB) {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: this is a fresh shared mapping, which is never unmapped. Its file is long enough
        // and never shrinks.
        let words = unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                WORDS * 8,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            &*at.cast::<[AtomicU64; WORDS]>()
        };
        let pid = open_shared(&pid_file(&path))?;
        lock_as_process(&pid, libc::F_SETLK)?;
        Ok(Account { words, path, _lock: file, _pid: pid })
    }

    pub(crate) fn words(&self) -> &'static [AtomicU64; WORDS] {
        self.words
    }

    /// This process's bytes on each GPU of the machine, without managed memory.
    pub(crate) fn plain(&self) -> [u64; MAX_GPUS] {
        std::array::from_fn(|place| self.words[plain_word(place)].load(Ordering::Relaxed))
    }

    /// Releases all bytes except managed memory.
    pub(crate) fn give_all(&self) {
        (0..MAX_GPUS).for_each(|place| self.words[plain_word(place)].store(0, Ordering::Relaxed));
    }

    /// Whether this process shares memory with other processes.
    pub fn shares(&self) -> bool {
        let table: Vec<u64> = self.words[SHARED..CHECKPOINT].iter().map(|w| w.load(Ordering::Relaxed)).collect();
        !shared::read(&table).is_empty()
    }

    /// Allocates `bytes` on a GPU. If the GPU has no room, takes kept bytes and then evicts managed memory
    /// of any process.
    /// Returns false if the bytes still don't fit.
    #[must_use]
    pub fn take(&self, gpu: usize, bytes: u64) -> bool {
        let Ok(_all) = Everybody::lock() else { return false };
        let gpu = place(gpu);
        if !self.make_room(gpu, bytes) {
            return false;
        }
        self.words[plain_word(gpu)].fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Releases `bytes`.
    pub fn give(&self, gpu: usize, bytes: u64) {
        self.give_at(place(gpu), bytes);
    }

    fn give_at(&self, place: usize, bytes: u64) {
        let before = self.words[plain_word(place)].fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "gave back more than was taken");
    }

    /// Adds a shared chunk, which this process has allocated or imports. Returns false if the
    /// process shares too many chunks.
    #[must_use]
    pub fn share(&self, chunk: Shared) -> bool {
        let Ok(_all) = Everybody::lock() else { return false };
        shared::insert(&self.words[SHARED..CHECKPOINT], chunk)
    }

    /// Removes a shared chunk. If this process owned the chunk, the chunk's bytes then count for
    /// another process that has imported it.
    pub fn give_shared(&self, chunk: Shared) {
        let Ok(_all) = Everybody::lock() else { return };
        shared::remove(&self.words[SHARED..CHECKPOINT], chunk);
        if chunk.is_owner {
            self.give_at(chunk.gpu, chunk.bytes);
        }
    }

    /// Makes `bytes` of managed memory resident, and evicts other managed memory if necessary.
    /// Returns false if the bytes still don't fit.
    #[must_use]
    pub fn take_managed(&self, gpu: usize, bytes: u64) -> bool {
        let Ok(_all) = Everybody::lock() else { return false };
        let gpu = place(gpu);
        if !self.make_room(gpu, bytes) {
            return false;
        }
        self.words[managed_word(gpu)].fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Releases managed memory.
    pub fn give_managed(&self, gpu: usize, bytes: u64) {
        let Ok(_all) = Everybody::lock() else { return };
        self.lower(managed_word(place(gpu)), bytes);
    }

    /// Keeps the bytes of managed memory that this process has evicted.
    pub fn keep_managed(&self, gpu: usize, bytes: u64) {
        let Ok(_all) = Everybody::lock() else { return };
        let gpu = place(gpu);
        let kept = self.lower(managed_word(gpu), bytes);
        self.words[kept_word(gpu)].fetch_add(kept, Ordering::Relaxed);
    }

    /// Releases kept bytes, as far as they were not taken since.
    pub fn give_kept(&self, gpu: usize, bytes: u64) {
        let Ok(_all) = Everybody::lock() else { return };
        self.lower(kept_word(place(gpu)), bytes);
    }

    /// Subtracts up to `bytes` from a word. Returns the difference.
    fn lower(&self, word: usize, bytes: u64) -> u64 {
        let have = self.words[word].load(Ordering::Relaxed);
        self.words[word].store(have.saturating_sub(bytes), Ordering::Relaxed);
        have.min(bytes)
    }

    /// Resident bytes of managed memory. Other processes may have evicted some of this process's
    /// bytes.
    pub fn managed(&self, gpu: usize) -> u64 {
        self.managed_at(place(gpu))
    }

    fn managed_at(&self, place: usize) -> u64 {
        self.words[managed_word(place)].load(Ordering::Relaxed)
    }

    /// Takes kept bytes and evicts managed memory until `bytes` fit on that GPU of the machine. The caller
    /// holds the lock [`Everybody`].
    fn make_room(&self, gpu: usize, bytes: u64) -> bool {
        let mut others = living();
        let total = used_by_processes(gpu, &others);
        let kept = kept_by_processes(gpu, &others);
        others.retain(|p| p.path != self.path);
        let dir = &Config::get().dir;
        let strangers = strangers(gpu, total).iter().map(|s| s.bytes).sum();
        let fragmented = Config::get().fragmented.saturating_add(trouble::fragmented(dir, gpu));
        let most = Config::get().memory.saturating_sub(hidden(gpu)).saturating_sub(fragmented);
        let Some(want) = total.checked_add(bytes).and_then(|want| want.checked_add(strangers)) else { return false };
        let mut excess = kept.saturating_sub(most.saturating_sub(want));
        let mut missing = want.saturating_sub(most);
        let managed = self.managed_at(gpu) + others.iter().map(|p| p.gpus[gpu].managed).sum::<u64>();
        if missing > managed {
            return false;
        }
        // This eviction takes no simulated time.
        for other in &others {
            let Usage { managed, kept, .. } = other.gpus[gpu];
            for (word, have, wanted) in
                [(managed_word(gpu), managed, &mut missing), (kept_word(gpu), kept, &mut excess)]
            {
                let loss = have.min(*wanted);
                if loss > 0 && set_word(&other.path, word, have - loss).is_ok() {
                    *wanted -= loss;
                }
            }
        }
        self.lower(kept_word(gpu), excess);
        let loss = missing.min(self.managed_at(gpu));
        self.words[managed_word(gpu)].fetch_sub(loss, Ordering::Relaxed);
        missing == loss
    }
}

/// The figures of the memory in use on a GPU of the machine.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub processes: Vec<Process>,
    /// The foreign processes of the GPU, each with the bytes that it has received.
    pub strangers: Vec<Stranger>,
    /// Bytes in use that NVML does not count.
    pub hidden: u64,
}

impl Figures {
    /// Returns the figures of a GPU at one moment.
    pub fn of(gpu: usize) -> Figures {
        let Ok(_all) = Everybody::lock() else { return Figures::default() };
        let processes = living();
        let strangers = strangers(gpu, used_by_processes(gpu, &processes));
        Figures { processes, strangers, hidden: hidden(gpu) }
    }

    /// Bytes in use as NVML counts them.
    pub fn used(&self, gpu: usize) -> u64 {
        let used = used_by_processes(gpu, &self.processes) + self.strangers.iter().map(|s| s.bytes).sum::<u64>();
        // Foreign processes take kept bytes too.
        let left = Config::get().memory.saturating_sub(self.hidden).saturating_sub(used);
        used + kept_by_processes(gpu, &self.processes).min(left)
    }

    /// Free bytes as CUDA counts them, including fragmented bytes.
    pub fn free(&self, gpu: usize) -> u64 {
        Config::get().memory.saturating_sub(self.used(gpu)).saturating_sub(self.hidden)
    }
}

fn used_by_processes(gpu: usize, processes: &[Process]) -> u64 {
    processes.iter().map(|p| p.gpus[gpu].plain + p.gpus[gpu].managed).sum()
}

fn kept_by_processes(gpu: usize, processes: &[Process]) -> u64 {
    processes.iter().map(|p| p.gpus[gpu].kept).sum()
}

/// Bytes in use that NVML does not count.
fn hidden(gpu: usize) -> u64 {
    Config::get().hidden.saturating_add(trouble::hidden(&Config::get().dir, gpu))
}

/// Returns the foreign processes of a GPU on which other processes use `used` bytes. Each foreign
/// process in turn receives the remaining bytes, up to its demand.
fn strangers(gpu: usize, used: u64) -> Vec<Stranger> {
    let mut left = Config::get().memory.saturating_sub(hidden(gpu)).saturating_sub(used);
    let mut strangers = trouble::strangers(&Config::get().dir, gpu);
    for stranger in &mut strangers {
        stranger.bytes = stranger.bytes.min(left);
        left -= stranger.bytes;
    }
    strangers
}

/// Every living process that has an account.
pub fn processes() -> Vec<Process> {
    match Everybody::lock() {
        Ok(_all) => living(),
        Err(_) => Vec::new(),
    }
}

/// The memory of a process on a GPU of the simulated machine whose directory is `dir`. For processes
/// outside that machine.
pub fn usage(dir: &Path, pid: u32, gpu: usize) -> Option<Usage> {
    let all = fs::read_dir(dir.join("processes")).ok()?;
    let own = all.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with(&format!("{pid}-")))?;
    Some(usage_in(&fs::read(own.path()).ok().filter(|bytes| bytes.len() >= WORDS * 8)?, gpu))
}

/// The memory on a GPU in the contents of a process's file.
fn usage_in(file: &[u8], gpu: usize) -> Usage {
    let [plain, managed, kept] = [plain_word(gpu), managed_word(gpu), kept_word(gpu)].map(|at| word(file, at));
    Usage { plain, managed, kept }
}

fn word(file: &[u8], at: usize) -> u64 {
    file[at * 8..at * 8 + 8].try_into().map_or(0, u64::from_ne_bytes)
}

fn processes_dir() -> PathBuf {
    Config::get().dir.join("processes")
}

impl Process {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the pid in the caller's PID namespace, as the driver does. For a process outside
    /// that namespace, returns the pid in the process's own namespace.
    pub fn pid_here(&self) -> u32 {
        // Does not open this process's own pid file, because closing that descriptor would release
        // this process's lock on the file.
        if ACCOUNT.get().and_then(|own| own.as_ref().ok()).is_some_and(|own| own.path == self.path) {
            return self.pid;
        }
        let holder = File::open(pid_file(&self.path)).and_then(|file| lock_as_process(&file, libc::F_GETLK));
        holder.ok().filter(|pid| *pid > 0).map_or(self.pid, |pid| pid as u32)
    }
}

/// The file that a process locks to publish its pid. The kernel translates the pid of a lock's
/// holder into the caller's namespace.
fn pid_file(account: &Path) -> PathBuf {
    Config::get().dir.join("pids").join(account.file_name().unwrap_or_default())
}

/// Locks a file for this process (`F_SETLK`), or returns the pid of the lock's holder (`F_GETLK`).
/// Without a holder, the pid is 0.
fn lock_as_process(file: &File, command: libc::c_int) -> io::Result<libc::pid_t> {
    // SAFETY: all zeros is a valid `flock`, of the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the kernel accesses only `lock`, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 if lock.l_type == libc::F_UNLCK as libc::c_short => Ok(0),
        0 => Ok(lock.l_pid),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads the accounts of living processes, and removes the files of dead processes. The caller
/// holds the lock [`Everybody`].
fn living() -> Vec<Process> {
    let Ok(entries) = fs::read_dir(processes_dir()) else { return Vec::new() };
    let mut processes: Vec<Process> = entries.filter_map(|entry| read(entry.ok()?.path())).collect();
    processes.sort_by_key(|process| process.pid);
    shared::count_without_owner(&mut processes);
    processes
}

fn read(path: PathBuf) -> Option<Process> {
    let file = File::options().read(true).write(true).open(&path).ok()?;
    let mut bytes = [0; WORDS * 8];
    file.read_exact_at(&mut bytes, 0).ok()?;
    if flock(&file, libc::LOCK_EX | libc::LOCK_NB) {
        // A checkpointed process may be saved to disk. When it is restored, it opens its files again.
        if !checkpoint::is_checkpointed(&bytes) {
            let _ = fs::remove_file(pid_file(&path));
            let _ = fs::remove_file(&path);
        }
        return None;
    }
    let gpus = std::array::from_fn(|gpu| usage_in(&bytes, gpu));
    let table: Vec<u64> = (SHARED..CHECKPOINT).map(|at| word(&bytes, at)).collect();
    Some(Process { pid: word(&bytes, 0) as u32, gpus, shared: shared::read(&table), path })
}

fn set_word(path: &Path, word: usize, bytes: u64) -> io::Result<()> {
    File::options().write(true).open(path)?.write_all_at(&bytes.to_ne_bytes(), word as u64 * 8)
}

/// The lock of all accounts. This lock makes the check for room and the allocation one atomic step.
struct Everybody(MutexGuard<'static, Option<LockFile>>);

impl Everybody {
    fn lock() -> io::Result<Everybody> {
        static LOCK: Mutex<Option<LockFile>> = Mutex::new(None);
        let mut file = LOCK.lock().unwrap_or_else(|e| e.into_inner());
        if file.is_none() {
            *file = Some(LockFile::open("accounts.lock")?);
        }
        if let Some(file) = &*file {
            file.lock();
        }
        Ok(Everybody(file))
    }
}

impl Drop for Everybody {
    fn drop(&mut self) {
        if let Some(file) = &*self.0 {
            file.unlock();
        }
    }
}
