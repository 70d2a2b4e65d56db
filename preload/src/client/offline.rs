//! Sharing a GPU without a scheduler, which has stopped or never ran.
//!
//! A program runs only while all of its memory is on the GPU, with or without a scheduler. So programs
//! whose memory does not fit together never run at the same time. This module only decides which
//! program has its memory on the GPU: the holder of the *turn*, an exclusive lock on one file per GPU.
//!
//! - A client takes the turn if some of its memory is off the GPU and the GPU has no room for that
//!   memory. If all memory of all clients fits, no client takes a turn, and all clients run.
//! - While one client holds the turn, every other client runs nothing and evicts all of its memory.
//! - The holder releases the turn in three cases: it has had all of its memory for a while, it is idle,
//!   or the turn is useless.
//!
//! Each of these steps takes a bounded time if submitted work ends. If a process ends, the kernel
//! releases its lock. So the memory of every client is eventually on the GPU, if the GPU is large
//! enough for it.
//!
//! Any process that can read the file can lock it, but must not be able to block the programs of
//! other users permanently. So a client that has waited for too long ignores turns for a while: it
//! runs, and evicts no memory for other clients. If no client can take a turn, memory is still
//! restored when other programs free memory.
//!
//! A client of several GPUs needs all of them at the same time. It takes their turns in the order of
//! their UUIDs, which is the same for all clients, and keeps each turn while it waits for the next. It
//! evicts the memory of one GPU only after work on that GPU's peers has ended.
//!
//! A second file per GPU tells a client whether other clients exist that could make room. Each client
//! holds a shared lock on that file. If a client is alone, an allocation that finds no room fails. The
//! scheduler creates the files beside its socket. If no scheduler has ever run there, the files do not
//! exist, and memory is restored when room appears.
//!
//! The engine `managed` needs none of this, because its pages migrate to the GPU when they are touched.

use crate::{
    client::turn::Turn,
    env::{settings, trace::trace},
    gpu::Gpu,
    memory::{account::Account, space::Space},
    submit::closed,
    sys::{
        lock_file::{LockFile, TryLock},
        sync::Mutex,
        time::Instant,
    },
};
use alloc::{ffi::CString, format, vec::Vec};
use core::time::Duration;

/// After all memory is on the GPU, a turn lasts for the longer of two times: `MIN_TURN`, and
/// `TURN_PER_FILL` times the time that restoring the memory took. So moving memory takes only a
/// small part of the time.
const MIN_TURN: Duration = Duration::from_secs(2);
const TURN_PER_FILL: u32 = 8;
/// How long a useless turn lasts. A turn is useless while no memory is restored, or while the client
/// waits for another GPU.
const MAX_USELESS: Duration = Duration::from_secs(10);
/// How long a client waits for another client's turn, and how long it ignores turns after that.
const MAX_WAIT: Duration = Duration::from_secs(300);
const IGNORE: Duration = Duration::from_secs(1800);
/// The interval between checks of the lock: while the client runs, and while it waits or holds the turn.
const POLL_RUNNING: Duration = Duration::from_millis(50);
const POLL_WAITING: Duration = Duration::from_millis(10);
/// The number of consecutive checks without another client after which this client counts as alone. A
/// single check may miss a client that checks at the same moment.
const ALONE: u32 = 2;
/// The interval between attempts to open the files, drain or evict.
const RETRY: Duration = Duration::from_secs(1);

/// This client on one GPU without a scheduler.
#[derive(Debug, Default)]
pub struct Offline {
    files: Option<Files>,
    /// The number of consecutive checks that found no other client.
    seen_alone: u32,
    /// The turn, if this client holds it.
    held: Option<Held>,
    /// When another client was first seen to hold the turn.
    stopped_since: Option<Instant>,
    /// True if the GPU had no room for missing memory.
    is_full: bool,
    /// The time until which this client ignores the turns of other clients.
    ignore_until: Option<Instant>,
    /// After a failed attempt, the earliest time to look for the files, take the turn, drain or evict
    /// again.
    find_at: Option<Instant>,
    take_at: Option<Instant>,
    drain_at: Option<Instant>,
    evict_at: Option<Instant>,
}

/// The state of this client on its other GPUs.
#[derive(Debug, Default, Clone, Copy)]
pub struct OtherGpus {
    /// The client waits for memory on a GPU that precedes this GPU in the order of turns.
    pub before: bool,
    /// The client waits for memory on a GPU that follows this GPU.
    pub after: bool,
    /// The client's memory on a peer of this GPU must be evicted.
    pub stopped: bool,
}

/// A turn that this client holds.
#[derive(Debug)]
struct Held {
    /// When the client began to restore memory.
    since: Instant,
    /// The largest number of bytes mapped so far, and when it was reached.
    most: (u64, Instant),
    /// When all memory was on the GPU; `None` before.
    filled: Option<Instant>,
}

impl Held {
    fn new(now: Instant) -> Self {
        Self { since: now, most: (0, now), filled: None }
    }

    /// Whether the turn has lasted long enough.
    fn is_over(&mut self, account: &Account, waits_elsewhere: bool, now: Instant) -> bool {
        if !account.is_complete() {
            if self.filled.is_some() {
                *self = Self::new(now); // the client has allocated more
            }
            if account.mapped > self.most.0 {
                self.most = (account.mapped, now);
            }
            return now - self.most.1 >= MAX_USELESS;
        }
        let filled = *self.filled.get_or_insert(now);
        now - filled >= if waits_elsewhere { MAX_USELESS } else { self.length() }
    }

    /// Returns the time that restoring all memory took.
    fn fill_time(&self) -> Duration {
        self.filled.map_or(Duration::ZERO, |filled| filled - self.since)
    }

    fn length(&self) -> Duration {
        MIN_TURN.max(self.fill_time() * TURN_PER_FILL)
    }
}

#[derive(Debug)]
struct Files {
    /// Locked exclusively by the holder of the turn.
    turn: LockFile,
    /// Each client holds a shared lock on this file.
    here: LockFile,
}

impl Files {
    /// Opens the files that a scheduler has created. After that, other clients see this client.
    fn open(gpu: &Gpu) -> Option<Self> {
        let directory = settings::get().socket.rsplitn(2, |b| *b == b'/').nth(1).unwrap_or(b".");
        let open = |what: &str| {
            let mut path: Vec<u8> = directory.to_vec();
            path.extend_from_slice(format!("/nvshare-{}.{what}", gpu.uuid()?).as_bytes());
            LockFile::open(&CString::new(path).ok()?)
        };
        let files = Self { turn: open("turn")?, here: open("here")? };
        files.here.lock_shared();
        Some(files)
    }

    fn are_open(&self) -> bool {
        self.turn.is_open() && self.here.is_open()
    }

    /// Whether other clients without a scheduler exist on this GPU. Two clients that check at the same
    /// moment may miss each other, because converting a lock releases it for a moment.
    fn sees_others(&self) -> bool {
        let others = self.here.lock_exclusive() == TryLock::Taken;
        self.here.lock_shared();
        others
    }
}

impl Offline {
    /// Ends the mode without a scheduler. Called when this client has connected to a scheduler,
    /// because the scheduler decides from then on.
    pub fn end(&mut self, gpu: &Gpu) {
        *self = Self::default();
        if let Some(space) = gpu.space() {
            space.lock().account.offline_room = None;
        }
    }

    /// Makes this client visible to other clients that have lost the scheduler, before this client
    /// itself runs without a scheduler. All clients lose the scheduler at the same moment. But some
    /// clients begin to run without a scheduler earlier than others, and then check whether other
    /// clients could make room.
    pub fn show(&mut self, gpu: &Gpu) {
        if gpu.space().is_some_and(|space| !space.lock().account.demand_paged) {
            self.look_for_files(gpu, Instant::now());
        }
    }

    /// Whether the client waits for memory, or for the turn of another client.
    pub fn waits(&self) -> bool {
        self.is_stopped() || self.is_full || self.held.as_ref().is_some_and(|held| held.filled.is_none())
    }

    /// Whether another client holds the turn. Then this client may run nothing, and must evict its memory.
    pub fn is_stopped(&self) -> bool {
        self.stopped_since.is_some()
    }

    /// Records that the GPU has no room for missing memory.
    pub fn gpu_is_full(&mut self) {
        self.is_full = true;
    }

    /// Checks the lock and acts. Returns the time until the next check.
    pub fn step(&mut self, gpu: &Gpu, turn: &mut Turn, others: OtherGpus) -> Duration {
        let Some(space) = gpu.space().filter(|space| !space.lock().account.demand_paged) else { return Duration::MAX };
        let now = Instant::now();
        self.look_for_files(gpu, now);
        self.look_at_turn(gpu, space, now);
        let account = self.update_account(gpu, space);
        self.is_full &= !account.is_complete();
        self.give_up_turn(gpu, turn, &account, others, now);
        self.stop_or_run(gpu, turn, others, now);
        if self.is_stopped() {
            self.evict(gpu, space, turn, now);
        } else if self.is_full && self.held.is_none() && !others.before && !others.stopped {
            self.take_turn(gpu, now);
        }
        if self.waits() || self.held.is_some() || others.stopped { POLL_WAITING } else { POLL_RUNNING }
    }

    fn look_for_files(&mut self, gpu: &Gpu, now: Instant) {
        if self.files.as_ref().is_some_and(|files| !files.are_open()) {
            trace!("GPU {}: the program has closed the descriptors of the lock files", gpu.index);
            (self.files, self.held) = (None, None); // closing the files has released the locks
        }
        if self.files.is_none() && self.find_at.is_none_or(|at| now >= at) {
            self.files = Files::open(gpu);
            self.find_at = Some(now + RETRY);
        }
    }

    /// Records whether another client holds the turn. If so, no memory may be restored. Otherwise all
    /// memory may be restored while the GPU has room.
    fn look_at_turn(&mut self, gpu: &Gpu, space: &Mutex<Space>, now: Instant) {
        if self.stopped_since.is_some_and(|since| now - since >= MAX_WAIT) {
            trace!("GPU {}: waited too long for the turn", gpu.index);
            self.ignore_until = Some(now + IGNORE);
        }
        let ignores = self.ignore_until.is_some_and(|until| now < until);
        let takes_part = self.held.is_none() && !ignores && space.lock().account.unevictable.is_none();
        let is_taken = takes_part && self.files.as_ref().is_some_and(|files| files.turn.is_taken());
        if is_taken == self.is_stopped() {
            return;
        }
        let mut guard = space.lock();
        if is_taken {
            trace!("GPU {}: another client has the turn", gpu.index);
            (self.stopped_since, self.evict_at, self.is_full) = (Some(now), None, false);
            guard.lower_allowance_by(0);
        } else {
            self.stopped_since = None;
            let limit = guard.account.limit;
            guard.run_ungated(limit);
        }
    }

    /// Sets the limit on allocations. If other clients exist, the limit is lower, because each of them has
    /// a context on the GPU.
    fn update_account(&mut self, gpu: &Gpu, space: &Mutex<Space>) -> Account {
        self.seen_alone = match &self.files {
            Some(files) if files.sees_others() => 0,
            Some(_) => self.seen_alone.saturating_add(1),
            None => ALONE,
        };
        let shared = gpu.total() - gpu.total() / 8;
        let mut guard = space.lock();
        if self.seen_alone == 0 || self.seen_alone >= ALONE {
            let is_alone = self.seen_alone > 0;
            guard.account.offline_room = Some(if is_alone { 0 } else { shared });
            guard.account.limit = guard.account.at_most(if is_alone { gpu.total() } else { shared });
        }
        guard.account
    }

    fn take_turn(&mut self, gpu: &Gpu, now: Instant) {
        let Some(files) = self.files.as_ref().filter(|_| self.take_at.is_none_or(|at| now >= at)) else { return };
        if files.turn.lock_exclusive() == TryLock::Got {
            trace!("GPU {}: acquired the turn", gpu.index);
            self.held = Some(Held::new(now));
        }
    }

    /// Gives up the turn if it has lasted long enough, or if the client is idle. The client counts as idle
    /// by the same test as for an early release of the lock.
    fn give_up_turn(&mut self, gpu: &Gpu, turn: &mut Turn, account: &Account, others: OtherGpus, now: Instant) {
        let (Some(held), Some(files)) = (&mut self.held, &self.files) else { return };
        let was_filled = held.filled.is_some();
        let is_over = held.is_over(account, others.after, now);
        let is_filled = held.filled.is_some();
        if is_filled && !was_filled {
            trace!(
                "GPU {}: restored all memory {} ms after the start of the turn",
                gpu.index,
                held.fill_time().as_millis()
            );
            turn.contend(gpu, Some(held.length() / TURN_PER_FILL));
        }
        let is_idle = was_filled && is_filled && turn.is_over();
        if is_over || (is_idle && !others.after) {
            let why = match (is_filled, is_idle) {
                (false, _) => "no memory was restored",
                (true, true) => "idle",
                (true, false) => "its time has ended",
            };
            trace!("GPU {}: released the turn ({why})", gpu.index);
            files.turn.unlock();
            self.held = None;
            turn.contend(gpu, None);
            if !is_filled {
                self.take_at = Some(now + MIN_TURN); // other clients take the turn first
            }
        }
    }

    /// Drains while memory must be evicted. Otherwise lets the client run.
    fn stop_or_run(&mut self, gpu: &Gpu, turn: &mut Turn, others: OtherGpus, now: Instant) {
        if !self.is_stopped() && !others.stopped {
            self.drain_at = None;
            if gpu.gate.is_closed_for(closed::LOCK) {
                turn.run_ungated(gpu);
            }
        } else if !turn.is_held() {
            self.drain_at = Some(now + RETRY); // drains again if the drain fails and the gate opens
        } else if self.drain_at.is_none_or(|at| now >= at) {
            turn.abandon(gpu);
        }
    }

    /// Evicts all memory if no work is running.
    fn evict(&mut self, gpu: &Gpu, space: &Mutex<Space>, turn: &Turn, now: Instant) {
        let mut guard = space.lock();
        let Account { mapped, pinned, allowance, .. } = guard.account;
        let is_under_way = mapped + pinned > allowance;
        let is_due = self.evict_at.is_none_or(|at| now >= at);
        if mapped > 0 && !is_under_way && is_due && turn.is_over() && gpu.is_drained() {
            self.evict_at = Some(now + RETRY);
            guard.lower_allowance_by(u64::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn account(demand: u64, mapped: u64) -> Account {
        Account { demand, mapped, ..Account::default() }
    }

    #[test]
    fn a_turns_length_is_proportional_to_its_fill_time() {
        let now = Instant::now();
        let mut held = Held::new(now);
        for second in 0..20 {
            assert!(!held.is_over(&account(100, 2 * u64::from(second)), false, now + SECOND * second), "{second}");
        }
        let filled = now + SECOND * 20;
        assert!(!held.is_over(&account(100, 100), false, filled));
        assert_eq!(held.length(), SECOND * 20 * TURN_PER_FILL);
        assert!(!held.is_over(&account(100, 100), false, filled + (held.length() - Duration::from_millis(1))));
        assert!(held.is_over(&account(100, 100), false, filled + held.length()));
    }

    #[test]
    fn a_turn_without_progress_ends() {
        let now = Instant::now();
        let mut held = Held::new(now);
        assert!(!held.is_over(&account(100, 50), false, now + SECOND));
        assert!(!held.is_over(&account(100, 50), false, now + MAX_USELESS));
        assert!(held.is_over(&account(100, 50), false, now + SECOND + MAX_USELESS));
        // All memory is on this GPU, but another GPU of the client never has room.
        let mut held = Held::new(now);
        assert!(!held.is_over(&account(100, 100), true, now));
        assert!(!held.is_over(&account(100, 100), true, now + MIN_TURN));
        assert!(held.is_over(&account(100, 100), true, now + MAX_USELESS));
    }

    #[test]
    fn a_turn_continues_while_its_client_allocates() {
        let now = Instant::now();
        let mut held = Held::new(now);
        assert!(!held.is_over(&account(100, 100), false, now));
        assert!(!held.is_over(&account(200, 100), false, now + MIN_TURN + SECOND));
        assert!(!held.is_over(&account(200, 200), false, now + MIN_TURN + SECOND * 2));
        assert_eq!(held.length(), SECOND * TURN_PER_FILL);
    }
}
