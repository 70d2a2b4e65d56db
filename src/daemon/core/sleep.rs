//! Sleep of the machine: programs' memory leaves the GPUs before it. And of programs that a user pauses.

use tokio::sync::watch;
use tracing::info;
use zbus::fdo;

use super::state::Core;
use crate::scheduler::{ClientId, Event};

impl Core {
    /// Follows whether a program has a GPU attached.
    pub fn follow_attached(&self) -> watch::Receiver<bool> {
        self.attached.subscribe()
    }

    pub(super) fn count_attachments(&mut self, change: impl FnOnce(usize) -> usize) {
        self.attachments = change(self.attachments);
        let is_any = self.attachments > 0;
        self.attached.send_if_modified(|before| std::mem::replace(before, is_any) != is_any);
    }

    /// The machine is about to sleep, or has woken up.
    pub fn sleep(&mut self, asleep: bool) {
        if self.asleep == asleep {
            return;
        }
        self.asleep = asleep;
        if asleep {
            info!(name: "sleep", "the machine is about to sleep: programs' memory leaves the GPUs");
        } else {
            info!(name: "woken", "the machine has woken up");
        }
        self.apply(Event::Sleep { asleep });
    }

    /// The program of a process. A process that has loaded several libraries is several clients.
    ///
    /// # Errors
    /// `InvalidArgs` if there is none.
    fn program(&self, pid: u32) -> fdo::Result<Vec<ClientId>> {
        let is_meant =
            |client: &super::state::Client| client.lock.is_none() && i64::from(client.identity.pid) == i64::from(pid);
        let found = self.clients.iter().filter(|(_, client)| pid > 0 && is_meant(client)).map(|(id, _)| *id);
        let found: Vec<ClientId> = found.collect();
        let no_program = || fdo::Error::InvalidArgs(format!("no program under nvshare has the process id {pid}"));
        (!found.is_empty()).then_some(found).ok_or_else(no_program)
    }

    /// The user of the program of a process.
    ///
    /// # Errors
    /// `InvalidArgs` if there is none.
    pub fn user_of(&self, pid: u32) -> fdo::Result<u32> {
        let clients = self.program(pid)?;
        let users = clients.iter().filter_map(|client| Some(self.clients.get(client)?.identity.uid));
        users.min().ok_or_else(|| fdo::Error::Failed("it has just ended".into()))
    }

    /// Takes a program off its GPUs until it is resumed, or resumes it.
    ///
    /// # Errors
    /// `InvalidArgs` if there is none.
    pub fn pause(&mut self, pid: u32, is_paused: bool) -> fdo::Result<()> {
        for client in self.program(pid)? {
            if let Some(entry) = self.clients.get(&client) {
                let (name, uid) = (&entry.identity.name, entry.identity.uid);
                let word = if is_paused { "paused" } else { "resumed" };
                info!(client = client.0, pid, uid, "{name} is {word}");
            }
            self.apply(match is_paused {
                true => Event::SleepWanted { client, paused: true },
                false => Event::Resumed { client },
            });
        }
        Ok(())
    }

    /// Whether all memory that can leave the GPUs has left, or the machine has woken up.
    pub fn is_evacuated(&self) -> bool {
        !self.asleep || self.machine.is_evacuated()
    }
}
