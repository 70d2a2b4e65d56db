//! The order in which threads take locks, so that no two threads ever wait for each other.
//!
//! [`once`](super::once) needs no rank, because its waits are bounded.
//!
//! Only debug builds check the order. There, each thread has a word with a bit for each rank that it holds.
//! A signal handler sees the ranks of the interrupted thread, and the child of a fork sees the ranks of the
//! forking thread.

use super::thread;
use core::fmt::Write as _;

/// All locks of the library, the outermost first. A thread that holds a lock takes only later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rank {
    /// The green contexts.
    GreenContexts,
    /// Opening memory of another process, by one thread at a time. The lock is held until that
    /// process has answered.
    Opening,
    /// Not a lock: the calling thread waits at a gate or for an answer, and the client's thread must end
    /// that wait. So the client's thread takes none of the earlier locks, and holds this rank itself.
    ClientThread,
    /// The memory that the program has mapped itself. Calls that change the meaning of a handle or
    /// an address hold this lock.
    VirtualMemory,
    /// Making GPUs peers, by one thread at a time.
    Coupling,
    /// A GPU's mover.
    Mover,
    /// Introducing a GPU to the scheduler.
    Introduction,
    /// Attaching to a GPU for the first time.
    Attachment,
    /// Memory of other processes that this process has opened.
    Imports,
    /// The pending request to another process.
    Question,
    /// Allocations that the driver serves.
    PinnedMemory,
    /// Memory pools that the program has created.
    MemoryPools,
    /// A GPU's allocations and their account. Reports are sent with this lock held, so that the last report
    /// is the newest.
    Space,
    /// A GPU's contexts, streams and marks. A context entered under this lock is not destroyed until the
    /// lock is released.
    Work,
    /// While this lock is held for reading, no capture begins or ends.
    CaptureStart,
    /// The list of stream captures.
    Captures,
    /// A context's unused events.
    FreeEvents,
    /// Host buffers that are being allocated.
    StagingBuffers,
    /// Driver calls that may wait, queued for a thread that holds no locks.
    WaitingCalls,
    /// The contents of a swap file, and the jobs of its threads.
    SwapFile,
    /// Requesting GPU locks, by one thread at a time.
    LockRequest,
    /// What rules limit and permit.
    Rules,
    /// Announcing this process to the scheduler as an exporter.
    ExportKey,
    /// The device files that the driver has had open.
    DeviceFiles,
    /// Messages to be sent before the next report.
    Outbox,
    /// The connection: serialises messages.
    Connection,
    /// The connection that was made before CUDA was initialised.
    EarlyConnection,
}

/// The rank of a lock.
#[derive(Debug)]
pub struct Ranked(Rank);

/// Proof that the calling thread holds a lock of this rank.
#[derive(Debug)]
pub struct Held {
    /// The rank's bit; 0 if the thread already holds another lock of this rank.
    bit: u64,
}

impl Ranked {
    pub const fn new(rank: Rank) -> Self {
        Self(rank)
    }

    /// Checks the order of ranks. Called before the thread takes the lock.
    #[inline]
    pub fn take(&self) -> Held {
        let held = thread::ranks();
        if cfg!(debug_assertions) && held & (!0 << self.0 as u32) & !ROOM != 0 {
            violation(self.0, held);
        }
        let bit = 1 << self.0 as u32 & !held;
        thread::set_ranks(held | bit);
        Held { bit }
    }

    /// Like `take`, for a rank that is not a lock. The thread may have left an earlier wait by
    /// `longjmp`, without dropping its [`Held`].
    #[inline]
    pub fn take_anew(&self) -> Held {
        thread::set_ranks(thread::ranks() & !(1 << self.0 as u32));
        self.take()
    }
}

/// Not a rank: the bit is set while the thread's submissions have room in the stream's queue.
const ROOM: u64 = 1 << 63;

/// Declares that the calling thread's submissions have room in the stream's queue, until the result is
/// dropped.
#[inline]
pub fn with_room() -> Held {
    let held = thread::ranks();
    thread::set_ranks(held | ROOM);
    Held { bit: ROOM & !held }
}

/// The ranks that the calling thread holds, as bits.
#[cfg(debug_assertions)]
pub fn ranks_of_thread() -> u64 {
    thread::ranks() & !ROOM
}

/// Whether the calling thread holds a lock of this rank. Always true in release builds, which do not know.
pub fn holds(rank: Rank) -> bool {
    !cfg!(debug_assertions) || thread::ranks() & 1 << rank as u32 != 0
}

/// Whether the calling thread holds any lock, or is the client's thread.
#[cfg(debug_assertions)]
pub fn holds_any() -> bool {
    ranks_of_thread() != 0
}

#[cfg(debug_assertions)]
pub fn has_room() -> bool {
    thread::ranks() & ROOM != 0
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        thread::set_ranks(thread::ranks() & !self.bit);
    }
}

struct Stderr;

impl core::fmt::Write for Stderr {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        // SAFETY: `text` has `text.len()` bytes.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        Ok(())
    }
}

/// Aborts, because two threads could wait for each other. Only tests run debug builds, and a
/// test must not miss a violation.
#[cold]
fn violation(rank: Rank, held: u64) -> ! {
    let highest = u64::BITS - 1 - held.leading_zeros();
    let _ = writeln!(
        Stderr,
        "nvshare: takes a lock of rank {rank:?} ({}) while it holds {highest} ({held:#b})",
        rank as u8
    );
    // SAFETY: `abort` has no preconditions.
    unsafe { libc::abort() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_ranks_are_tracked_until_release() {
        let (outer, inner) = (Ranked::new(Rank::Space), Ranked::new(Rank::Outbox));
        let bits = |ranks: &[Rank]| ranks.iter().fold(0, |bits, rank| bits | 1 << *rank as u64);
        let first = outer.take();
        let second = inner.take();
        assert_eq!(thread::ranks(), bits(&[Rank::Space, Rank::Outbox]));
        drop(first);
        assert_eq!(thread::ranks(), bits(&[Rank::Outbox]));
        drop(second);
        assert_eq!(thread::ranks(), 0);
        std::thread::spawn(move || drop(outer.take())).join().expect("a thread of its own holds nothing");
    }

    #[test]
    fn taking_locks_in_the_wrong_order_aborts_the_process() {
        const CHILD: &str = "NVSHARE_TEST_WRONG_ORDER";
        if std::env::var_os(CHILD).is_some() {
            let _inner = Ranked::new(Rank::Work).take();
            let _outer = Ranked::new(Rank::Space).take();
            return;
        }
        let program = std::env::current_exe().expect("this program");
        let name = "sys::rank::tests::taking_locks_in_the_wrong_order_aborts_the_process";
        let mut command = std::process::Command::new(program);
        let ended = command.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().expect("a child");
        let said = std::string::String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.contains("takes a lock of rank Space"), "{said}");
    }
}
