//! Failed mappings (see `shortfall`), and trials of clients whose demand exceeds the usable memory.

use super::{
    Account, Context, Gpu,
    shortfall::{MappingFailure, Trial},
};
use crate::{api::*, effects::Effects, timers::Wake};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a failure waits for a measurement to explain it.
pub(crate) const FAILURE_TIMEOUT: Duration = Duration::from_millis(500);
/// A failure causes the eviction of at least this many bytes: one chunk.
const STEP: u64 = 64 << 20;
/// After this many failures in a row, further failures cause no additional eviction.
const MOST_STEPS: u32 = 12;
/// The first and the longest delay after a failure that the eviction of other clients cannot cure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// The longest delay on a GPU with other clients. Each attempt to use the whole GPU evicts the
/// other clients, so the attempts are rarer.
const BACKOFF_BESIDE_OTHERS: Duration = Duration::from_secs(30);
/// After this many failures in a row without other clients' memory on the GPU, the mapping counts
/// as impossible. The delays between the attempts add up to at least 5 s.
const PROOF: u32 = 12;

/// A measurement that may explain failures.
#[derive(Clone, Copy)]
pub(crate) struct Measurement<'a> {
    pub begun: Time,
    /// Bytes of the GPU that plain allocations can get. `None`: unknown.
    pub free: Option<u64>,
    pub found: &'a BTreeMap<ClientId, Found>,
    /// The clients' known bytes on the GPU when the measurement arrived.
    pub in_use: u64,
}

impl Gpu {
    /// Handles the release of a client whose mapping failed. Returns whether the client's request
    /// has to wait, at first until the next measurement.
    pub fn mapping_failed(&mut self, cx: Context, fx: &mut Effects, client: ClientId) -> bool {
        let others = self.attachments.keys().copied().filter(|other| *other != client && self.can_give(cx, *other));
        let others = others.collect();
        let Some(attachment) = self.attachments.get_mut(&client) else { return false };
        let MemoryReport { demand, mapped, .. } = attachment.account().report;
        let bytes = demand.saturating_sub(mapped);
        if bytes == 0 {
            return false;
        }
        let failures = &mut attachment.failures;
        failures.in_a_row = failures.in_a_row.saturating_add(1);
        failures.unexplained = Some(MappingFailure { at: cx.now, others });
        failures.not_before = cx.now + FAILURE_TIMEOUT;
        fx.command(Command::MappingFailed { client, gpu: self.id, bytes, failures: failures.in_a_row });
        fx.wake(Wake::Failures(self.id), Some(cx.now + FAILURE_TIMEOUT));
        true
    }

    /// Explains a client's failure by a measurement that began after the failure. Returns whether
    /// the client had such a failure. If so, the client's delay has changed.
    pub fn explain_failure(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        client: ClientId,
        Measurement { begun, free, found, in_use }: Measurement,
    ) -> bool {
        let Some(attachment) = self.attachments.get_mut(&client) else { return false };
        attachment.failures.measured(free, in_use);
        let failure = attachment.failures.unexplained.take_if(|failure| failure.at <= begun);
        let Some(MappingFailure { others, .. }) = failure else { return false };
        let has_others = others.iter().any(|other| match self.account(*other) {
            None => true, // the other client has detached, which made room
            Some(account) => {
                let pinned = account.report.pinned;
                self.can_give(cx, *other) && found.get(other).is_none_or(|found| found.most > pinned)
            }
        });
        let (usable, charged) = (self.usable(cx.settings), self.ledger.charged());
        let is_alone = self.attachments.len() == 1;
        let Some(attachment) = self.attachments.get_mut(&client) else { return false };
        let MemoryReport { demand, mapped, .. } = attachment.account().report;
        // A client that reports more memory than was measured has not tried to map all of its
        // demand.
        let overstates = found.contains_key(&client) && attachment.account().is_overstated();
        let failures = &mut attachment.failures;
        let steps = failures.in_a_row.saturating_sub(1).min(MOST_STEPS);
        failures.alone = if has_others || overstates { 0 } else { failures.alone.saturating_add(1) };
        // No shortfall is learned without other clients, since memory measured as free may soon
        // become usable. An overdrawn ledger explains the first failure without a shortfall.
        if has_others && !overstates && (steps > 0 || charged <= usable) {
            let more = demand.saturating_sub(mapped).max(STEP).saturating_mul(1 << steps);
            failures.learn(cx.now, usable.saturating_sub(charged), more);
        }
        let delay = if has_others && steps < MOST_STEPS {
            Duration::ZERO
        } else {
            let most = if is_alone { BACKOFF.1 } else { BACKOFF_BESIDE_OTHERS };
            failures.backoff = (failures.backoff * 2).clamp(BACKOFF.0, most);
            failures.backoff
        };
        failures.not_before = cx.now + delay;
        if failures.alone >= PROOF {
            fx.command(Command::Denied { client, gpu: self.id, bytes: demand, why: Denial::Unmappable });
        }
        fx.touch(self.id);
        true
    }

    /// Ends the wait for a measurement if no failure is left to explain.
    pub fn failures_explained(&self, fx: &mut Effects) {
        if self.attachments.values().all(|attachment| attachment.failures.unexplained.is_none()) {
            fx.wake(Wake::Failures(self.id), None);
        }
    }

    /// Whether a client has evictable memory, as far as its reports are believed.
    fn can_give(&self, cx: Context, client: ClientId) -> bool {
        let has = |account: &Account| account.in_use() > account.report.pinned;
        self.account(client).is_some_and(has) && self.eviction_block(cx, client).is_none()
    }

    /// Begins a trial for the only holder that wants memory, if the holder lacks memory and no
    /// other client has memory on the GPU. Called whenever the GPU is settled, because other
    /// clients' memory may leave only after the grant.
    pub fn try_holder(&mut self, cx: Context, fx: &mut Effects) {
        let lacks = |account: &Account| account.allowance < account.report.demand;
        let wanting = self.holders().filter(|client| self.wanted(cx, *client) > 0).take(2).collect::<Vec<_>>();
        let [client] = wanting[..] else { return };
        let is_running = self.hold(client).is_some_and(|hold| hold.revoked.is_none());
        if is_running && self.account(client).is_some_and(lacks) {
            self.begin_trial(cx, fx, client);
        }
    }

    /// Begins a trial if the client has the whole GPU and its demand exceeds the usable memory. The
    /// client may then try to map the rest.
    fn begin_trial(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let demand = self.demand_of_trial(client).filter(|_| !cx.rules.may_exceed_gpu(client));
        let Some(demand) = demand else { return };
        let Some(account) = self.account(client) else { return };
        // A trial is all or nothing. The trial cannot begin while memory of the client is being
        // evicted, or while bytes are reserved for other clients.
        let charge = account.charge;
        if charge > account.allowance || self.trial.is_some() || !self.reservations.is_empty() {
            return;
        }
        let beyond = demand.saturating_sub(self.usable(cx.settings));
        // A trial requires that other clients neither have nor may map memory on the GPU. The
        // client's own memory may exceed the usable memory, because an earlier trial mapped it.
        let fits = self.ledger.charged() <= charge;
        if beyond == 0 || !fits || self.unverified_for(cx, client) > 0 {
            return;
        }
        self.trial = Some(Trial { client, demand, beyond });
        if self.credit(cx, fx, client, 0) > 0 {
            self.end_trial(fx, client);
        }
    }

    /// The demand of a client that needs all of its memory mapped (engine `swap`). `None`: the
    /// demand exceeds the GPU's size, or the client can run with less.
    fn demand_of_trial(&self, client: ClientId) -> Option<u64> {
        let attachment = self.attachments.get(&client)?;
        let demand = attachment.account().report.demand;
        (attachment.engine == Engine::Swap && demand <= self.total).then_some(demand)
    }

    /// Adjusts the trial after its client's demand or the overhead has changed.
    pub fn adjust_trial(&mut self, settings: &Settings) {
        let Some(trial) = self.trial else { return };
        let demand = self.demand_of_trial(trial.client).unwrap_or(0);
        // The trial does not extend to memory that has become unusable since, because that memory
        // is in use elsewhere.
        let most = trial.beyond.saturating_add(demand.saturating_sub(trial.demand));
        let beyond = demand.saturating_sub(self.usable(settings)).min(most);
        self.trial = (beyond > 0).then_some(Trial { demand, beyond, ..trial });
    }

    /// Ends a client's trial, if it has one.
    pub fn end_trial(&mut self, fx: &mut Effects, client: ClientId) {
        if self.trial.take_if(|trial| trial.client == client).is_some() {
            fx.touch(self.id);
        }
    }
}
