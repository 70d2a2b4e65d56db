//! Clients that leave, so that their processes can be saved to disk. A client that has left keeps its
//! bytes, group and place until its process connects again or ends, or `ABSENCE` has passed.
//!
//! The daemon holds a pidfd of the process. So the process's PID belongs to no other process, and
//! identifies the process when it connects again.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use nvshare_wire::SchedulerMessage;
use nvshare_wire::client::LeaveRefusal;
use zbus::fdo;

use super::model::{Departure, Model};
use super::routing::Core;
use crate::bus;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Event, SleepPhase};

/// Maximum time for which a client that has left keeps its bytes.
pub const ABSENCE: Duration = Duration::from_secs(600);

/// A program that is to be hibernated.
#[derive(Debug)]
pub struct Candidate {
    pub client: ClientId,
    pub pid: u32,
    pub uid: u32,
    /// The process's pidfd.
    pub process: OwnedFd,
    /// The program was paused before.
    pub was_paused: bool,
}

/// Whether a program sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sleeps {
    Yes,
    NotYet,
    /// The program cannot sleep now, for this reason.
    No(&'static str),
    /// The program has ended.
    Gone,
}

impl Model {
    pub(super) fn note_departure(&mut self, client: ClientId, refusal: Option<LeaveRefusal>) {
        let Some(departure) = self.clients.get_mut(&client).and_then(|entry| entry.departure.as_mut()) else { return };
        if let Departure::Asked = departure {
            *departure = refusal.map_or_else(|| Departure::Left(Rc::default()), Departure::Refused);
        }
    }

    /// How far a client has left.
    pub fn departure(&self, client: ClientId) -> Option<Departure> {
        self.clients.get(&client)?.departure.clone()
    }

    /// True if a client is leaving or has left, so that its process may be stopped at any moment.
    pub(super) fn is_departing(&self, client: ClientId) -> bool {
        matches!(self.departure(client), Some(Departure::Asked | Departure::Left(_)))
    }

    /// The clients of a process that have left. The process itself connects again. Notifies their tasks.
    pub(super) fn absent_clients_of(&self, identity: &Identity) -> Vec<ClientId> {
        let is_back = |client: &ClientId| {
            let entry = self.clients.get(client).filter(|entry| entry.identity.pid == identity.pid && identity.pid > 0);
            match entry.and_then(|entry| entry.departure.as_ref()) {
                Some(Departure::Left(back)) => {
                    back.notify_one();
                    true
                }
                _ => false,
            }
        };
        self.all_clients().into_iter().filter(is_back).collect()
    }
}

impl Core {
    /// Pauses a program, so that it can be hibernated. `users`: the users whose programs the caller may
    /// control.
    ///
    /// # Errors
    /// No program has this process ID, or the program cannot be hibernated.
    pub fn begin_hibernation(&mut self, pid: u32, users: &BTreeSet<u32>) -> fdo::Result<Candidate> {
        let clients = self.model.program_of(pid, users)?;
        let cannot = |why: &str| Err(fdo::Error::Failed(format!("cannot hibernate process {pid}: {why}")));
        let [client] = clients[..] else { return cannot("it has loaded the library several times") };
        if self.model.departure(client).is_some() {
            return cannot("it is being hibernated already");
        }
        let Some(entry) = self.model.clients.get(&client) else { return cannot("it has ended") };
        let uid = entry.identity.uid;
        let process = entry.process.as_ref().and_then(|process| process.get_ref().try_clone().ok());
        let Some(process) = process else { return cannot("the scheduler cannot see its process") };
        if entry.gpus.is_empty() {
            return cannot("it has not used a GPU yet");
        }
        let was_paused = self.model.machine.sleep_of(client).paused;
        // Not saved as a pause: if this daemon is killed, the program continues with the next daemon.
        self.with_host(|_, _, events| events.push(Event::SleepWanted { client, paused: true }));
        Ok(Candidate { client, pid, uid, process, was_paused })
    }

    /// Whether a paused program sleeps.
    pub fn sleeps(&self, client: ClientId) -> Sleeps {
        if !self.model.clients.contains_key(&client) {
            return Sleeps::Gone;
        }
        let sleep = self.model.machine.sleep_of(client);
        match (sleep.phase, sleep.obstacle) {
            (SleepPhase::Asleep, _) => Sleeps::Yes,
            _ if !sleep.paused => Sleeps::No("it was resumed"),
            (SleepPhase::Awake, Some(why)) => Sleeps::No(bus::sleep_obstacle_name(why)),
            (SleepPhase::Lost, _) => Sleeps::No("the driver cannot restore it"),
            _ => Sleeps::NotYet,
        }
    }

    /// Removes the clients of a process that have left. The process connects again, and kept its bytes until
    /// now.
    pub(super) fn end_absence(&mut self, identity: &Identity) {
        self.model.absent_clients_of(identity).into_iter().for_each(|client| self.disconnect(client, "is back"));
    }

    /// Asks a sleeping client to leave.
    pub fn ask_to_leave(&mut self, client: ClientId) {
        if let Some(entry) = self.model.clients.get_mut(&client) {
            entry.departure = Some(Departure::Asked);
        }
        self.model.send(client, SchedulerMessage::Leave {});
    }

    /// Ends a hibernation that has failed. The program continues. If its client has left, it continues when
    /// its process connects again.
    pub fn end_hibernation(&mut self, candidate: &Candidate) {
        let is_absent = matches!(self.model.departure(candidate.client), Some(Departure::Left(_)));
        if let Some(entry) = self.model.clients.get_mut(&candidate.client).filter(|_| !is_absent) {
            entry.departure = None;
        }
        if !candidate.was_paused {
            self.with_host(|_, model, events| {
                let clients = model.program(candidate.pid).unwrap_or_default().into_iter();
                let present = clients.filter(|client| !model.is_departing(*client));
                events.extend(present.map(|client| Event::Resumed { client }));
            });
        }
    }

    /// The name of a client's program, for the log.
    pub fn name_of(&self, client: ClientId) -> String {
        self.model.identity(client).map_or_else(String::new, |identity| identity.label().to_string())
    }
}
