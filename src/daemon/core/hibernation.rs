//! Clients that leave, so that their processes can be saved to disk. A client that has left keeps its
//! bytes, group and place until its process connects again or ends, or `ABSENCE` has passed.
//!
//! The daemon holds a pidfd of the process. So the process's PID belongs to no other process, and
//! identifies the process when it connects again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use nvshare_wire::SchedulerMessage;
use nvshare_wire::client::LeaveAnswer;
use tokio::sync::Notify;
use zbus::fdo;

use super::model::Model;
use crate::bus;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Event, GpuSet, SleepPhase};

/// Why a program that could not be saved, and has not connected again, can neither be hibernated nor resumed.
const RETURNING: &str = "it was not saved, and is about to continue. Try again in a second";

/// Maximum time for which a client that has left keeps its bytes.
pub const ABSENCE: Duration = Duration::from_secs(600);

/// How far a client has left.
#[derive(Debug, Clone)]
pub enum Departure {
    /// The client's program is to sleep, and to be checked.
    Preparing,
    /// The client was asked to leave.
    Asked,
    /// The client refuses to leave.
    Refused(LeaveAnswer),
    /// The client closes its connection, or has closed it. Notified when its process is back.
    Left(Rc<Notify>),
    /// The client has left as in `Left`, but was not saved. Its process connects again.
    Returning(Rc<Notify>),
}

/// A program that is to be hibernated.
#[derive(Debug)]
pub struct Candidate {
    pub client: ClientId,
    pub pid: u32,
    pub uid: u32,
    /// The name of the program, for the log.
    pub name: String,
    /// The GPUs that the program has used.
    pub gpus: GpuSet,
    /// The process's pidfd.
    pub process: OwnedFd,
    /// The program was paused before.
    was_paused: bool,
}

/// The programs that are being hibernated.
#[derive(Debug, Default)]
pub struct Departures(BTreeMap<ClientId, Departure>);

impl Departures {
    /// Puts a program to sleep, so that it can be hibernated.
    ///
    /// # Errors
    /// The program has ended, or cannot be hibernated.
    pub fn propose(
        &mut self,
        model: &Model,
        events: &mut Vec<Event>,
        client: ClientId,
        pid: u32,
    ) -> fdo::Result<Candidate> {
        let cannot = |why: &str| Err(fdo::Error::Failed(format!("cannot hibernate process {pid}: {why}")));
        let Some(entry) = model.clients.get(&client) else { return cannot("it has ended") };
        if model.program(pid)?.len() > 1 {
            return cannot("it has loaded the library several times");
        }
        if let Some(why) = self.obstacle(client) {
            return cannot(why);
        }
        let process = entry.process.as_ref().and_then(|process| process.get_ref().try_clone().ok());
        let Some(process) = process else { return cannot("the scheduler cannot see its process") };
        if entry.gpus.is_empty() {
            return cannot("it has not used a GPU yet");
        }
        self.0.insert(client, Departure::Preparing);
        let (uid, name) = (entry.identity.uid, entry.identity.label().to_string());
        let gpus = entry.gpus.keys().copied().collect();
        let was_paused = model.machine.sleep_of(client).paused;
        // Not saved as a pause: if this daemon is killed, the program continues with the next daemon.
        events.push(Event::SleepWanted { client, paused: true });
        Ok(Candidate { client, pid, uid, name, gpus, process, was_paused })
    }

    /// Why a client cannot be hibernated now.
    fn obstacle(&self, client: ClientId) -> Option<&'static str> {
        Some(match self.0.get(&client)? {
            Departure::Returning(_) => RETURNING,
            _ => "it is being hibernated already",
        })
    }

    /// True if a client was not saved and is not connected yet.
    pub fn is_returning(&self, client: ClientId) -> bool {
        matches!(self.0.get(&client), Some(Departure::Returning(_)))
    }

    /// Asks a sleeping client to leave.
    pub fn ask_to_leave(&mut self, model: &Model, client: ClientId) {
        if let Some(departure) = self.0.get_mut(&client) {
            *departure = Departure::Asked;
            model.send(client, SchedulerMessage::Leave {});
        }
    }

    /// Handles the client's answer. An answer without a question has no effect.
    pub fn on_answer(&mut self, client: ClientId, answer: LeaveAnswer) {
        if let Some(departure @ Departure::Asked) = self.0.get_mut(&client) {
            *departure = match answer {
                LeaveAnswer::Leaves => Departure::Left(Rc::default()),
                LeaveAnswer::Awake | LeaveAnswer::SwapFile => Departure::Refused(answer),
            };
        }
    }

    /// How far a client has left. `None` if it is not to leave, or has ended.
    pub fn departure(&self, client: ClientId) -> Option<Departure> {
        self.0.get(&client).cloned()
    }

    /// True if a client is leaving or has left, so that its process may be stopped at any moment.
    pub fn is_departing(&self, client: ClientId) -> bool {
        matches!(self.0.get(&client), Some(Departure::Asked | Departure::Left(_) | Departure::Returning(_)))
    }

    /// The clients of a process that have left. The process itself connects again. Notifies their tasks.
    pub fn on_return(&self, model: &Model, identity: &Identity) -> Vec<ClientId> {
        let is_back = |(client, departure): (&ClientId, &Departure)| match departure {
            Departure::Left(back) | Departure::Returning(back)
                if model.identity(*client).is_some_and(|known| known.pid == identity.pid) =>
            {
                back.notify_one();
                Some(*client)
            }
            _ => None,
        };
        self.0.iter().filter(|_| identity.pid > 0).filter_map(is_back).collect()
    }

    /// Forgets a client that has disconnected.
    pub fn forget(&mut self, client: ClientId) {
        self.0.remove(&client);
    }

    /// Ends a hibernation that has failed. The program continues. If its client has left, it continues when
    /// its process connects again.
    pub fn give_up(&mut self, model: &Model, events: &mut Vec<Event>, candidate: &Candidate) {
        if let Some(Departure::Left(back) | Departure::Returning(back)) = self.0.remove(&candidate.client) {
            self.0.insert(candidate.client, Departure::Returning(back));
        }
        if !candidate.was_paused {
            let clients = model.program(candidate.pid).unwrap_or_default().into_iter();
            let present = clients.filter(|client| !self.is_departing(*client));
            events.extend(present.map(|client| Event::Resumed { client }));
        }
    }

    /// Checks that a program may be resumed.
    ///
    /// # Errors
    /// The program is being saved, or was not saved and has not connected again.
    pub fn check_resume(&self, model: &Model, pid: u32) -> fdo::Result<()> {
        let obstacle = model.program(pid)?.iter().find_map(|client| self.obstacle_to_resume(*client));
        obstacle.map_or(Ok(()), |why| Err(fdo::Error::Failed(format!("cannot resume process {pid}: {why}"))))
    }

    fn obstacle_to_resume(&self, client: ClientId) -> Option<&'static str> {
        Some(match self.0.get(&client).filter(|_| self.is_departing(client))? {
            Departure::Returning(_) => RETURNING,
            _ => "it is being saved to disk",
        })
    }
}

impl Model {
    /// The process ID of each program, as far as it is known.
    pub fn program_pids(&self) -> BTreeMap<ClientId, u32> {
        let programs = self.clients.iter().filter(|(_, entry)| entry.lock.is_none());
        let pids = programs.filter_map(|(id, entry)| Some((*id, u32::try_from(entry.identity.pid).ok()?)));
        pids.filter(|(_, pid)| *pid > 0).collect()
    }

    /// The user accountable for a client.
    pub fn user_of(&self, client: ClientId) -> Option<u32> {
        Some(self.identity(client)?.accountable())
    }

    /// The kind of each of these GPUs, as far as they are known.
    pub fn kinds_of(&self, gpus: &GpuSet) -> Vec<String> {
        gpus.iter().filter_map(|gpu| Some(self.gpus.get(gpu)?.name.clone())).collect()
    }

    /// The kind of each GPU of the host.
    pub fn kinds_of_host(&self) -> Vec<String> {
        self.gpus.values().filter(|gpu| gpu.index.is_some() && !gpu.gone).map(|gpu| gpu.name.clone()).collect()
    }

    /// True if a client has used a GPU since it has connected.
    pub fn uses_gpu(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|entry| !entry.gpus.is_empty())
    }

    /// Whether a paused program sleeps.
    ///
    /// # Errors
    /// The program cannot sleep now, for this reason.
    pub fn sleeps(&self, client: ClientId) -> Result<bool, &'static str> {
        if !self.clients.contains_key(&client) {
            return Err("it has ended");
        }
        let sleep = self.machine.sleep_of(client);
        match (sleep.phase, sleep.obstacle) {
            (SleepPhase::Asleep, _) => Ok(true),
            _ if !sleep.paused => Err("it was resumed"),
            (SleepPhase::Awake, Some(why)) => Err(bus::sleep_obstacle_name(why)),
            (SleepPhase::Lost, _) => Err("the driver cannot restore it"),
            _ => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    const CLIENT: ClientId = ClientId(1);

    fn candidate() -> Candidate {
        let process = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
        let (name, gpus) = ("train".into(), GpuSet::new());
        Candidate { client: CLIENT, pid: 1, uid: 1000, name, gpus, process, was_paused: false }
    }

    #[test]
    fn a_client_that_was_not_saved_is_returning_until_it_is_back() {
        let (model, mut departures) = (Model::new(Config::default()), Departures::default());
        departures.0.insert(CLIENT, Departure::Left(Rc::default()));
        assert_eq!(departures.obstacle(CLIENT), Some("it is being hibernated already"));
        assert_eq!(departures.obstacle_to_resume(CLIENT), Some("it is being saved to disk"));
        departures.give_up(&model, &mut Vec::new(), &candidate());
        assert!(departures.is_returning(CLIENT) && departures.is_departing(CLIENT));
        assert_eq!(departures.obstacle(CLIENT), Some(RETURNING));
        assert_eq!(departures.obstacle_to_resume(CLIENT), Some(RETURNING));
        departures.forget(CLIENT);
        assert_eq!((departures.obstacle(CLIENT), departures.obstacle_to_resume(CLIENT)), (None, None));
    }

    #[test]
    fn a_client_that_has_not_left_can_be_hibernated_again_at_once() {
        let (model, mut departures) = (Model::new(Config::default()), Departures::default());
        for departure in [Departure::Preparing, Departure::Asked, Departure::Refused(LeaveAnswer::Awake)] {
            departures.0.insert(CLIENT, departure);
            departures.give_up(&model, &mut Vec::new(), &candidate());
            assert_eq!(departures.obstacle(CLIENT), None);
        }
    }
}
