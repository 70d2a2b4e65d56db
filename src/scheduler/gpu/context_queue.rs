//! Clients that wait to create a context, in the order of arrival. Clients at the back may be
//! *deferred*: their contexts would leave an attached client too little memory to ever run.

use crate::api::*;
use std::collections::VecDeque;

#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct ContextQueue {
    queue: VecDeque<PendingContext>,
}

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct PendingContext {
    pub client: ClientId,
    pub since: Time,
    /// Since when the client is deferred.
    pub deferred: Option<Time>,
    /// The client was notified that it waits for other clients to need less memory.
    pub told: bool,
    /// The client was notified that its context is denied.
    pub refused: bool,
}

impl ContextQueue {
    pub fn push(&mut self, since: Time, client: ClientId) {
        self.queue.push_back(PendingContext { client, since, deferred: None, told: false, refused: false });
    }

    pub fn remove(&mut self, client: ClientId) {
        self.queue.retain(|pending| pending.client != client);
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &PendingContext> {
        self.queue.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut PendingContext> {
        self.queue.iter_mut()
    }

    pub fn deferred(&self) -> usize {
        self.queue.iter().filter(|pending| pending.deferred.is_some()).count()
    }

    /// Defers this number of clients, the last ones.
    pub fn defer(&mut self, now: Time, count: usize) {
        let from = self.queue.len().saturating_sub(count);
        for (index, pending) in self.queue.iter_mut().enumerate() {
            pending.deferred = (index >= from).then(|| pending.deferred.unwrap_or(now));
        }
    }

    /// Deferred clients get their full time again, because room may become free soon.
    pub fn restart_deferrals(&mut self, now: Time) {
        self.deferred_mut().for_each(|pending| pending.deferred = Some(now));
    }

    pub fn deferred_mut(&mut self) -> impl Iterator<Item = &mut PendingContext> {
        self.queue.iter_mut().filter(|pending| pending.deferred.is_some())
    }

    /// The first client, the start of its wait, and the number of undeferred clients behind it.
    /// `None`: all clients are deferred.
    pub fn first(&self) -> Option<(ClientId, Time, usize)> {
        let behind = self.queue.len().checked_sub(1 + self.deferred())?;
        self.queue.front().map(|pending| (pending.client, pending.since, behind))
    }

    /// Removes the first client, which may now create its context.
    pub fn pop(&mut self) {
        self.queue.pop_front();
    }
}
