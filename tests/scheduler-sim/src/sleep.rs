//! Clients that are put to sleep and woken. Libraries prepare, refuse or never answer, and the
//! helper may fail or die. The checks verify that only a prepared process is checkpointed, and that
//! no restore runs out of memory.

use crate::{client::Phase, world::Happening, *};
use std::collections::VecDeque;

/// The longest time that a library takes to prepare.
const MOST: Duration = Duration::from_secs(30);

/// A client's process, and the state of its library during a sleep.
#[derive(Debug, Default)]
pub(crate) struct Sleeper {
    pub(crate) stage: Stage,
    /// Whether the process has no memory on its GPUs.
    pub(crate) is_off: bool,
    /// Whether the client has asked to be woken.
    asked: bool,
    /// Commands that have arrived since the client was prepared.
    kept: VecDeque<Command>,
    /// The GPUs that have been replaced since the process was taken off its GPUs. The key is the
    /// GPU that the process was on, and the value is the GPU that the client has attached.
    moves: BTreeMap<GpuId, GpuId>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    #[default]
    Awake,
    Preparing {
        since: Time,
    },
    Prepared,
}

/// The odds of each failure, as one in `n`.
#[derive(Debug, Clone, Copy)]
pub struct Sleeps {
    /// The time after which no more clients are put to sleep.
    pub until: Time,
    pub refused: u64,
    pub silent: u64,
    pub failed: u64,
    pub died: u64,
}

impl World {
    /// From now on, puts clients to sleep, and pauses and resumes them at random. Each client's
    /// context then takes the memory that `Settings::context` gives.
    pub fn put_to_sleep(&mut self, sleeps: Sleeps) {
        self.sleeps = Some(sleeps);
        self.measure();
        let gpus: Vec<GpuId> = self.totals.keys().copied().collect();
        gpus.into_iter().for_each(|gpu| self.feed(Event::OtherPrograms { gpu, present: false }));
        self.at(self.now, Happening::SleepSomebody);
    }

    /// Bytes on a GPU that are not clients' memory. A context counts from the time when the client
    /// may create it.
    pub(crate) fn overhead_now(&self, gpu: GpuId) -> u64 {
        let context = self.machine.settings().context;
        let has_context = |id: &ClientId| {
            self.machine
                .client(*id)
                .is_some_and(|c| c.attachments.iter().any(|attachment| attachment.gpu == gpu && attachment.attached))
        };
        let there = self.models.iter().filter(|(id, m)| !m.sleeper.is_off && has_context(id));
        self.overheads[&gpu] + there.count() as u64 * context
    }

    pub(crate) fn sleep_somebody(&mut self) {
        let Some(sleeps) = self.sleeps else { return };
        let connected: Vec<ClientId> = self.connected.iter().copied().collect();
        if self.now >= sleeps.until {
            let gpus: Vec<GpuId> = self.totals.keys().copied().collect();
            for gpu in gpus {
                self.feed(Event::Drain { gpu, drained: false });
                self.feed(Event::Failing { gpu, failing: false });
            }
            return connected.into_iter().for_each(|client| self.feed(Event::Resumed { client }));
        }
        let client = match connected.len() as u64 {
            0 => ClientId(0),
            count => connected[self.rng.below(count) as usize],
        };
        match self.rng.below(8) {
            4..6 => self.migrate_somebody(client),
            6..8 => self.drain_something(),
            0 => self.feed(Event::Resumed { client }),
            1 => self.feed(Event::SleepWanted { client, paused: true }),
            _ => self.feed(Event::SleepWanted { client, paused: false }),
        }
        let next = self.now + self.rng.between(ms(1), ms(700));
        self.at(next, Happening::SleepSomebody);
    }

    fn drain_something(&mut self) {
        let gpus: Vec<GpuId> = self.totals.keys().copied().collect();
        let gpu = gpus[self.rng.below(gpus.len() as u64) as usize];
        let clients: Vec<ClientId> = self.connected.iter().copied().collect();
        let mut some = || Some(gpus.iter().filter(|_| self.rng.one_in(2)).copied().collect());
        let allowed = clients.into_iter().map(|client| (client, some())).collect();
        self.feed(Event::Kinds { kinds: vec![gpus.iter().copied().collect()] });
        self.feed(Event::Allowed { allowed });
        let drained = !self.rng.one_in(3);
        self.has_drained = true;
        if self.rng.one_in(4) {
            self.feed(Event::Failing { gpu, failing: drained });
        }
        self.feed(Event::Drain { gpu, drained });
    }

    fn migrate_somebody(&mut self, client: ClientId) {
        let gpus: Vec<GpuId> = self.totals.keys().copied().collect();
        let mut any = || gpus[self.rng.below(gpus.len() as u64) as usize];
        let (any, to) = (any(), any());
        let own = self.models.get(&client).and_then(|m| m.plan.gpus.first().copied());
        self.feed(Event::Migrate { client, from: own.unwrap_or(any), to });
    }

    /// In commands to migrated clients and in the clients' models, replaces the former GPU by the
    /// new one. The library and the daemon identify GPUs by slots, so they need no such step.
    pub(crate) fn move_clients(&mut self, commands: &mut [Command]) {
        for at in 0..commands.len() {
            let (before, [command, ..]) = commands.split_at_mut(at) else { return };
            match command {
                Command::Moved { client, from, to } => {
                    let both = Move { from: *from, to: *to };
                    let own = before.iter_mut().filter(|before| before.client() == Some(*client));
                    own.for_each(|command| rename(command, both));
                    self.move_client(*client, both);
                }
                Command::Migrated { client, .. } => {
                    let unanswered = self.migrations.get_mut(client).filter(|unanswered| **unanswered > 0);
                    match unanswered {
                        Some(unanswered) => *unanswered -= 1,
                        None => assert!(self.has_drained, "nobody asked for this"),
                    }
                }
                _ => {}
            }
        }
    }

    fn move_client(&mut self, id: ClientId, both @ Move { from, to }: Move) {
        let other = |gpu: &mut GpuId| *gpu = if *gpu == from { to } else { *gpu };
        for happening in self.queue.values_mut() {
            match happening {
                Happening::ToClient(client, command) if *client == id => rename(command, both),
                Happening::Wakes(client, nvshare_simulated_client::Timer::Retry(gpu)) if *client == id => other(gpu),
                Happening::Moved(client, gpu, ..) | Happening::Frees(client, gpu) if *client == id => other(gpu),
                Happening::FromClient(client, event) if *client == id => {
                    assert!(matches!(event, Event::WakeRequested { .. }), "{id:?} says {event:?} and is moved");
                }
                _ => {}
            }
        }
        self.asked.get_mut(&id).into_iter().for_each(|gpus| replace(gpus, both));
        for sums in [&mut self.allowed, &mut self.own_promised] {
            let bytes = sums.remove(&(id, from));
            sums.extend(bytes.map(|bytes| ((id, to), bytes)));
        }
        let Some(m) = self.models.get_mut(&id) else { return };
        assert!(m.sleeper.is_off, "{id:?} is moved, and is there");
        replace(&mut m.plan.gpus, both);
        m.client.migrated(from, to);
        m.hidden.clear();
        m.inbox.iter_mut().chain(&mut m.sleeper.kept).for_each(|command| rename(command, both));
        let home = m.sleeper.moves.iter().find(|(_, now)| **now == from).map_or(from, |(home, _)| *home);
        m.sleeper.moves.remove(&home);
        if home != to {
            m.sleeper.moves.insert(home, to);
        }
    }

    /// Handles a command about a client's sleep. Keeps commands that must wait for the end of the
    /// sleep.
    pub(crate) fn receive_asleep(&mut self, id: ClientId, command: Command) -> Option<Command> {
        let now = self.now;
        let sleeps = self.sleeps?;
        let m = self.models.get_mut(&id)?;
        match command {
            Command::PrepareSleep { client, .. } => {
                assert_eq!(m.sleeper.stage, Stage::Awake, "{id:?} is to prepare twice");
                if self.rng.one_in(sleeps.refused) {
                    self.say(id, Event::SleepRefused { client, why: SleepObstacle::Busy });
                } else if !self.rng.one_in(sleeps.silent) {
                    m.sleeper.stage = Stage::Preparing { since: now };
                    self.at(now, Happening::Prepares(id));
                }
                None
            }
            Command::Awake { moved, .. } => {
                assert_eq!(sorted(&moved), m.sleeper.moves, "what {id:?} is told");
                assert!(!m.sleeper.is_off, "{id:?} is told that it is awake, and is not");
                let kept = std::mem::take(&mut m.sleeper).kept;
                kept.into_iter().for_each(|command| self.receive(id, command));
                None
            }
            Command::Grant { .. } if m.sleeper.stage == Stage::Prepared => panic!("{command:?} to one that is asleep"),
            command if m.sleeper.stage == Stage::Prepared => {
                m.sleeper.kept.push_back(command);
                None
            }
            command => Some(command),
        }
    }

    /// Checks whether the memory of a client has been evicted while the client prepares.
    pub(crate) fn prepares(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        let Stage::Preparing { since } = m.sleeper.stage else { return };
        if m.stopped {
            return self.at(now + ms(100), Happening::Prepares(id));
        }
        let is_empty = m.plan.gpus.iter().all(|gpu| m.mapped(*gpu) == 0);
        if m.phase == Phase::Gpu || now > since + MOST {
            m.sleeper.stage = Stage::Awake;
            self.say(id, Event::SleepRefused { client: id, why: SleepObstacle::Busy });
        } else if is_empty {
            m.sleeper.stage = Stage::Prepared;
            self.say(id, Event::SleepReady { client: id });
        } else {
            self.at(now + ms(5), Happening::Prepares(id));
        }
    }

    /// A thread of a prepared client calls the driver.
    pub(crate) fn wants_driver(&mut self, id: ClientId) {
        // A process that is stopped but not prepared makes no calls.
        let wants = |m: &&mut Model| m.sleeper.stage == Stage::Prepared && !m.sleeper.asked;
        let Some(m) = self.models.get_mut(&id).filter(wants) else { return };
        m.sleeper.asked = true;
        self.say(id, Event::WakeRequested { client: id });
    }

    /// Calls the helper, which answers after some time.
    pub(crate) fn call_helper(&mut self, id: ClientId, operation: SleepOperation, moves: Vec<Move>) {
        let Some(m) = self.models.get(&id) else { return };
        let is_wake = operation == SleepOperation::Wake;
        assert_eq!(sorted(&moves), if is_wake { m.sleeper.moves.clone() } else { BTreeMap::new() }, "{operation:?}");
        assert!(m.sleeper.stage == Stage::Prepared, "{operation:?} of {id:?}, which is {:?}", m.sleeper);
        let at = self.now + self.rng.between(ms(1), ms(3000));
        self.at(at, Happening::Helps(id, operation));
    }

    pub(crate) fn helps(&mut self, id: ClientId, operation: SleepOperation) {
        let Some(sleeps) = self.sleeps.filter(|_| self.connected.contains(&id)) else { return };
        let (fails, dies) = (self.rng.one_in(sleeps.failed), self.rng.one_in(sleeps.died));
        let was_off = self.models.get(&id).is_some_and(|m| m.sleeper.is_off);
        let is_off = match operation {
            SleepOperation::Sleep => !fails || was_off,
            SleepOperation::Wake => fails && was_off,
            SleepOperation::Settle => was_off,
        };
        if was_off && !is_off {
            self.check_room(id);
        }
        let Some(m) = self.models.get_mut(&id) else { return };
        m.sleeper.is_off = is_off;
        let outcome = match is_off {
            _ if dies => SleepOutcome::Unknown,
            true => SleepOutcome::Asleep,
            false => SleepOutcome::Runs,
        };
        self.feed(Event::Checkpointed { client: id, outcome });
    }

    /// Checks that a restore has enough memory. A restore that runs out of memory cannot be
    /// repeated.
    fn check_room(&self, id: ClientId) {
        for gpu in &self.models[&id].plan.gpus {
            let there = self.models.iter().filter(|(id, m)| m.plan.gpus.contains(gpu) && self.connected.contains(id));
            let memory: u64 = there.map(|(_, m)| m.has(*gpu)).sum();
            let all = self.overhead_now(*gpu) + self.machine.settings().context + memory;
            let total = self.totals[gpu];
            assert!(all <= total, "{id:?} is restored to {gpu:?} with {all} of {total} in use at {:?}", self.now);
        }
    }
}

fn sorted(moves: &[Move]) -> BTreeMap<GpuId, GpuId> {
    moves.iter().map(|Move { from, to }| (*from, *to)).collect()
}

/// Replaces `both.from` with `both.to` in a command to a client that has migrated.
fn rename(command: &mut Command, both: Move) {
    match command {
        Command::Attached { gpu, .. }
        | Command::Limit { gpu, .. }
        | Command::Denied { gpu, .. }
        | Command::Allowance { gpu, .. }
        | Command::Reserved { gpu, .. }
        | Command::Prepare { gpu, .. }
        | Command::EvictionBlocked { gpu, .. }
        | Command::MappingFailed { gpu, .. } => *gpu = if *gpu == both.from { both.to } else { *gpu },
        Command::Grant { gpus, .. }
        | Command::Revoke { gpus, .. }
        | Command::Contended { gpus, .. }
        | Command::Waiting { gpus, .. }
        | Command::Undrainable { gpus, .. } => replace(gpus, both),
        _ => {}
    }
}

/// Replaces `from` with `to` in a set.
fn replace(gpus: &mut GpuSet, Move { from, to }: Move) {
    if gpus.remove(&from) {
        gpus.insert(to);
    }
}
