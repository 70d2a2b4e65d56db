//! Lowers allowances: memory of clients that do not run leaves for clients that are to run.

use crate::{api::*, lock::Entity, machine::Machine};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// From whom bytes are taken, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Others,
    Last,
    Protected,
}

impl Machine {
    /// Bytes by which more is charged than there is.
    pub(crate) fn overdrawn(&self, id: GpuId) -> u64 {
        self.memory.get(&id).map_or(0, |g| g.ledger.charged().saturating_sub(g.capacity(&self.settings)))
    }

    /// How long it takes for so many bytes to leave, from those who would be asked for them, and to come back later.
    pub(crate) fn moving_both_ways(&self, id: GpuId, bytes: u64, spare: &[ClientId]) -> Duration {
        let Some(gpu) = self.memory.get(&id) else { return Duration::ZERO };
        let idle = gpu.ledger.eviction_order().map(|(_, client)| client);
        let (mut rest, mut time) = (bytes, Duration::ZERO);
        for client in idle.chain(self.lock.holders(id)).filter(|client| !spare.contains(client)) {
            if rest == 0 {
                break;
            }
            let (Some(memory), Some(account)) = (gpu.clients.get(&client), gpu.ledger.account(client)) else {
                continue;
            };
            let part = account.evictable().min(rest);
            rest -= part;
            time += gpu.rates.both_ways(part, memory.rate);
        }
        time + gpu.rates.both_ways(rest, None) // on its way already
    }

    /// Who has bytes that can leave, in the order in which they do.
    fn victims(&self, id: GpuId) -> Vec<ClientId> {
        let Some(gpu) = self.memory.get(&id) else { return Vec::new() };
        let idle = gpu.ledger.eviction_order();
        if !self.policy().evicts_by_queue() {
            return idle.map(|(_, client)| client).collect();
        }
        let before: BTreeMap<Entity, u32> = self.lock.queue(id).map(|(_, entity)| entity).zip(0..).collect();
        let rests = |(last_run, client): (Time, ClientId)| {
            let entity = self.lock.waiting(client);
            let before = entity.and_then(|entity| before.get(&entity).copied());
            (self.policy().expected_idle(&self.settings, self.now.saturating_sub(last_run), before), client)
        };
        let mut victims: Vec<_> = idle.map(rests).collect();
        victims.sort_by_key(|(rests, _)| Reverse(*rests)); // who ran least recently first, where they are equal
        victims.into_iter().map(|(_, client)| client).collect()
    }

    /// Asks for that many bytes back from clients that do not hold the lock, in the order that the policy says; from those of
    /// `last` only if nobody else has any, and then what rules protect.
    pub(crate) fn evict(&mut self, id: GpuId, bytes: u64, spare: &[ClientId], last: &[ClientId]) {
        let before = self.memory.get(&id).map_or(0, |gpu| gpu.ledger.evicting());
        self.take_back_ahead(id, bytes, spare);
        let after = self.memory.get(&id).map_or(0, |gpu| gpu.ledger.evicting());
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

    /// Takes back what clients may map and do not need, until so many bytes are on their way.
    fn take_back_ahead(&mut self, id: GpuId, bytes: u64, spare: &[ClientId]) {
        let attachments = self.memory.get(&id).into_iter().flat_map(|gpu| gpu.clients.keys().copied());
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
}
