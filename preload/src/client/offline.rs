//! Sharing a GPU without a scheduler: one that has stopped, or never ran.
//!
//! A program runs only while all of its memory is on the GPU, with a scheduler or without. So programs whose memory does not fit
//! together never run at once, whatever happens here. What remains to be decided is which of them has its memory there: the one
//! that holds the *turn*, an exclusive lock on one file per GPU.
//!
//! - A client that lacks memory for which the GPU has no room takes the turn. Without such a client there are no turns, and all
//!   clients run.
//! - While another client holds the turn, a client lets nothing run, and evicts all of its memory.
//! - The holder gives the turn up when it has had all of its memory for a while, when it is idle, or when the turn is of no use.
//!
//! Each of these steps takes a bounded time, as long as submitted work ends, and the kernel releases the lock of a process that
//! ends. So every client whose memory fits on the GPU gets it there.
//!
//! Any process that can read the file can lock it, and must not be able to stop the programs of other users for good. A client
//! that has waited for too long takes no part for a while: it runs, and gives no memory to others. Where no turns can be taken,
//! memory still comes back as other programs free theirs.
//!
//! A client of several GPUs needs all of them at once. It takes their turns in the order of their UUIDs, which is the same for all
//! clients, and keeps one while it waits for those behind it. Memory leaves one GPU only after work on its peers has ended.
//!
//! A second file per GPU tells clients whether there are others, who can make room: each has a shared lock on it. Where there are
//! none, an allocation that finds no room fails. The scheduler makes the files beside its socket. Where there are none, because
//! no scheduler has ever run there, memory comes back as room appears.
//!
//! None of this concerns engine `managed`, with which pages come to the GPU when they are touched.

use crate::{
    client::turn::Turn,
    env::{settings, trace::trace},
    gate::closed,
    gpu::Gpu,
    memory::{account::Account, space::Space},
    sys::{
        lock_file::{LockFile, TryLock},
        sync::Mutex,
        time::Instant,
    },
};
use alloc::{ffi::CString, format, vec::Vec};
use core::time::Duration;

/// The length of a turn from when all memory is on the GPU: at least this long, and this many times the time that it took to get
/// there, so that most of the time is not spent on moving memory.
const MIN_TURN: Duration = Duration::from_secs(2);
const TURN_PER_FILL: u32 = 8;
/// A turn of no use ends after this time: no memory has come, or the client still waits for another GPU.
const MAX_USELESS: Duration = Duration::from_secs(10);
/// The longest wait for others, and how long a client then takes no part.
const MAX_WAIT: Duration = Duration::from_secs(300);
const IGNORE: Duration = Duration::from_secs(1800);
/// The interval between looks at the lock, while the client runs and while it waits or holds the turn.
const POLL_RUNNING: Duration = Duration::from_millis(50);
const POLL_WAITING: Duration = Duration::from_millis(10);
/// A client that has seen no other one for so many looks in a row is alone: one look may miss another client that looks, too.
const ALONE: u32 = 2;
/// The interval between attempts that failed: to find the files, to drain, to evict.
const RETRY: Duration = Duration::from_secs(1);

/// This client on one GPU while there is no scheduler.
#[derive(Debug, Default)]
pub struct Offline {
    files: Option<Files>,
    /// How often in a row no other client has been seen.
    seen_alone: u32,
    /// The turn, if this client holds it.
    held: Option<Held>,
    /// Since when another client has held the turn.
    stopped_since: Option<Instant>,
    /// The GPU had no room for memory that is lacking.
    is_full: bool,
    /// Until when this client takes no part.
    ignore_until: Option<Instant>,
    /// When to look for the files, take the turn, drain or evict at the earliest, after an attempt in vain.
    find_at: Option<Instant>,
    take_at: Option<Instant>,
    drain_at: Option<Instant>,
    evict_at: Option<Instant>,
}

/// This client on its other GPUs.
#[derive(Debug, Default, Clone, Copy)]
pub struct OtherGpus {
    /// It waits for memory on a GPU before this one, in the order of turns.
    pub before: bool,
    /// It waits for memory on a GPU after this one.
    pub after: bool,
    /// Its memory is to leave a peer of this one.
    pub stopped: bool,
}

/// A turn that this client holds.
#[derive(Debug)]
struct Held {
    /// When the client began to bring memory in.
    since: Instant,
    /// The most bytes that have been mapped, and since when.
    most: (u64, Instant),
    /// When all memory was there.
    filled: Option<Instant>,
}

impl Held {
    fn new(now: Instant) -> Self {
        Self { since: now, most: (0, now), filled: None }
    }

    /// Whether the turn is over by the clock.
    fn is_over(&mut self, account: &Account, waits_elsewhere: bool, now: Instant) -> bool {
        if !account.is_complete() {
            if self.filled.is_some() {
                *self = Self::new(now); // it has allocated more
            }
            if account.mapped > self.most.0 {
                self.most = (account.mapped, now);
            }
            return now - self.most.1 >= MAX_USELESS;
        }
        let filled = *self.filled.get_or_insert(now);
        now - filled >= if waits_elsewhere { MAX_USELESS } else { self.length() }
    }

    /// The time that it took to bring all memory in.
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
    /// Locked by all clients together.
    here: LockFile,
}

impl Files {
    /// Opens the files that a scheduler has made. Other clients can see this one from then on.
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

    /// Whether other clients without a scheduler show up on this GPU. Of two that look at the same moment, each may miss the other,
    /// since a lock that changes is lost for a moment.
    fn sees_others(&self) -> bool {
        let others = self.here.lock_exclusive() == TryLock::Taken;
        self.here.lock_shared();
        others
    }
}

impl Offline {
    /// A scheduler is there, and decides from now on.
    pub fn end(&mut self, gpu: &Gpu) {
        *self = Self::default();
        if let Some(space) = gpu.space() {
            space.lock().account.offline_room = None;
        }
    }

    /// Shows this client to others that have lost the scheduler, before it goes on without one. They all lose it at the same
    /// moment, but some go on sooner, and find out then whether there are others who can make room.
    pub fn show(&mut self, gpu: &Gpu) {
        if gpu.space().is_some_and(|space| !space.lock().account.demand_paged) {
            self.look_for_files(gpu, Instant::now());
        }
    }

    /// Whether the client waits for memory, or for others that bring theirs in.
    pub fn waits(&self) -> bool {
        self.is_stopped() || self.is_full || self.held.as_ref().is_some_and(|held| held.filled.is_none())
    }

    /// Whether another client holds the turn, so that nothing may run and memory must leave.
    pub fn is_stopped(&self) -> bool {
        self.stopped_since.is_some()
    }

    /// The GPU has no room for memory that is lacking.
    pub fn gpu_is_full(&mut self) {
        self.is_full = true;
    }

    /// Looks at the lock and acts. Returns the time until the next look.
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
            trace!("GPU {}: the program has closed the lock files", gpu.index);
            (self.files, self.held) = (None, None); // and with them the locks
        }
        if self.files.is_none() && self.find_at.is_none_or(|at| now >= at) {
            self.files = Files::open(gpu);
            self.find_at = Some(now + RETRY);
        }
    }

    /// Notes whether another client holds the turn. Then no memory comes to the GPU; otherwise all may, as there is room.
    fn look_at_turn(&mut self, gpu: &Gpu, space: &Mutex<Space>, now: Instant) {
        if self.stopped_since.is_some_and(|since| now - since >= MAX_WAIT) {
            trace!("GPU {}: has waited for too long", gpu.index);
            self.ignore_until = Some(now + IGNORE);
        }
        let ignores = self.ignore_until.is_some_and(|until| now < until);
        let takes_part = self.held.is_none() && !ignores && !space.lock().account.unevictable;
        let is_taken = takes_part && self.files.as_ref().is_some_and(|files| files.turn.is_taken());
        if is_taken == self.is_stopped() {
            return;
        }
        let mut guard = space.lock();
        if is_taken {
            trace!("GPU {}: another client has the turn", gpu.index);
            (self.stopped_since, self.evict_at, self.is_full) = (Some(now), None, false);
            guard.make_room_for_others(0);
        } else {
            self.stopped_since = None;
            let limit = guard.account.limit;
            guard.run_ungated(limit);
        }
    }

    /// Sets the bytes that can be promised. With other clients it is less, since each has a context there.
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
            trace!("GPU {}: takes the turn", gpu.index);
            self.held = Some(Held::new(now));
        }
    }

    /// Gives up a turn that is over: by the clock, or because the client is idle, for which the early release of a lock looks.
    fn give_up_turn(&mut self, gpu: &Gpu, turn: &mut Turn, account: &Account, others: OtherGpus, now: Instant) {
        let (Some(held), Some(files)) = (&mut self.held, &self.files) else { return };
        let was_filled = held.filled.is_some();
        let is_over = held.is_over(account, others.after, now);
        let is_filled = held.filled.is_some();
        if is_filled && !was_filled {
            trace!("GPU {}: all memory is here, for {} ms", gpu.index, held.length().as_millis());
            turn.contend(gpu, Some(held.length() / TURN_PER_FILL));
        }
        let is_idle = was_filled && is_filled && turn.is_over();
        if is_over || (is_idle && !others.after) {
            let why = match (is_filled, is_idle) {
                (false, _) => "no memory comes",
                (true, true) => "idle",
                (true, false) => "its time is over",
            };
            trace!("GPU {}: gives up the turn ({why})", gpu.index);
            files.turn.unlock();
            self.held = None;
            turn.contend(gpu, None);
            if !is_filled {
                self.take_at = Some(now + MIN_TURN); // leaves it to others for a while
            }
        }
    }

    /// Drains while memory is to leave, and runs otherwise.
    fn stop_or_run(&mut self, gpu: &Gpu, turn: &mut Turn, others: OtherGpus, now: Instant) {
        if !self.is_stopped() && !others.stopped {
            self.drain_at = None;
            if gpu.gate.is_closed_for(closed::LOCK) {
                turn.run_ungated(gpu);
            }
        } else if !turn.is_held() {
            self.drain_at = Some(now + RETRY); // in case the drain fails, and the gate opens again
        } else if self.drain_at.is_none_or(|at| now >= at) {
            turn.abandon(gpu);
        }
    }

    /// Evicts everything, once nothing runs.
    fn evict(&mut self, gpu: &Gpu, space: &Mutex<Space>, turn: &Turn, now: Instant) {
        let mut guard = space.lock();
        let Account { mapped, pinned, allowance, .. } = guard.account;
        let is_under_way = mapped + pinned > allowance;
        let is_due = self.evict_at.is_none_or(|at| now >= at);
        if mapped > 0 && !is_under_way && is_due && turn.is_over() && gpu.is_drained() {
            self.evict_at = Some(now + RETRY);
            guard.make_room_for_others(u64::MAX);
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
    fn a_turn_lasts_as_long_as_memory_comes_and_then_in_proportion() {
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
    fn a_turn_of_no_use_is_given_up() {
        let now = Instant::now();
        let mut held = Held::new(now);
        assert!(!held.is_over(&account(100, 50), false, now + SECOND));
        assert!(!held.is_over(&account(100, 50), false, now + MAX_USELESS));
        assert!(held.is_over(&account(100, 50), false, now + SECOND + MAX_USELESS));
        // All memory is here, and on another GPU it never comes.
        let mut held = Held::new(now);
        assert!(!held.is_over(&account(100, 100), true, now));
        assert!(!held.is_over(&account(100, 100), true, now + MIN_TURN));
        assert!(held.is_over(&account(100, 100), true, now + MAX_USELESS));
    }

    #[test]
    fn a_client_that_allocates_more_gets_it_in_the_same_turn() {
        let now = Instant::now();
        let mut held = Held::new(now);
        assert!(!held.is_over(&account(100, 100), false, now));
        assert!(!held.is_over(&account(200, 100), false, now + MIN_TURN + SECOND));
        assert!(!held.is_over(&account(200, 200), false, now + MIN_TURN + SECOND * 2));
        assert_eq!(held.length(), SECOND * TURN_PER_FILL);
    }
}
