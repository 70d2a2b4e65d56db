//! Clients that wait to create a context, in the order of arrival. Clients at the back may be *deferred*: with their
//! contexts, an attached client would have too little memory to ever run.

use crate::api::*;
use std::collections::VecDeque;

#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct ContextQueue {
    queue: VecDeque<PendingContext>,
    /// The number of deferred clients. They are the last in the queue.
    deferred: usize,
}

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct PendingContext {
    pub client: ClientId,
    pub since: Time,
    /// `told`: the client was notified that it waits for other clients to need less. `refused`: it was notified that
    /// its context is denied.
    pub told: bool,
    pub refused: bool,
}

impl ContextQueue {
    pub fn push(&mut self, since: Time, client: ClientId) {
        self.queue.push_back(PendingContext { client, since, told: false, refused: false });
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
        self.deferred
    }

    pub fn defer(&mut self, count: usize) {
        self.deferred = count;
    }

    pub fn deferred_mut(&mut self) -> impl Iterator<Item = &mut PendingContext> {
        let from = self.queue.len() - self.deferred;
        self.queue.iter_mut().skip(from)
    }

    /// The first client that is not deferred, since when it has waited, and the number of clients behind it that are
    /// not deferred either. `None`: all are deferred.
    pub fn first(&self) -> Option<(ClientId, Time, usize)> {
        let behind = self.queue.len().checked_sub(1 + self.deferred)?;
        self.queue.front().map(|pending| (pending.client, pending.since, behind))
    }

    /// Removes the first client, which may now create its context.
    pub fn pop(&mut self) {
        self.queue.pop_front();
    }
}
