//! Lowers allowances: evicts memory of clients that do not run, for clients that are about to run.

use crate::{
    api::*,
    gpu::{Access, Account},
    machine::Machine,
    queue::Entity,
};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// The passes over the clients that can be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Ordinary clients, except memory that rules protect.
    Ordinary,
    /// Clients that are evicted last, with the same exception.
    Last,
    /// Memory that rules protect.
    Protected,
}

impl Machine {
    /// Bytes by which charges exceed the capacity.
    pub(crate) fn overdrawn(&self, id: GpuId) -> u64 {
        self.gpus.get(id).map_or(0, |g| g.ledger.charged().saturating_sub(g.capacity(&self.settings)))
    }

    /// Whether no client runs any more, and all memory that can leave the GPUs has left, after [`Event::Sleep`].
    pub fn is_evacuated(&self) -> bool {
        let ids = self.gpus.iter().filter(|(_, gpu)| gpu.access != Access::Gone).map(|(id, _)| id);
        ids.into_iter().all(|id| {
            let clients = self.gpus.get(id).into_iter().flat_map(|gpu| gpu.attachments.keys().copied());
            let has_left = |client: ClientId| {
                let is_kept = |account: &Account| account.report.mapped <= account.allowance.max(account.report.pinned);
                self.eviction_block(client, id).is_some() || self.account(client, id).is_none_or(is_kept)
            };
            self.gpus.running_on(id).next().is_none() && clients.into_iter().all(has_left)
        })
    }

    /// The time for `bytes` to leave, from the clients that would be asked for them, and to come back later. Clients in
    /// `exempt` give none.
    pub(crate) fn moving_both_ways(&self, id: GpuId, bytes: u64, exempt: &[ClientId]) -> Duration {
        let Some(gpu) = self.gpus.get(id) else { return Duration::ZERO };
        let idle = gpu.ledger.eviction_order().map(|(_, client)| client);
        let (mut rest, mut time) = (bytes, Duration::ZERO);
        for client in idle.chain(self.gpus.holders(id)).filter(|client| !exempt.contains(client)) {
            if rest == 0 {
                break;
            }
            let (Some(attachment), Some(account)) = (gpu.attachments.get(&client), gpu.account(client)) else {
                continue;
            };
            let part = account.evictable().min(rest);
            rest -= part;
            time += gpu.rates.both_ways(part, attachment.rate);
        }
        time + gpu.rates.both_ways(rest, None) // from clients that are already being evicted
    }

    /// Idle clients with evictable bytes, in the order of eviction, where that order depends on the queue.
    fn victims_by_queue(&self, id: GpuId) -> Vec<ClientId> {
        let idle = self.gpus.get(id).into_iter().flat_map(|gpu| gpu.ledger.eviction_order());
        let before: BTreeMap<Entity, u32> = self.whole_queue(id).into_iter().zip(0..).collect();
        let expected_idle = |(last_run, client): (Time, ClientId)| {
            let entity = self.queues.waiting(client);
            let before = entity.and_then(|entity| before.get(&entity).copied());
            (self.policy().expected_idle(&self.settings, self.now.saturating_sub(last_run), before), client)
        };
        let mut victims: Vec<_> = idle.map(expected_idle).collect();
        victims.sort_by_key(|(expected_idle, _)| Reverse(*expected_idle)); // equal ones stay in LRU order
        victims.into_iter().map(|(_, client)| client).collect()
    }

    /// Evicts `bytes` from clients that do not hold the lock, in the order of the policy. Clients in `last` give bytes
    /// only if no other client has any; memory that rules protect comes after that. Clients in `exempt` give none.
    pub(crate) fn evict(&mut self, id: GpuId, bytes: u64, exempt: &[ClientId], last: &[ClientId]) {
        let before = self.gpus.get(id).map_or(0, |gpu| gpu.ledger.evicting());
        self.take_back_ahead(id, bytes);
        let after = self.gpus.get(id).map_or(0, |gpu| gpu.ledger.evicting());
        let mut lacking = bytes.saturating_sub(after.saturating_sub(before));
        let mut victims: BTreeMap<ClientId, u64> = BTreeMap::new();
        let mut unprotected = self.unprotected(id);
        // Mostly, a few clients have all the missing bytes, so the rest are not listed.
        let by_queue = self.policy().evicts_by_queue().then(|| self.victims_by_queue(id));
        let idle = || {
            let gpu = self.gpus.get(id).filter(|_| by_queue.is_none());
            let idle = gpu.into_iter().flat_map(|gpu| gpu.ledger.eviction_order()).map(|(_, client)| client);
            by_queue.iter().flatten().copied().chain(idle)
        };
        for pass in [Pass::Ordinary, Pass::Last, Pass::Protected] {
            for client in idle() {
                if lacking == 0 {
                    break;
                }
                let Some(account) = self.account(client, id) else { continue };
                let has_unfreed = account.frees.present() > 0;
                let is_last = has_unfreed || last.contains(&client);
                if exempt.contains(&client) || is_last != (pass == Pass::Last) && pass != Pass::Protected {
                    continue;
                }
                let left = victims.get(&client).copied().unwrap_or(account.allowance);
                let evictable = account.evictable().saturating_sub(account.allowance - left);
                let take = if has_unfreed { evictable } else { evictable.min(lacking) };
                let take = match self.rules.group(client).and_then(|group| unprotected.get_mut(&group)) {
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
            self.allow(victim, id, allowance);
            self.check(victim);
        }
    }

    /// Takes back allowances beyond demand, until `bytes` are being freed. No client is exempt: one member of a gang
    /// can have more than it needs while another member lacks bytes.
    fn take_back_ahead(&mut self, id: GpuId, bytes: u64) {
        let clients = self.gpus.get(id).into_iter().flat_map(|gpu| gpu.ledger.ahead());
        let ahead: Vec<(ClientId, u64)> = clients
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
}
