//! Clients that are off their GPUs, and each client's stages: awake → preparing → checkpointing →
//! asleep → waking → restoring → awake.
//!
//! A sleeping program is off its GPUs completely, including its CUDA contexts. The driver can take
//! an idle or paused process off and bring it back (`cuCheckpointProcessLock`, `Checkpoint`,
//! `Restore`, `Unlock`; driver 570 and newer).
//!
//! A sleep takes these steps. The scheduler sends `PrepareSleep`. The library closes its gates,
//! lets the work drain, evicts all memory, closes the entries into the driver, and answers. A
//! helper of the daemon locks and checkpoints the process. A thread that is about to enter the
//! driver waits in the library, which sends `Wake`. The scheduler makes room, the helper restores
//! the process, and the library opens the entries when it receives `Awake`. A move to another GPU
//! changes the scheduler's records while the process sleeps, and the helper restores the process on
//! the other GPU.
//!
//! - **A preparation ends with the client's own answer**, or with a timeout. After a timeout, the
//!   client is sent `Awake`, but is not asked again before it has answered. So a late answer cannot
//!   be mistaken for the answer to a later request.
//! - A call of the checkpoint helper ends with the daemon's answer, which always arrives. If the
//!   answer leaves the state of the process open, the helper is asked repeatedly to settle it: **a
//!   process counts as awake, or as asleep, only when the helper has said so**.
//!
//! For each GPU that a client has attached, this module records the GPU where the client's process
//! last was. A restore, `Awake`, a move before the client wakes, and the way back after a failed
//! restore need no other record.
//!
//! Other parts of sleep:
//!
//! - `foreign.rs`: clients whose processes other programs checkpoint.
//! - `presence.rs`: what follows from a change of a client's sleep.
//! - `model/sleep.rs`, `gpu/returning.rs`: which client sleeps, and when; room for a wake.
//! - `model/moves.rs`, `quota/coming.rs`: moves to another GPU, drained GPUs. `quota/asleep.rs`:
//!   limits of sleeping clients.
//! - The daemon's `core/sleep.rs`, `core/paused.rs`, `core/moves.rs`: driver versions, and requests
//!   to pause, move or drain. `checkpoint/mod.rs`: starts helpers. `src/checkpoint/main.rs`: the
//!   helper.
//! - The library's `client/thread/sleep.rs`: prepares and wakes the process. `connection/presence.rs`,
//!   `driver/function.rs`, `driver/entries.rs`: keep threads out of the driver. `gpu/identity.rs`:
//!   UUIDs after a move. `client/exit.rs`: exit of a sleeping process.

mod foreign;

pub(crate) use foreign::Foreign;

use crate::api::*;
use nvshare_wire::moves::MAX_MOVES;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a client may take to prepare. The time is longer than the library itself waits.
const PREPARATION: Duration = Duration::from_secs(40);
/// How long a client that is moved while asleep waits for other clients to acknowledge lower
/// limits. The time is a little longer than the quota waits for acknowledgements.
const ROOM: Duration = Duration::from_secs(5);
/// The first and the longest delay before a failed step is retried. The delay doubles with each
/// failure.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    #[default]
    Awake,
    Preparing,
    Checkpointing,
    Asleep,
    /// The client waits for room. The client with the lowest number is served first.
    Waking(u64),
    Restoring,
    /// The scheduler does not know whether the process runs. `asked`: the helper is checking.
    Settling {
        asked: bool,
    },
    /// The client can never be restored, and its calls return the driver's error.
    Lost,
    /// Another program has locked or checkpointed the client's process.
    Foreign(Foreign),
}

/// The action that the scheduler must take after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Nothing,
    Prepare,
    /// Call the helper.
    Call(SleepOperation),
    /// The client is off its GPUs and stays asleep.
    Sleeps,
    /// The client is off its GPUs and waits for room to be restored.
    Wakes,
    /// The client runs and has to be notified, because it was asked to prepare.
    Runs,
    /// The client runs and already knows that it is awake.
    Stays,
    /// The client can never run again.
    IsLost,
    /// Another program keeps the client from running.
    IsKept(Foreign),
    /// Another program may restore the client.
    AllowRestore,
}

/// A client that is not awake, should sleep, or failed to sleep.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
struct Entry {
    state: Stage,
    /// The client should sleep.
    is_wanted: bool,
    /// The client is held off its GPUs until it is resumed. Otherwise the client sleeps only until
    /// one of its threads calls the driver.
    is_paused: bool,
    /// One of the client's GPUs is drained. The client sleeps until the drain ends or the client is
    /// moved to another GPU.
    is_drained: bool,
    /// GPUs that the client could not be moved to since its own GPU was drained.
    missed: GpuSet,
    /// The client's unanswered move to another GPU.
    moving: Option<Moving>,
    /// The GPUs that the client was moved to. Each key is a new GPU, and its value is the GPU where
    /// the client's process was.
    homes: BTreeMap<GpuId, GpuId>,
    /// The outcome of a move that has not been reported yet.
    answer: Option<(Move, Option<MoveObstacle>)>,
    /// The client has not answered a preparation that timed out.
    owes_answer: bool,
    obstacle: Option<SleepObstacle>,
    /// When the client last failed to sleep.
    tried: Option<Time>,
    /// Why the client wakes, and when it began to wake.
    waking_for: Option<(WakeReason, Time)>,
    woken: Option<Woken>,
    backoff: Duration,
    /// The delay before the helper is asked again for the state of the process. 0: the state is
    /// known, or the helper is asked immediately.
    unknown: Duration,
    /// The time of the client's next check.
    due: Option<Time>,
}

/// A move that has not been answered.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Moving {
    to: Move,
    /// The client's attachment is on the new GPU, where the client has not been restored yet. While
    /// this is false, the client still has to sleep.
    is_moved: bool,
    /// When the sleeping client stops waiting for limits to leave room on the new GPU.
    until: Option<Time>,
}

impl Entry {
    fn retry(&mut self, now: Time) {
        self.backoff = (self.backoff * 2).clamp(AGAIN.0, AGAIN.1);
        self.due = Some(now + self.backoff);
    }

    /// Whether the client has to sleep in order to be moved.
    fn is_to_move(&self) -> bool {
        self.moving.is_some_and(|moving| !moving.is_moved)
    }

    /// Whether the client must sleep even if it has work.
    fn is_ordered(&self) -> bool {
        self.is_paused || self.is_to_move() || (self.is_drained && !self.is_left_alone())
    }

    /// Whether the client should be off its GPUs.
    fn is_to_sleep(&self) -> bool {
        self.is_wanted || self.is_drained
    }

    /// Whether the client failed to sleep and will be asked again later.
    fn is_left_alone(&self) -> bool {
        self.state == Stage::Awake && (self.due.is_some() || self.owes_answer)
    }

    fn answer_move(&mut self, why: Option<MoveObstacle>) {
        if let Some(moving) = self.moving.take() {
            self.answer = Some((moving.to, why));
        }
    }

    /// Records why the client stays awake. A paused or drained client is asked again later.
    fn cannot(&mut self, now: Time, why: SleepObstacle) {
        self.answer_move(Some(MoveObstacle::Sleep(why)));
        (self.state, self.obstacle, self.tried) = (Stage::Awake, Some(why), Some(now));
        self.is_wanted &= self.is_paused;
        self.due = None;
        if self.is_to_sleep() {
            self.retry(now);
        }
    }

    fn runs(&mut self) {
        (self.state, self.due, self.backoff) = (Stage::Awake, None, Duration::ZERO);
    }

    fn is_asleep(&mut self, number: u64) -> Step {
        (self.due, self.backoff) = (None, Duration::ZERO);
        if self.is_to_sleep() {
            (self.state, self.obstacle) = (Stage::Asleep, None);
            return Step::Sleeps;
        }
        self.state = Stage::Waking(number);
        Step::Wakes
    }
}

/// The clients that are not awake, should sleep, or failed to sleep.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Sleep {
    clients: BTreeMap<ClientId, Entry>,
}

impl Sleep {
    fn state_of(&self, client: ClientId) -> Stage {
        self.clients.get(&client).map_or(Stage::Awake, |entry| entry.state)
    }

    pub fn forget(&mut self, client: ClientId) {
        self.clients.remove(&client);
    }

    /// Whether a client is barred from running: it is not awake, or it is paused, drained or about
    /// to move.
    pub fn is_held_off(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|entry| entry.is_ordered() || entry.state != Stage::Awake)
    }

    /// Whether the client sleeps, and is known to have nothing on its GPUs.
    pub fn is_away(&self, client: ClientId) -> bool {
        matches!(self.state_of(client), Stage::Asleep | Stage::Waking(_) | Stage::Lost)
    }

    /// Whether a client is leaving its GPUs. A client in `Settling` does not count, because it may
    /// never leave its GPUs: its stage does not change while its process is stopped.
    pub fn is_leaving(&self, client: ClientId) -> bool {
        matches!(self.state_of(client), Stage::Preparing | Stage::Checkpointing)
    }

    /// When a client last failed to sleep.
    pub fn tried(&self, client: ClientId) -> Option<Time> {
        self.clients.get(&client)?.tried
    }

    /// Whether a client must sleep even if it has work. Paused and drained clients, and clients
    /// about to be moved, must sleep.
    pub fn is_ordered(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(Entry::is_ordered)
    }

    /// Whether an awake client should be asked to prepare as soon as possible.
    pub fn is_to_prepare(&self, client: ClientId) -> bool {
        let is_to = |entry: &Entry| {
            entry.state == Stage::Awake
                && (entry.is_to_sleep() || entry.is_to_move())
                && !entry.owes_answer
                && entry.due.is_none()
        };
        self.clients.get(&client).is_some_and(is_to)
    }

    /// Whether a client waits for room.
    pub fn is_waking(&self, client: ClientId) -> bool {
        matches!(self.state_of(client), Stage::Waking(_) | Stage::Foreign(Foreign::Waking(_)))
    }

    /// Clients that wait for room, in the order in which they are served.
    pub fn waking(&self) -> Vec<ClientId> {
        let number = |(client, entry): (&ClientId, &Entry)| match entry.state {
            Stage::Waking(number) | Stage::Foreign(Foreign::Waking(number)) => Some((number, *client)),
            _ => None,
        };
        let mut waking: Vec<(u64, ClientId)> = self.clients.iter().filter_map(number).collect();
        waking.sort_unstable();
        waking.into_iter().map(|(_, client)| client).collect()
    }

    /// The time of a client's next check.
    pub fn due(&self, client: ClientId) -> Option<Time> {
        self.clients.get(&client)?.due
    }

    pub fn view(&self, client: ClientId) -> SleepView {
        let entry = self.clients.get(&client);
        let phase = match self.state_of(client) {
            Stage::Awake => SleepPhase::Awake,
            Stage::Preparing => SleepPhase::Preparing,
            Stage::Checkpointing => SleepPhase::Checkpointing,
            Stage::Asleep => SleepPhase::Asleep,
            Stage::Waking(_) | Stage::Foreign(Foreign::Waking(_)) => SleepPhase::Waking,
            Stage::Restoring | Stage::Foreign(Foreign::Restoring) => SleepPhase::Restoring,
            Stage::Settling { .. } => SleepPhase::Settling,
            Stage::Lost => SleepPhase::Lost,
            Stage::Foreign(Foreign::Locked) => SleepPhase::Locked,
            Stage::Foreign(Foreign::Reserved) => SleepPhase::Checkpointed,
            Stage::Foreign(Foreign::Lent) => SleepPhase::Lent,
        };
        SleepView {
            phase,
            paused: entry.is_some_and(|entry| entry.is_paused),
            obstacle: entry.and_then(|entry| entry.obstacle),
            drained: entry.is_some_and(|entry| entry.is_drained),
            moving: entry.and_then(|entry| entry.moving).map(|moving| moving.to),
            woken: entry.and_then(|entry| entry.woken),
        }
    }

    /// Requests that the client sleep. `paused`: the client sleeps until it is resumed.
    pub fn want(&mut self, client: ClientId, paused: bool) {
        let entry = self.clients.entry(client).or_default();
        entry.is_wanted = true;
        entry.is_paused |= paused;
        entry.waking_for = None;
        if let Stage::Waking(_) = entry.state {
            entry.state = Stage::Asleep;
            entry.answer_move(None); // the client is restored later
        }
    }

    pub fn is_drained(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|entry| entry.is_drained)
    }

    /// Records whether a GPU that a client has attached is drained. `number` must increase with
    /// each call.
    pub fn set_drained(&mut self, client: ClientId, is_drained: bool, number: u64) -> Step {
        if !is_drained && !self.is_drained(client) {
            return Step::Nothing;
        }
        let entry = self.clients.entry(client).or_default();
        entry.is_drained = is_drained;
        entry.missed.clear();
        match entry.state {
            Stage::Awake => {
                (entry.due, entry.obstacle) = (None, None);
                Step::Stays
            }
            Stage::Waking(_) if is_drained => {
                entry.state = Stage::Asleep;
                entry.answer_move(None);
                Step::Nothing
            }
            Stage::Asleep if !entry.is_to_sleep() => entry.is_asleep(number),
            _ => Step::Nothing,
        }
    }

    /// Requests a move of a client that has attached `to.from`. Returns why the client cannot be
    /// moved.
    pub fn want_move(&mut self, client: ClientId, to: Move) -> Option<MoveObstacle> {
        let entry = self.clients.entry(client).or_default();
        match entry.state {
            _ if entry.moving.is_some() || entry.homes.len() >= MAX_MOVES => return Some(MoveObstacle::Moving),
            Stage::Lost => return Some(MoveObstacle::Sleep(SleepObstacle::Failed)),
            // The process may stay locked for any time.
            Stage::Foreign(_) => return Some(MoveObstacle::Sleep(SleepObstacle::Foreign)),
            Stage::Awake if entry.owes_answer => return Some(MoveObstacle::Sleep(SleepObstacle::Silent)),
            Stage::Awake => entry.due = None, // the client is asked to prepare without delay
            _ => {}
        }
        entry.moving = Some(Moving { to, is_moved: false, until: None });
        None
    }

    /// A client's pending move, for which the client still has to sleep.
    pub fn coming(&self, client: ClientId) -> Option<Move> {
        self.clients.get(&client).filter(|entry| entry.is_to_move())?.moving.map(|moving| moving.to)
    }

    /// A client's pending move, if the client is asleep and can be moved now.
    pub fn due_move(&self, client: ClientId) -> Option<Move> {
        let entry = self.clients.get(&client).filter(|entry| entry.is_to_move())?;
        matches!(entry.state, Stage::Asleep | Stage::Waking(_)).then_some(entry.moving?.to)
    }

    /// Whether a sleeping client may still wait for room on the GPU that it will move to. A waking
    /// client does not wait for such room.
    pub fn waits_for_room(&mut self, now: Time, client: ClientId) -> bool {
        let Some(entry) = self.clients.get_mut(&client).filter(|entry| entry.state == Stage::Asleep) else {
            return false;
        };
        let Some(moving) = entry.moving.as_mut() else { return false };
        let until = *moving.until.get_or_insert(now + ROOM);
        if now < until {
            entry.due = Some(entry.due.map_or(until, |due| due.min(until)));
        }
        now < until
    }

    /// Cancels the move of a sleeping client.
    pub fn cannot_move(&mut self, client: ClientId, why: MoveObstacle) {
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.missed.extend(entry.moving.map(|moving| moving.to.to));
            entry.answer_move(Some(why));
        }
    }

    /// Records that a client could not be restored on a GPU.
    pub fn misses(&mut self, client: ClientId, id: GpuId) {
        self.clients.get_mut(&client).into_iter().for_each(|entry| entry.missed.extend([id]));
    }

    /// Whether an attempt to move a client to that GPU has failed since the client's own GPU was
    /// drained.
    pub fn has_missed(&self, client: ClientId, id: GpuId) -> bool {
        self.clients.get(&client).is_some_and(|entry| entry.missed.contains(&id))
    }

    /// Records that the attachment of a sleeping client is now on another GPU. `is_drained`:
    /// another of the client's GPUs is still drained.
    pub fn moved(&mut self, client: ClientId, to: Move, is_drained: bool, number: u64) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let home = entry.homes.remove(&to.from).unwrap_or(to.from);
        if home != to.to {
            entry.homes.insert(to.to, home);
        }
        if let Some(moving) = entry.moving.as_mut().filter(|moving| moving.to == to) {
            moving.is_moved = true;
        }
        entry.is_drained = is_drained;
        match entry.state {
            Stage::Waking(_) if is_drained => entry.state = Stage::Asleep,
            Stage::Asleep if !entry.is_to_sleep() && entry.due.is_none() => entry.state = Stage::Waking(number),
            _ => {}
        }
        if entry.is_to_sleep() && entry.moving.is_some_and(|moving| moving.is_moved) {
            entry.answer_move(None);
        }
    }

    /// Handles a client that has detached a GPU. The client's move from or to that GPU ends.
    pub fn detached(&mut self, client: ClientId, id: GpuId) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        entry.homes.remove(&id);
        let is_of = |moving: &Moving| id == if moving.is_moved { moving.to.to } else { moving.to.from };
        if entry.moving.as_ref().is_some_and(is_of) {
            entry.answer_move(Some(MoveObstacle::NotThere));
        }
    }

    /// The moves that took a client to its present GPUs. Each move starts at the GPU where the
    /// client's process was.
    pub fn moves(&self, client: ClientId) -> Vec<Move> {
        let homes = self.clients.get(&client).map(|entry| &entry.homes);
        homes.into_iter().flatten().map(|(to, from)| Move { from: *from, to: *to }).collect()
    }

    /// The moves that return a client to the GPUs where its process was. The moves are made if the
    /// process cannot be restored on its new GPUs.
    pub fn ways_back(&self, client: ClientId) -> Vec<Move> {
        let moves = if self.state_of(client) == Stage::Lost { Vec::new() } else { self.moves(client) };
        moves.into_iter().map(|Move { from, to }| Move { from: to, to: from }).collect()
    }

    /// Returns the moves of [`Self::moves`] and clears them, because the client is being notified.
    pub fn take_moves(&mut self, client: ClientId) -> Vec<Move> {
        let moves = self.moves(client);
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.homes.clear();
        }
        moves
    }

    /// Whether the helper's answer says that a client was not restored on its new GPUs.
    pub fn has_failed_to_move(&self, client: ClientId, outcome: SleepOutcome) -> bool {
        let is_restored = |entry: &Entry| matches!(entry.state, Stage::Restoring | Stage::Settling { asked: true });
        outcome == SleepOutcome::Asleep
            && self.clients.get(&client).is_some_and(|entry| is_restored(entry) && !entry.homes.is_empty())
    }

    /// Returns and clears the outcome of a move.
    pub fn take_answer(&mut self, client: ClientId) -> Option<(Move, Option<MoveObstacle>)> {
        self.clients.get_mut(&client)?.answer.take()
    }

    /// Handles the connection of a client that an earlier scheduler told to sleep.
    pub fn found(&mut self, client: ClientId) -> Step {
        let entry = self.clients.entry(client).or_default();
        if entry.state != Stage::Awake {
            return Step::Nothing;
        }
        entry.is_wanted = true;
        entry.state = Stage::Settling { asked: true };
        Step::Call(SleepOperation::Settle)
    }

    /// Wakes the client. `resumed`: the client wakes even if it is paused. `number` must increase
    /// with each call.
    pub fn wake(&mut self, now: Time, client: ClientId, resumed: bool, number: u64) -> Step {
        let Some(entry) = self.clients.get_mut(&client).filter(|entry| resumed || !entry.is_paused) else {
            return Step::Nothing;
        };
        (entry.is_wanted, entry.is_paused) = (false, false);
        if resumed && entry.is_to_move() {
            entry.answer_move(Some(MoveObstacle::Resumed));
        }
        if entry.state != Stage::Awake {
            let reason = if resumed { WakeReason::Resumed } else { WakeReason::Call };
            entry.waking_for.get_or_insert((reason, now));
        }
        match entry.state {
            Stage::Asleep if !entry.is_drained => entry.is_asleep(number),
            Stage::Awake => {
                if !entry.is_drained {
                    entry.due = None;
                }
                Step::Stays
            }
            _ => Step::Nothing, // the present step continues
        }
    }

    /// Starts to prepare a client that should sleep and has no known obstacle.
    pub fn prepare(&mut self, now: Time, client: ClientId) -> Step {
        let Some(entry) = self.clients.get_mut(&client).filter(|entry| entry.state == Stage::Awake) else {
            return Step::Nothing;
        };
        (entry.state, entry.due) = (Stage::Preparing, Some(now + PREPARATION));
        Step::Prepare
    }

    /// Records that a client cannot be prepared now and stays awake.
    pub fn cannot_prepare(&mut self, now: Time, client: ClientId, why: SleepObstacle) {
        if let Some(entry) = self.clients.get_mut(&client).filter(|entry| entry.state == Stage::Awake) {
            entry.cannot(now, why);
        }
    }

    /// Handles the client's answer that it is prepared. `obstacle`: the reason why it still cannot
    /// sleep.
    pub fn ready(&mut self, now: Time, client: ClientId, obstacle: Option<SleepObstacle>) -> Step {
        let Some(entry) = self.clients.get_mut(&client) else { return Step::Nothing };
        entry.owes_answer = false;
        if entry.state != Stage::Preparing {
            return Step::Nothing; // the client was notified in the meantime that it is awake
        }
        match obstacle {
            Some(why) => entry.cannot(now, why),
            None if entry.is_to_sleep() || entry.is_to_move() => {
                (entry.state, entry.due) = (Stage::Checkpointing, None);
                return Step::Call(SleepOperation::Sleep);
            }
            None => entry.runs(),
        }
        Step::Runs
    }

    /// Handles the client's answer that it refuses to prepare and is awake.
    pub fn refused(&mut self, now: Time, client: ClientId, why: SleepObstacle) -> Step {
        let Some(entry) = self.clients.get_mut(&client) else { return Step::Nothing };
        entry.owes_answer = false;
        if entry.state != Stage::Preparing {
            return Step::Nothing;
        }
        entry.cannot(now, why);
        Step::Stays
    }

    /// Starts the restore of a waking client that has room.
    pub fn has_room(&mut self, client: ClientId) -> Step {
        let Some(entry) = self.clients.get_mut(&client) else { return Step::Nothing };
        match entry.state {
            Stage::Waking(_) => {
                entry.state = Stage::Restoring;
                Step::Call(SleepOperation::Wake)
            }
            Stage::Foreign(Foreign::Waking(_)) => {
                entry.state = Stage::Foreign(Foreign::Restoring);
                Step::AllowRestore
            }
            _ => Step::Nothing,
        }
    }

    /// Handles the helper's answer about a client.
    pub fn answered(&mut self, now: Time, client: ClientId, outcome: SleepOutcome, number: u64) -> Step {
        let Some(entry) = self.clients.get_mut(&client) else { return Step::Nothing };
        let is_awaited =
            matches!(entry.state, Stage::Checkpointing | Stage::Restoring | Stage::Settling { asked: true });
        if !is_awaited {
            return Step::Nothing;
        }
        if outcome != SleepOutcome::Unknown {
            entry.unknown = Duration::ZERO;
        }
        match outcome {
            SleepOutcome::Runs => {
                // A restored client that should sleep again is prepared again.
                match (entry.is_to_sleep() || entry.is_to_move()) && entry.state != Stage::Restoring {
                    true => entry.cannot(now, SleepObstacle::Failed),
                    false => entry.runs(),
                }
                if entry.moving.is_some_and(|moving| moving.is_moved) {
                    entry.answer_move(None);
                }
                if let Some((by, since)) = entry.waking_for.take() {
                    entry.woken = Some(Woken { by, took: now.saturating_sub(since) });
                }
                Step::Runs
            }
            // If a restore failed but the process is not lost, the restore is retried after a
            // delay.
            SleepOutcome::Asleep if entry.state == Stage::Restoring && !entry.is_to_sleep() => {
                entry.state = Stage::Asleep;
                entry.retry(now);
                Step::Sleeps
            }
            SleepOutcome::Asleep => entry.is_asleep(number),
            // The first time, another helper is asked immediately, because the first helper may
            // have died without trying. Later attempts are delayed.
            SleepOutcome::Unknown if entry.unknown.is_zero() => {
                (entry.state, entry.unknown) = (Stage::Settling { asked: true }, AGAIN.0);
                Step::Call(SleepOperation::Settle)
            }
            SleepOutcome::Unknown => {
                (entry.state, entry.due) = (Stage::Settling { asked: false }, Some(now + entry.unknown));
                entry.unknown = (entry.unknown * 2).min(AGAIN.1);
                Step::Nothing
            }
            SleepOutcome::Lost => {
                (entry.state, entry.due) = (Stage::Lost, None);
                entry.answer_move(Some(MoveObstacle::Sleep(SleepObstacle::Failed)));
                Step::IsLost
            }
        }
    }

    /// Handles a client whose check is due.
    pub fn look(&mut self, now: Time, client: ClientId, number: u64) -> Step {
        let Some(entry) = self.clients.get_mut(&client).filter(|entry| entry.due.is_some_and(|due| due <= now)) else {
            return Step::Nothing;
        };
        entry.due = None;
        match entry.state {
            Stage::Preparing => {
                entry.owes_answer = true;
                entry.cannot(now, SleepObstacle::Silent);
                Step::Runs
            }
            Stage::Settling { asked: false } => {
                entry.state = Stage::Settling { asked: true };
                Step::Call(SleepOperation::Settle)
            }
            Stage::Asleep if !entry.is_to_sleep() => {
                entry.state = Stage::Waking(number);
                Step::Wakes
            }
            _ => Step::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
