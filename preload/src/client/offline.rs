//! Clients without a scheduler, which is gone for good: they make room for each other all the same.
//!
//! Whose memory is all on the GPU runs, ungated. Who lacks some takes the *turn*, a lock that one client of a GPU has, and
//! says that it lacks. While it does, all others stop, and their memory leaves the GPU step by step. Once the taker has all
//! of its own, the others stay as they are for a quantum; then it gives the turn back, and runs on until somebody else who
//! lacks memory takes it.
//!
//! A client of several GPUs needs all of them at once. It takes their turns in an order that is everybody's, by their UUIDs,
//! and keeps one while it waits for those behind it. Memory leaves one of them only once nothing runs on those that reach it.
//!
//! All of it is three lock files a GPU ([`crate::sys::lock_file`]): `turn`; `lack`, which the one with the turn has while
//! it lacks memory; `here`, which all clients share, so that each knows whether there are others. They are beside the
//! scheduler's socket, where a scheduler made them, else in a directory that everybody may write to. Where there is none,
//! memory comes back as there happens to be room.

use crate::{
    client::turn::Turn,
    env::{settings, trace::trace},
    gate::closed,
    gpu::Gpu,
    memory::{account::Account, engine::CHUNK, space::Space},
    sys::{
        lock_file::{LockFile, Tried},
        sync::Mutex,
        time::Instant,
    },
};
use alloc::{ffi::CString, format, vec::Vec};
use core::time::Duration;

/// How long a client that has just got its memory keeps it, at least, and as a multiple of how long that took.
const QUANTUM: Duration = Duration::from_secs(2);
const QUANTUM_MOVES: u32 = 8;
/// How long one that has the turn may gain no byte before it gives the turn back: what it lacks, nobody may have to give.
const STARVED: Duration = Duration::from_secs(10);
/// And how long it then leaves it to others.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a client waits for others at most, and how long it then minds nobody: locks may be held by who has no use for
/// the GPU.
const MOST_WAIT: Duration = Duration::from_secs(300);
const DEAF: Duration = Duration::from_secs(1800);
/// How long a client keeps a turn that is of no use to it until it has the next GPU's, too.
const MOST_KEPT: Duration = Duration::from_secs(15);
/// Between looks of a client that runs alone, of one that runs beside others, and of one that waits.
const LOOK_ALONE: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const LOOK_WAITING: Duration = Duration::from_millis(10);
/// How long memory may take to come where there is room, before others are asked for some.
const COMES_SOON: Duration = Duration::from_millis(100);
/// Between attempts to stop work that did not end.
const DRAIN_AGAIN: Duration = Duration::from_secs(1);
/// Between attempts to find a place for the lock files.
const FIND_AGAIN: Duration = Duration::from_secs(1);
/// Between attempts to make room where the one before made none.
const EVICT_AGAIN: Duration = Duration::from_millis(500);
/// The part of a GPU that leaves it before others are looked at again: buffers for much are made faster than for little.
const STEP: u64 = 16;
/// Directories that everybody may write to, should the scheduler have left no files.
const DIRECTORIES: [&str; 2] = ["/dev/shm", "/run/lock"];

#[derive(Debug, Default)]
pub struct Offline {
    files: Option<Files>,
    state: State,
    /// When to look for a place again, and when to take the turn at the soonest.
    find_at: Option<Instant>,
    turn_at: Option<Instant>,
    drained_at: Option<Instant>,
    /// Its memory is to leave, so nothing may run.
    asked: bool,
    /// Since when it has been waiting, and until when it minds nobody.
    waits_since: Option<Instant>,
    deaf_until: Option<Instant>,
    /// Since when memory has been lacking.
    lacks_since: Option<Instant>,
    /// How much was mapped when room was last made, and when.
    evicted: Option<(u64, Instant)>,
}

/// How it stands with this client's other GPUs.
#[derive(Debug, Default, Clone, Copy)]
pub struct OtherGpus {
    /// It waits for memory on some that come before this one; on some that come after.
    pub before: bool,
    pub after: bool,
    /// Its memory is to leave one that work of this one can reach.
    pub asked: bool,
}

#[derive(Debug, Default, Clone, Copy)]
enum State {
    /// All memory is here; it may be asked for.
    #[default]
    Runs,
    /// Others lack memory, or this client does and has no turn.
    Waits,
    /// The turn is this client's, and memory comes: since then; bytes that were there when it last had more, and when.
    Fills(Instant, u64, Instant),
    /// All of it came then; the turn ends so long after, or after the next GPU's memory came.
    Keeps { since: Instant, until: Instant, quantum: Duration },
}

#[derive(Debug)]
struct Files {
    turn: (CString, LockFile),
    lack: (CString, LockFile),
    here: (CString, LockFile),
}

impl Files {
    /// Those that are there, or new ones.
    fn find(gpu: &Gpu, create: bool) -> Option<Self> {
        let beside = settings::get().socket.rsplitn(2, |b| *b == b'/').nth(1).unwrap_or(b".");
        Self::open(beside, gpu, false)
            .or_else(|| DIRECTORIES.iter().find_map(|directory| Self::open(directory.as_bytes(), gpu, create)))
    }

    fn open(directory: &[u8], gpu: &Gpu, create: bool) -> Option<Self> {
        let open = |what: &str| {
            let mut path: Vec<u8> = directory.to_vec();
            path.extend_from_slice(format!("/nvshare-{}.{what}", gpu.uuid()?).as_bytes());
            let path = CString::new(path).ok()?;
            let file = LockFile::open(&path, create)?;
            Some((path, file))
        };
        Some(Self { turn: open("turn")?, lack: open("lack")?, here: open("here")? })
    }

    fn are_intact(&self) -> bool {
        [&self.turn, &self.lack, &self.here].into_iter().all(|(path, file)| file.is_intact(path))
    }

    /// Whether another client without a scheduler is on this GPU. From now on they see this one.
    fn has_company(&self) -> bool {
        let others = self.here.1.take() == Tried::Taken;
        self.here.1.join();
        others
    }
}

impl Offline {
    /// A scheduler is there: it decides from now on.
    pub fn end(&mut self, gpu: &Gpu) {
        *self = Self::default();
        if let Some(space) = gpu.space() {
            space.lock().account.company = 0;
        }
    }

    /// Whether it waits for memory, or for others to have theirs.
    pub fn waits(&self) -> bool {
        matches!(self.state, State::Waits | State::Fills(..))
    }

    /// Whether its memory is to leave.
    pub fn is_asked(&self) -> bool {
        self.asked
    }

    /// Looks at how things stand; says after how long to look again.
    ///
    /// `knew_one`: there has been a scheduler. Who has all memory and never knew one leaves no files.
    pub fn step(&mut self, gpu: &Gpu, turn: &mut Turn, others: OtherGpus, knew_one: bool) -> Duration {
        let Some(space) = gpu.space().filter(|space| !space.lock().account.demand_paged) else { return Duration::MAX };
        let now = Instant::now();
        if self.files.as_ref().is_some_and(|files| !files.are_intact()) {
            trace!("GPU {}: the lock files are gone", gpu.index);
            self.files = None; // and with them every lock
            self.run(space);
        }
        if self.files.is_none() && self.find_at.is_none_or(|at| now >= at) {
            let account = space.lock().account;
            self.files = Files::find(gpu, knew_one || !account.is_complete() || account.refused);
            self.find_at = Some(now + FIND_AGAIN);
        }
        self.asked = matches!((self.state, &self.files), (State::Waits, Some(files)) if files.lack.1.is_taken());
        self.stop_or_go(gpu, turn, others, now);
        let Some(files) = &self.files else { return FIND_AGAIN };
        // What can be promised where there are others: more than that no client ever has to itself.
        let most = gpu.total() - gpu.total() / 8;
        let company = if files.has_company() { most } else { 0 };
        let account = {
            let mut guard = space.lock();
            guard.account.company = company;
            guard.account.limit = guard.account.at_most(if company > 0 { most } else { gpu.total() });
            guard.account
        };
        let lacks = !account.is_complete();
        self.lacks_since = if lacks { Some(self.lacks_since.unwrap_or(now)) } else { None };
        let comes_soon = self.lacks_since.is_none_or(|since| now - since < COMES_SOON);
        match self.state {
            State::Runs if others.asked => LOOK_WAITING,
            State::Runs if account.unevictable || self.deaf_until.is_some_and(|until| now < until) => POLL_INTERVAL,
            State::Runs if comes_soon && !files.lack.1.is_taken() => {
                if company > 0 || lacks {
                    POLL_INTERVAL
                } else {
                    LOOK_ALONE
                }
            }
            State::Runs => {
                trace!("GPU {}: {}", gpu.index, if lacks { "lacks memory" } else { "others lack memory" });
                self.state = State::Waits;
                (self.waits_since, self.evicted) = (Some(now), None);
                self.hold_still(space);
                Duration::ZERO
            }
            State::Waits => self.wait(space, gpu, turn, lacks && !others.before, lacks, now),
            State::Fills(since, ..) if !lacks => {
                files.lack.1.leave();
                let quantum = QUANTUM.max((now - since) * QUANTUM_MOVES);
                trace!("GPU {}: all memory is here, for {} ms", gpu.index, quantum.as_millis());
                self.state = State::Keeps { since: now, until: now + quantum, quantum };
                POLL_INTERVAL
            }
            State::Fills(since, most, at) => {
                files.lack.1.take(); // somebody may have been looking at it
                if account.mapped > most {
                    self.state = State::Fills(since, account.mapped, now);
                } else if now - at >= STARVED {
                    trace!("GPU {}: nobody has any more memory to give", gpu.index);
                    files.lack.1.leave();
                    files.turn.1.leave();
                    self.turn_at = Some(now + PAUSE);
                    self.state = State::Waits;
                    self.waits_since = Some(now);
                    self.hold_still(space);
                }
                LOOK_WAITING
            }
            State::Keeps { .. } if lacks => {
                files.lack.1.take();
                self.state = State::Fills(now, account.mapped, now);
                LOOK_WAITING
            }
            State::Keeps { since, quantum, .. } if others.after && now - since < MOST_KEPT => {
                self.state = State::Keeps { since, until: now + quantum, quantum };
                POLL_INTERVAL
            }
            State::Keeps { until, .. } if now >= until => {
                files.turn.1.leave();
                self.state = State::Runs;
                POLL_INTERVAL
            }
            State::Keeps { until, .. } => POLL_INTERVAL.min(until - now),
        }
    }

    /// Nothing runs while memory is to leave. Where nothing keeps it from running, it does.
    fn stop_or_go(&mut self, gpu: &Gpu, turn: &mut Turn, others: OtherGpus, now: Instant) {
        if self.asked || others.asked {
            if !turn.is_held() {
                self.drained_at = Some(now + DRAIN_AGAIN); // should it be held again, because it could not be drained
            } else if self.drained_at.is_none_or(|at| now >= at) {
                turn.abandon(gpu);
            }
        } else {
            self.drained_at = None;
            if !matches!(self.state, State::Waits) && gpu.gate.is_closed_for(closed::LOCK) {
                turn.run_ungated(gpu);
            }
        }
    }

    /// Without the turn: what others lack leaves; what this client lacks, it takes the turn for.
    fn wait(
        &mut self,
        space: &Mutex<Space>,
        gpu: &Gpu,
        turn: &Turn,
        takes: bool,
        lacks: bool,
        now: Instant,
    ) -> Duration {
        let Some(files) = &self.files else { return POLL_INTERVAL };
        if self.waits_since.is_some_and(|since| now - since >= MOST_WAIT) {
            trace!("GPU {}: has waited long enough", gpu.index);
            self.deaf_until = Some(now + DEAF);
            self.run(space);
        } else if self.asked {
            let Account { mapped, pinned, allowance, .. } = space.lock().account;
            let leaves = mapped + pinned > allowance; // what was made room with before, still
            let again = self.evicted.is_none_or(|(before, at)| mapped < before || now >= at + EVICT_AGAIN);
            if turn.is_over() && gpu.is_drained() && !leaves && again {
                self.evicted = Some((mapped, now));
                space.lock().make_room_for_others((gpu.total() / STEP).max(CHUNK));
            }
        } else if !lacks {
            self.run(space);
            return Duration::ZERO;
        } else if takes && self.turn_at.is_none_or(|at| now >= at) && files.turn.1.take() == Tried::Got {
            trace!("GPU {}: takes the turn", gpu.index);
            files.lack.1.take();
            self.state = State::Fills(now, 0, now);
            self.allow_all(space);
            return Duration::ZERO;
        }
        LOOK_WAITING
    }

    fn run(&mut self, space: &Mutex<Space>) {
        if !matches!(self.state, State::Runs) {
            self.state = State::Runs;
            self.allow_all(space);
        }
        self.asked = false;
    }

    /// No more memory comes to the GPU.
    fn hold_still(&self, space: &Mutex<Space>) {
        space.lock().make_room_for_others(0);
    }

    /// All memory may come, as there is room.
    fn allow_all(&self, space: &Mutex<Space>) {
        let mut guard = space.lock();
        let limit = guard.account.limit;
        guard.run_ungated(limit);
    }
}
