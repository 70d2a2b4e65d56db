//! Raising and lowering allowances: attaching, reports, credit, eviction. The sums are in `ledger`.

use crate::{
    api::*,
    lock::{Blocked, Entity},
    machine::{Attachment, Gpu, Machine, PendingContext},
    memory::ledger::{Account, Evicted},
    memory::shortfall::Failures,
    policy::{self, Bursts, Progress},
    quota::Limit,
    settle::corun::Utilization,
    timers::Wake,
};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// A credit that completes nothing and is smaller is not worth a message.
const CREDIT_STEP: u64 = 2 << 20;
/// What a holder that keeps growing may map beyond what it needs: what it allocates in some milliseconds, but no larger part
/// of what is free than one in so many.
const AHEAD: u64 = 1 << 30;
const AHEAD_PART: u64 = 4;
/// How long ago it may have grown last.
const GROWING: Duration = Duration::from_secs(1);
/// An eviction of less says little about the rate of evictions.
const MEASURABLE: u64 = 64 << 20;
/// The rate of evictions stays between these, whatever was measured: 64 MiB/s and 1 TiB/s.
const RATES: (u64, u64) = (64 << 20, 1 << 40);

impl Gpu {
    /// How long evicting that much takes, where all of it must be copied.
    pub(crate) fn moving(&self, bytes: u64) -> Duration {
        at_rate(bytes, self.rate)
    }
}

/// How long it takes for that much to leave at that rate, and to come back. What did not change since it came in leaves
/// without being copied, but is copied when it comes again.
fn both_ways(bytes: u64, rate: u64, back: u64) -> Duration {
    at_rate(bytes, rate) + at_rate(bytes, rate.min(back))
}

/// The rate of evictions after another one was measured.
fn measured(rate: u64, bytes: u64, time: Duration) -> u64 {
    let now = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    policy::smoothed(rate, now.clamp(RATES.0.into(), RATES.1.into()) as u64)
}

fn at_rate(bytes: u64, per_second: u64) -> Duration {
    Duration::from_micros(((u128::from(bytes) * 1_000_000) / u128::from(per_second.max(1))).min(1 << 50) as u64)
}

/// From whom bytes are taken, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Others,
    Last,
    Protected,
}

impl Machine {
    pub(crate) fn overhead(&mut self, id: GpuId, begun: Time, bytes: u64, complete: bool) {
        let Some(gpu) = self.gpus.get(&id) else { return };
        let missed = gpu.unmeasured.iter().copied().filter(|client| !self.has_context(*client, id, begun)).collect();
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.unmeasured = missed;
        gpu.measured = Some(bytes);
        gpu.incomplete = !complete;
        self.adjust_trial(id);
        self.touch(id);
    }

    pub(crate) fn attach(&mut self, client: ClientId, id: GpuId, engine: Engine) {
        let now = self.now;
        let (Some(state), Some(gpu)) = (self.clients.get_mut(&client), self.gpus.get_mut(&id)) else { return };
        if let Some(attachment) = state.attachments.get_mut(&id) {
            attachment.engine = engine; // asked again: answered again, unless the answer is still to come
            if attachment.attached.is_some() {
                self.effects.command(Command::Attached { client, gpu: id });
                self.with_quota(|quota, cx, fx| quota.tell(cx, fx, client, id));
            }
            return;
        }
        let mut account = Account::default();
        if gpu.verifies {
            account.distrust();
        }
        gpu.ledger.open(now, client, state.user, account);
        state.attachments.insert(
            id,
            Attachment {
                engine,
                failures: Failures::default(),
                grew: None,
                keeps_growing: false,
                eviction_block: None,
                eviction_backoff: Duration::ZERO,
                rate: None,
                attached: None,
                used: None,
                bursts: Bursts::default(),
                progress: Progress::new(now),
                utilization: Utilization::default(),
            },
        );
        gpu.clients.insert(client);
        self.quota.attach(client, id);
        self.lock.attach(now, client, id);
        gpu.unmeasured.insert(client);
        gpu.attaching.push_back(PendingContext { client, since: now, told: false, refused: false });
        self.touch(id);
    }

    /// Everything of that client is gone from that GPU: its bytes, its lock and its place in line.
    pub(crate) fn detach(&mut self, client: ClientId, id: GpuId) {
        if self.attachment(client, id).is_none() {
            return;
        }
        self.touch_rivals(self.lock.entity(client));
        self.cancel(client, &GpuSet::from([id]));
        self.end_hold(client, id, Duration::ZERO, false);
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.attachments.remove(&id);
        self.quota.detach(client, id, &self.rules);
        self.lock.detach(client, id);
        if let Some(gpu) = self.gpus.get_mut(&id) {
            self.effects.wake(Wake::Eviction(client, id), None);
            gpu.ledger.close(client);
            gpu.clients.remove(&client);
            gpu.unmeasured.remove(&client);
            gpu.reservations.retain(|reservation| !reservation.is_of(client));
            gpu.attaching.retain(|pending| pending.client != client);
        }
        self.touch(id);
    }

    pub(crate) fn memory(&mut self, client: ClientId, id: GpuId, report: MemoryReport) {
        let now = self.now;
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        if report.demand > 0 {
            attachment.used.get_or_insert(now);
        }
        let Some((evicted, report)) = self.change_account(client, id, |account| {
            let evicted = account.reported(now, report);
            (evicted, account.report)
        }) else {
            return;
        };
        let needed = self.quota.limit(client, id).map_or(0, Limit::demand);
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        if report.mapped >= report.demand {
            attachment.failures.succeeded();
        }
        if report.demand > needed {
            attachment.keeps_growing = attachment.grew.replace(now).is_some_and(|before| now < before + GROWING);
        }
        self.with_quota(|quota, cx, _| quota.reported(cx, client, id, report.limit_ack, report.demand));
        self.allow_what_stays(client, id);
        self.adjust_trial(id);
        if self.account(client, id).is_some_and(Account::is_worth_measuring) {
            self.measure(id);
        }
        let unverified_until = self.account(client, id).and_then(Account::expires);
        if unverified_until.is_some() && self.effects.wakes_at(Wake::Verification(id)).is_none() {
            self.effects.wake(Wake::Verification(id), unverified_until);
        }
        if let Some(evicted) = evicted {
            self.learn_rate(client, id, evicted);
        }
        self.evicted_at_last(client, id);
        self.check(client); // its answer may have been due
        // What it needs may have changed, and with it whether it can be served at all.
        if let Some(entity) = self.lock.waiting(client)
            && self.lock.request(entity).is_some_and(|r| r.blocked == Some(Blocked::Pinned(id)))
        {
            self.enqueue(entity);
        }
        // Holders and the first in line go first; what is free after that is nobody's.
        self.effects.untouch(id);
        self.settle(id);
        if self.gpus.get(&id).is_some_and(|g| !g.lacking) && !self.is_over_limit(client, id) {
            self.credit(client, id, self.overdrawn(id));
        }
    }

    /// A client that comes back to a new scheduler has memory there already; and what is pinned stays, so it is allowed.
    /// Neither raises the charge.
    pub(crate) fn allow_what_stays(&mut self, client: ClientId, id: GpuId) {
        let Some(account) = self.account(client, id) else { return };
        if account.awaits_measurement() {
            return;
        }
        let least = if account.is_new() { account.report.mapped } else { account.report.pinned };
        if account.allowance < least {
            self.allow(client, id, least);
        }
    }

    pub(crate) fn link_found(&mut self, id: GpuId, rate: u64) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.rate_back = rate.clamp(RATES.0, RATES.1);
        gpu.rate = gpu.rate_back;
        self.touch(id);
    }

    /// What an eviction tells of the next: of that client's, and of those of which nothing is known yet.
    fn learn_rate(&mut self, client: ClientId, id: GpuId, evicted: Evicted) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let Evicted { bytes, contents, time } = evicted;
        let before = gpu.rate;
        if contents >= MEASURABLE {
            gpu.rate = measured(before, contents, time).min(gpu.rate_back); // some may have been there already
        }
        if bytes >= MEASURABLE
            && let Some(attachment) = self.attachment_mut(client, id)
        {
            attachment.rate = Some(measured(attachment.rate.unwrap_or(before), bytes, time));
        }
    }

    /// How long it takes for so many bytes to leave, from those who would be asked for them, and to come back later.
    pub(crate) fn moving_both_ways(&self, id: GpuId, bytes: u64, spare: &[ClientId]) -> Duration {
        let Some(gpu) = self.gpus.get(&id) else { return Duration::ZERO };
        let idle = gpu.ledger.eviction_order().map(|(_, client)| client);
        let (mut rest, mut time) = (bytes, Duration::ZERO);
        for client in idle.chain(self.lock.holders(id)).filter(|client| !spare.contains(client)) {
            if rest == 0 {
                break;
            }
            let (Some(attachment), Some(account)) = (self.attachment(client, id), gpu.ledger.account(client)) else {
                continue;
            };
            let part = account.evictable().min(rest);
            rest -= part;
            time += both_ways(part, attachment.rate.unwrap_or(gpu.rate), gpu.rate_back);
        }
        time + both_ways(rest, gpu.rate, gpu.rate_back) // on its way already
    }

    /// The bytes without which this client cannot run there.
    pub(crate) fn need(&self, client: ClientId, id: GpuId) -> u64 {
        let (Some(attachment), Some(gpu)) = (self.attachment(client, id), self.gpus.get(&id)) else { return 0 };
        if attachment.engine == Engine::Managed && self.settings.anti_thrash == AntiThrash::Off {
            return 0; // pages fault in and out as they may
        }
        gpu.ledger
            .account(client)
            .map_or(0, |account| account.report.demand)
            .saturating_add(self.shortfall(client, id))
            .min(gpu.capacity(&self.settings))
    }

    /// Raises an allowance towards the need as far as bytes are free, evicting nobody. Says what is still lacking. `owed`:
    /// bytes that are spoken for, of those that are free and then of those on their way out.
    pub(crate) fn credit(&mut self, client: ClientId, id: GpuId, owed: u64) -> u64 {
        let need = self.need(client, id);
        let Some(gpu) = self.gpus.get(&id) else { return 0 };
        let Some(account) = gpu.ledger.account(client) else { return 0 };
        if account.awaits_measurement() {
            return need; // an allowance of less than it has would have it evict
        }
        // What is free still and not given to those before it is in doubt for them, or too little by itself: theirs all the same.
        let spoken = owed.min(gpu.free(&self.settings));
        let free = self.free_for(client, id).saturating_sub(spoken);
        // Bytes that were asked back and have not left yet are still charged: they can be left where they are, unless
        // somebody else counts on them.
        let uncounted = gpu.ledger.coming().saturating_sub(owed - spoken);
        let leaving = account.charge.saturating_sub(account.allowance).min(uncounted);
        let reach = account.allowance.saturating_add(leaving).saturating_add(free).min(need);
        if reach > account.allowance && (reach == need || reach - account.allowance >= CREDIT_STEP) {
            self.allow(client, id, reach);
        }
        need.saturating_sub(self.account(client, id).map_or(0, |account| account.allowance))
    }

    /// Lets holders that keep growing map more than they need, as far as bytes are free: so their allocations wait for no
    /// message. It is taken back when other clients lack bytes ([`take_back_ahead`](Self::take_back_ahead)).
    pub(crate) fn credit_ahead(&mut self, id: GpuId) {
        let is_idle = |gpu: &Gpu| gpu.attaching.is_empty() && gpu.reservations.is_empty();
        if !self.gpus.get(&id).is_some_and(is_idle) {
            return;
        }
        for client in self.lock.holders(id).collect::<Vec<_>>() {
            let Some(attachment) = self
                .attachment(client, id)
                .filter(|attachment| attachment.keeps_growing && attachment.engine == Engine::Swap)
            else {
                continue;
            };
            let grows_now = attachment.grew.is_some_and(|at| self.now < at + GROWING);
            let is_running = self.lock.hold(client, id).is_some_and(|hold| hold.revoked.is_none());
            let allowance = self.account(client, id).map_or(0, |account| account.allowance);
            let limit = self.quota.limit(client, id).map_or(0, |limit| limit.limit);
            let ahead = self.ahead(client, id);
            // Most of what is free is left to others that grow, or create a context.
            let free = self.free_for(client, id);
            let most = AHEAD.min(free.saturating_add(ahead) / AHEAD_PART);
            if !(grows_now && is_running) || ahead > most / 2 {
                continue;
            }
            let reach = allowance.saturating_add((most - ahead).min(free)).min(limit);
            if reach >= allowance.saturating_add(CREDIT_STEP) {
                self.allow(client, id, reach);
            }
        }
    }

    /// Bytes that a client may map and does not need.
    fn ahead(&self, client: ClientId, id: GpuId) -> u64 {
        let ahead = self.account(client, id).map_or(0, Account::ahead);
        if ahead == 0 { 0 } else { ahead.saturating_sub(self.shortfall(client, id)) }
    }

    /// Takes back what clients may map and do not need, until so many bytes are on their way.
    fn take_back_ahead(&mut self, id: GpuId, bytes: u64, spare: &[ClientId]) {
        let attachments = self.gpus.get(&id).into_iter().flat_map(|gpu| gpu.clients.iter().copied());
        let ahead: Vec<(ClientId, u64)> = attachments
            .filter(|client| !spare.contains(client))
            .filter(|client| self.eviction_block(*client, id).is_none())
            .map(|client| (client, self.ahead(client, id)))
            .filter(|(_, ahead)| *ahead > 0)
            .collect();
        let mut lacking = bytes;
        for (client, ahead) in ahead {
            let take = ahead.min(lacking);
            let Some(allowance) = self.account(client, id).map(|account| account.allowance).filter(|_| take > 0) else {
                continue;
            };
            lacking -= take;
            self.allow(client, id, allowance - take);
            self.check(client);
        }
    }

    /// Bytes by which more is charged than there is.
    pub(crate) fn overdrawn(&self, id: GpuId) -> u64 {
        self.gpus.get(&id).map_or(0, |g| g.ledger.charged().saturating_sub(g.capacity(&self.settings)))
    }

    /// Who has bytes that can leave, in the order in which they do.
    fn victims(&self, id: GpuId) -> Vec<ClientId> {
        let Some(gpu) = self.gpus.get(&id) else { return Vec::new() };
        let idle = gpu.ledger.eviction_order();
        if !self.policy().keeps_for_the_next() {
            return idle.map(|(_, client)| client).collect();
        }
        let before: BTreeMap<Entity, u32> = self.lock.queue(id).map(|(_, entity)| entity).zip(0..).collect();
        let rests = |(last_run, client): (Time, ClientId)| {
            let entity = self.lock.waiting(client);
            let before = entity.and_then(|entity| before.get(&entity).copied());
            (self.policy().rests(&self.settings, self.now.saturating_sub(last_run), before), client)
        };
        let mut victims: Vec<_> = idle.map(rests).collect();
        victims.sort_by_key(|(rests, _)| Reverse(*rests)); // who ran least recently first, where they are equal
        victims.into_iter().map(|(_, client)| client).collect()
    }

    /// Asks for that many bytes back from clients that do not hold the lock, in the order that the policy says; from those of
    /// `last` only if nobody else has any, and then what rules protect.
    pub(crate) fn evict(&mut self, id: GpuId, bytes: u64, spare: &[ClientId], last: &[ClientId]) {
        let before = self.gpus.get(&id).map_or(0, |gpu| gpu.ledger.coming());
        self.take_back_ahead(id, bytes, spare);
        let after = self.gpus.get(&id).map_or(0, |gpu| gpu.ledger.coming());
        let mut lacking = bytes.saturating_sub(after.saturating_sub(before));
        let mut victims: BTreeMap<ClientId, u64> = BTreeMap::new();
        let mut unprotected = self.unprotected(id);
        let order = self.victims(id);
        for pass in [Pass::Others, Pass::Last, Pass::Protected] {
            for client in &order {
                if lacking == 0 {
                    break;
                }
                let Some(account) = self.account(*client, id) else { continue };
                let lies = account.frees.present() > 0;
                let is_last = lies || last.contains(client);
                if spare.contains(client) || is_last != (pass == Pass::Last) && pass != Pass::Protected {
                    continue;
                }
                let left = victims.get(client).copied().unwrap_or(account.allowance);
                let evictable = account.evictable().saturating_sub(account.allowance - left);
                let take = if lies { evictable } else { evictable.min(lacking) };
                let take = match self.rules.group(*client).and_then(|group| unprotected.get_mut(&group)) {
                    Some(may_go) if pass != Pass::Protected => {
                        let unclaimed = self.unclaimed(*client, id).saturating_sub(account.allowance - left);
                        let take = take.min(unclaimed.max(*may_go));
                        *may_go = may_go.saturating_sub(take);
                        take
                    }
                    _ => take,
                };
                lacking = lacking.saturating_sub(take);
                if take > 0 {
                    victims.insert(*client, left - take);
                }
            }
        }
        for victim in order {
            let Some(allowance) = victims.get(&victim) else { continue };
            self.allow(victim, id, *allowance);
            self.check(victim);
        }
    }

    /// Sets an allowance and tells its client.
    pub(crate) fn allow(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        let now = self.now;
        for (seq, bytes) in self.change_account(client, id, |account| account.set(now, bytes)).unwrap_or_default() {
            self.effects.command(Command::Allowance { client, gpu: id, seq, bytes });
        }
    }
}
