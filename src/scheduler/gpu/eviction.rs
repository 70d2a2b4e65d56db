//! Lowers allowances: evicts memory of clients that do not run, so that other clients can run.
//!
//! Under `fcfs`, memory of the least recently run client is evicted first. Under `adaptive`, memory
//! of the client that is expected to run last is evicted first. Memory of the first request in the
//! queue is evicted after the memory of other clients, and memory that rules protect comes last. So
//! in a rotation of three programs, the victim is the program that ran before the holder.

use super::{Account, Context, Gpu};
use crate::{api::*, effects::Effects, queue::Entity};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// The order in which memory is evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Memory of ordinary clients, except memory that rules protect.
    Ordinary,
    /// Memory of clients that are evicted last, except memory that rules protect.
    Last,
    /// Memory that rules protect.
    Protected,
}

impl Gpu {
    /// Bytes by which charges exceed the capacity.
    pub fn overdrawn(&self, settings: &Settings) -> u64 {
        self.ledger.charged().saturating_sub(self.capacity(settings))
    }

    /// Whether no client runs, and all evictable memory has been evicted.
    pub fn is_evacuated(&self, cx: Context) -> bool {
        let has_left = |client: ClientId| {
            let is_kept = |account: &Account| account.report.mapped <= account.allowance.max(account.report.pinned);
            self.eviction_block(cx, client).is_some() || self.account(client).is_none_or(is_kept)
        };
        self.running().next().is_none() && self.attachments.keys().copied().all(has_left)
    }

    /// The time to evict `bytes` from the clients that would be chosen, plus the time to restore
    /// the bytes. Clients in `exempt` contribute no bytes.
    pub fn moving_both_ways(&self, bytes: u64, exempt: &[ClientId]) -> Duration {
        let idle = self.ledger.eviction_order().map(|(_, client)| client);
        let (mut rest, mut time) = (bytes, Duration::ZERO);
        for client in idle.chain(self.holders()).filter(|client| !exempt.contains(client)) {
            if rest == 0 {
                break;
            }
            let Some(attachment) = self.attachments.get(&client) else { continue };
            let part = attachment.account().evictable().min(rest);
            rest -= part;
            time += self.rates.both_ways(part, attachment.rate);
        }
        // The rest comes from clients that are already being evicted.
        time + self.rates.both_ways(rest, None)
    }

    /// Idle clients with evictable bytes, in the order of eviction, for policies that evict in the
    /// order of the queue. The client with the longest expected idle time comes first.
    fn victims_by_queue(&self, cx: Context, queue: &[Entity]) -> Vec<ClientId> {
        let before: BTreeMap<Entity, u32> = queue.iter().copied().zip(0..).collect();
        // A waiting client stays idle while the requests ahead of it have their turns. Another client
        // is expected to stay idle for as long again as it has already been idle.
        let expected_idle = |(last_run, client): (Time, ClientId)| {
            let entity = cx.queues.waiting(client);
            let before = entity.and_then(|entity| before.get(&entity).copied());
            let idle = cx.now.saturating_sub(last_run);
            (before.map_or(idle, |before| cx.settings.time_quantum.saturating_mul(before)), client)
        };
        let mut victims: Vec<_> = self.ledger.eviction_order().map(expected_idle).collect();
        // The sort is stable, so equal clients stay in LRU order.
        victims.sort_by_key(|(expected_idle, _)| Reverse(*expected_idle));
        victims.into_iter().map(|(_, client)| client).collect()
    }

    /// Evicts `bytes` from idle clients, in the order of the policy. Allowances beyond demand are
    /// taken back first, from any client. Clients in `last` are evicted after other clients, then
    /// memory that rules protect. Clients in `exempt` are not evicted. `queue`: the order of the
    /// queue, if the policy evicts by it. Returns the clients that were asked to evict.
    pub fn evict(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        bytes: u64,
        exempt: &[ClientId],
        last: &[ClientId],
        queue: Option<&[Entity]>,
    ) -> Vec<ClientId> {
        let before = self.ledger.evicting();
        let mut asked = self.take_back_ahead(cx, fx, bytes);
        let mut lacking = bytes.saturating_sub(self.ledger.evicting().saturating_sub(before));
        let mut victims: BTreeMap<ClientId, u64> = BTreeMap::new();
        let mut unprotected = self.unprotected(cx);
        // The iterator is lazy: usually the first few clients have all the missing bytes.
        let by_queue = queue.map(|queue| self.victims_by_queue(cx, queue));
        let idle = || {
            let by_time = by_queue.is_none().then(|| self.ledger.eviction_order().map(|(_, client)| client));
            by_queue.iter().flatten().copied().chain(by_time.into_iter().flatten())
        };
        for pass in [Pass::Ordinary, Pass::Last, Pass::Protected] {
            for client in idle() {
                if lacking == 0 {
                    break;
                }
                let Some(attachment) = self.attachments.get(&client) else { continue };
                let account = attachment.account();
                let has_unfreed = account.frees.present() > 0;
                let is_last = has_unfreed || last.contains(&client);
                // A client that runs by page faults needs no memory on the GPU, even if its own gang is
                // served.
                let is_exempt = exempt.contains(&client) && !attachment.faults_in(cx.settings);
                if is_exempt || is_last != (pass == Pass::Last) && pass != Pass::Protected {
                    continue;
                }
                let left = victims.get(&client).copied().unwrap_or(account.allowance);
                let evictable = account.evictable().saturating_sub(account.allowance - left);
                let take = if has_unfreed { evictable } else { evictable.min(lacking) };
                let take = match cx.rules.group(client).and_then(|group| unprotected.get_mut(&group)) {
                    Some(may_go) if pass != Pass::Protected => {
                        let take = take.min(*may_go);
                        *may_go = may_go.saturating_sub(take);
                        take
                    }
                    _ => take,
                };
                lacking = lacking.saturating_sub(take);
                if take > 0 {
                    victims.insert(client, left - take);
                }
            }
        }
        let taken = idle().filter_map(|client| Some((client, *victims.get(&client)?))).take(victims.len());
        for (victim, allowance) in taken.collect::<Vec<_>>() {
            self.allow(cx, fx, victim, allowance);
            asked.push(victim);
        }
        asked
    }

    /// Takes back allowances beyond demand, until `bytes` are being freed. Unlike `evict`,
    /// this includes members of the gang that lacks bytes: one member can have more than it needs
    /// while another lacks bytes. Returns the clients whose allowance fell.
    fn take_back_ahead(&mut self, cx: Context, fx: &mut Effects, bytes: u64) -> Vec<ClientId> {
        let clients = self.ledger.ahead().filter(|client| self.eviction_block(cx, *client).is_none());
        let ahead: Vec<(ClientId, u64)> =
            clients.map(|client| (client, self.ahead(cx, client))).filter(|(_, ahead)| *ahead > 0).collect();
        let (mut lacking, mut asked) = (bytes, Vec::new());
        for (client, ahead) in ahead {
            let take = ahead.min(lacking);
            let Some(allowance) = self.account(client).map(|account| account.allowance).filter(|_| take > 0) else {
                continue;
            };
            lacking -= take;
            self.allow(cx, fx, client, allowance - take);
            asked.push(client);
        }
        asked
    }

    /// For each group with `memory-low`: the bytes that its members are allowed on the GPU beyond
    /// `memory-low`.
    fn unprotected(&self, cx: Context) -> BTreeMap<GroupId, u64> {
        let protected = cx.rules.groups().filter_map(|(group, limits)| {
            let low = limits.memory_low?;
            let accounts = cx.rules.members(group).filter_map(|client| self.account(client));
            let has = accounts.fold(0u64, |sum, account| sum.saturating_add(account.allowance));
            Some((group, has.saturating_sub(low.on(self.total).unwrap_or(u64::MAX))))
        });
        protected.collect()
    }
}
