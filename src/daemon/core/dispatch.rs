//! Passes events to the scheduler and its commands to the clients.

use std::collections::VecDeque;
use std::time::Duration;

use nvshare_wire::client::StuckReason;
use nvshare_wire::{Moves, SchedulerMessage, scheduler as wire};
use tracing::debug;

use super::pressure;
use super::sleep::Checkpoint;
use super::state::Core;
use crate::daemon::transport::peer;
use crate::scheduler::{ClientId, Command, Denial, Event, GpuId, GpuSet, Move, Time};
use crate::sys::clock;

/// Minimum time between two ticks, so that a bug in the scheduler cannot use up a whole CPU.
const MIN_TICK: Duration = Duration::from_micros(100);

impl Core {
    /// Handles the scheduler's deadline. The watchdog for systemd also calls `tick`, to prove that the loop
    /// works.
    pub fn tick(&mut self) {
        self.armed = None;
        self.ticked = clock::now();
        self.apply(Event::Tick);
    }

    /// Passes an event to the scheduler, and carries out the resulting commands. A command can yield
    /// another event, which is handled next.
    pub(super) fn apply(&mut self, event: Event) {
        let now = clock::now();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.log_event(&event);
            self.note_event(&event, now);
            self.count_event(&event, now);
            let reporter = match &event {
                Event::Memory { client, gpu, .. } => Some((*client, *gpu)),
                _ => None,
            };
            let concerned = pressure::client_of(&event);
            let commands = self.recorder.handle(&mut self.machine, now, event);
            self.note_pressure(concerned, &commands, now);
            let allowed = commands.iter().filter_map(|command| match command {
                Command::Allowance { client, gpu, .. } => Some((*client, *gpu)),
                _ => None,
            });
            let moved: Vec<(ClientId, GpuId)> = reporter.into_iter().chain(allowed).collect();
            for (client, gpu) in moved {
                self.record_extent(client, gpu, now);
            }
            for command in commands {
                if let Some(answer) = self.carry_out(command, now) {
                    events.push_back(answer);
                }
            }
            self.count_held(now);
        }
        self.forget_gone();
        let deadline = self.machine.deadline().map(|at| at.max(self.ticked + MIN_TICK));
        if deadline != self.armed {
            self.timer.set(deadline);
            self.armed = deadline;
        }
    }

    /// Updates the daemon's own records after an event.
    fn note_event(&mut self, event: &Event, now: Time) {
        use Event::{Cancelled, Connected, Detached, Disconnected, Held, Released, Requested, Stuck};
        if let Connected { .. } | Disconnected { .. } | Held { .. } | Released { .. } | Requested { .. } = event {
            self.signals.turns.notify_one();
            self.signals.holders.notify_one();
        }
        match event {
            Cancelled { client, gpus } | Released { client, gpus, .. } => {
                for gpu in gpus {
                    self.stats(*client, *gpu).into_iter().for_each(|stats| stats.idle_since = now);
                }
            }
            Stuck { client, gpus, reason: StuckReason::UntrackedWork } => {
                for gpu in gpus {
                    self.stats(*client, *gpu).into_iter().for_each(|stats| stats.untracked_work = true);
                }
            }
            Detached { client, gpu } => {
                let Some(entry) = self.clients.get_mut(client) else { return };
                if entry.gpus.remove(gpu).is_some() && entry.lock.is_none() {
                    self.count_attachments(|count| count - 1);
                }
            }
            _ => {}
        }
    }

    /// Updates the daemon's own records after a command.
    fn note_command(&mut self, command: &Command, now: Time) {
        match command {
            Command::Grant { .. } => self.signals.holders.notify_one(),
            Command::Denied { client, gpu, bytes, why } => self.note_refusal(*client, *gpu, *bytes, *why, now),
            _ => {}
        }
    }

    /// Records the present bounds on a client's mapped memory, and its usage.
    pub(super) fn record_extent(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        let Some(extent) = self.machine.extent(client, gpu) else { return };
        self.note_bytes(client, gpu, now);
        if let Some(stats) = self.stats(client, gpu)
            && stats.report.is_some()
        {
            stats.history.record(now, extent);
        }
    }

    /// Carries out a command, usually by sending a message to its client. Returns the resulting event if
    /// the daemon can answer the command immediately.
    fn carry_out(&mut self, command: Command, now: Time) -> Option<Event> {
        self.log_command(&command, now);
        self.note_command(&command, now);
        self.count_command(&command, now);
        let slot_of = |client: &ClientId, gpu: &GpuId| self.clients.get(client).and_then(|c| c.session.slot(*gpu));
        let slots_of = |client: &ClientId, gpus: &GpuSet| {
            self.clients.get(client).map(|c| c.session.slots(gpus)).filter(|slots| *slots != 0)
        };
        let (client, message) = match command {
            Command::Attached { client, gpu } => (client, SchedulerMessage::Attached { slot: slot_of(&client, &gpu)? }),
            Command::Limit { client, gpu, bytes, seq, most, spare, max } => {
                let (slot, max) = (slot_of(&client, &gpu)?, max.unwrap_or(0));
                (client, SchedulerMessage::Limit { slot, bytes, seq, most, spare, max })
            }
            Command::Reserved { client, gpu, bytes } => {
                (client, SchedulerMessage::Reserved { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Denied { client, gpu, bytes, why } => {
                let what = match why {
                    Denial::NoContext => wire::Denial::Context,
                    Denial::Unmappable => wire::Denial::Mapping,
                    _ => wire::Denial::Limit,
                };
                (client, SchedulerMessage::Denied { slot: slot_of(&client, &gpu)?, bytes, what })
            }
            Command::Prepare { client, gpu, bytes } => {
                (client, SchedulerMessage::Prepare { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Allowance { client, gpu, seq, bytes } => {
                (client, SchedulerMessage::Allowance { slot: slot_of(&client, &gpu)?, seq, bytes })
            }
            Command::Grant { client, gpus } => (client, SchedulerMessage::Grant { gpus: slots_of(&client, &gpus)? }),
            Command::Revoke { client, gpus } => (client, SchedulerMessage::Revoke { gpus: slots_of(&client, &gpus)? }),
            Command::Contended { client, gpus, waiters, grace } => {
                let grace_us = u32::try_from(grace.as_micros()).unwrap_or(u32::MAX);
                (client, SchedulerMessage::Contended { gpus: slots_of(&client, &gpus)?, waiters, grace_us })
            }
            Command::Waiting { client, gpus, why } => {
                (client, SchedulerMessage::Waiting { gpus: slots_of(&client, &gpus)?, why })
            }
            Command::Probe { client } => {
                let entry = self.clients.get(&client)?;
                let stopped = peer::is_stopped(entry.identity.pid);
                if stopped && self.stopped.insert(client) {
                    debug!(client = client.0, pid = entry.identity.pid, "the process is stopped");
                    self.signals.stopped.notify_one();
                }
                return Some(Event::Stopped { client, stopped });
            }
            Command::Measure { gpu } => return self.remeasure(gpu, now),
            Command::Placed { client, gpus } => {
                self.placed(client, &gpus);
                return None;
            }
            Command::Unplaced { client, why } => {
                self.placement_failed(client, &why);
                return None;
            }
            Command::PrepareSleep { client, paused } => {
                if let Some(why) = self.sleep_obstacle(client, now) {
                    return Some(Event::SleepRefused { client, why });
                }
                if let Some(requests) = &self.checkpoints {
                    let _ = requests.send(Checkpoint::Prepare(client));
                }
                (client, SchedulerMessage::PrepareSleep { flags: if paused { wire::PAUSED } else { 0 } })
            }
            Command::Awake { client, moved } => {
                let moved = Moves::new(moved.iter().map(|Move { from, to }| (from.0, to.0))).unwrap_or_default();
                (client, SchedulerMessage::Awake { moved })
            }
            Command::Checkpoint { client, operation, moves } => {
                return self.request_checkpoint(client, operation, &moves);
            }
            Command::Migrated { client, to, why, .. } => {
                self.migrated(client, to, why);
                return None;
            }
            Command::Moved { client, from, to } => {
                self.moved(client, from, to, now);
                return None;
            }
            Command::RoomReady { .. } | Command::RoomRefused { .. } | Command::RoomEnded { .. } => {
                self.room_is(&command);
                return None;
            }
            Command::Undrainable { .. } | Command::EvictionBlocked { .. } | Command::MappingFailed { .. } => {
                return None;
            }
        };
        self.send(client, message);
        None
    }

    pub(super) fn send(&self, client: ClientId, message: SchedulerMessage) {
        if let Some(entry) = self.clients.get(&client) {
            entry.connection.send(message);
        }
    }

    /// Tells the scheduler which stopped processes have continued. Returns true if any process is still
    /// stopped.
    pub fn check_stopped(&mut self) -> bool {
        let running: Vec<ClientId> = self
            .stopped
            .iter()
            .filter(|client| !self.clients.get(client).is_some_and(|c| peer::is_stopped(c.identity.pid)))
            .copied()
            .collect();
        for client in running {
            self.stopped.remove(&client);
            debug!(client = client.0, "the process runs again");
            self.apply(Event::Stopped { client, stopped: false });
        }
        !self.stopped.is_empty()
    }
}
