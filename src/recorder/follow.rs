//! Follows a recording while it grows. Each reading decodes only the entries that were added since
//! the previous reading, so a live picture of turns and moves costs little.

use std::collections::BTreeMap;
use std::time::Duration;

use super::replay::{Moment, Observer};
use super::{Position, Recording};
use crate::scheduler::{ClientId, Event, TenantId, Time};

/// The time for which moments are kept.
pub const KEPT: Duration = Duration::from_secs(600);
/// Maximum number of moments kept. A moment needs about 80 bytes.
const MOST: usize = 20_000;

/// The moments of the last minutes of a recording.
#[derive(Debug)]
pub struct Follower {
    position: Position,
    observer: Observer,
    /// The tenants of the clients that have connected since the follower began.
    tenants: BTreeMap<ClientId, TenantId>,
    last: Time,
}

impl Follower {
    /// Begins at the recording's first entry.
    ///
    /// # Errors
    /// Returns a sentence if the recording cannot be read.
    pub fn new(recording: &Recording) -> Result<Self, String> {
        let oldest = recording.spans.first().ok_or("nothing was recorded")?;
        let machine = recording.checkpoint()?;
        let (observer, tenants) = (Observer::new(&machine), machine.tenants());
        Ok(Self { position: Position::of(oldest), observer, tenants, last: Time::ZERO })
    }

    /// Reads the entries that the follower has not read yet. Returns false if the recording no longer
    /// contains all of them. A new follower must then begin.
    ///
    /// # Errors
    /// Returns a sentence if the recording cannot be read.
    pub fn read(&mut self, recording: &Recording) -> Result<bool, String> {
        let present = self.position.span;
        let unread = recording.spans.iter().skip_while(|span| span.first < present);
        let mut unread = unread.peekable();
        if unread.peek().is_none_or(|span| span.first != present) {
            return Ok(false);
        }
        for span in unread {
            if span.first != self.position.span {
                self.position = Position::of(span);
            }
            while let Some(entry) = self.position.next(span) {
                let entry = entry?;
                if self.last == Time::ZERO {
                    self.observer.begin(entry.at);
                }
                self.last = entry.at;
                if let Event::Connected { client, tenant, .. } = entry.event {
                    self.tenants.insert(client, tenant);
                }
                self.observer.observe(&entry);
            }
        }
        Ok(true)
    }

    /// Returns the moments since `from`, and the waits and turns in progress at `now`. Forgets what is
    /// older than [`KEPT`].
    pub fn moments(&mut self, from: Time, now: Time) -> (Vec<Moment>, Vec<Moment>) {
        self.observer.forget(now.saturating_sub(KEPT), MOST);
        let (moments, unfinished) = self.observer.since(from, now);
        if self.tenants.len() > MOST {
            let known = self.observer.clients();
            self.tenants.retain(|client, _| known.contains(client));
        }
        (moments, unfinished)
    }

    pub fn tenants(&self) -> &BTreeMap<ClientId, TenantId> {
        &self.tenants
    }
}
