//! Evicts memory beyond the limits of rules.

use crate::{api::*, machine::Machine};

impl Machine {
    /// Bytes that a client's group may allocate on a GPU. `None`: the client is in no group, or the
    /// group is unlimited.
    pub fn memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.memory_max(client, self.gpus.get(id)?.total)
    }

    /// The measured or estimated size of the contexts of a client's group on a GPU, in bytes.
    pub fn contexts_of_group(&self, client: ClientId, id: GpuId) -> u64 {
        self.ask_quota(|quota, cx| quota.contexts_of_group(cx, client, id))
    }

    /// The measured or estimated size of a client's own context on a GPU, in bytes.
    pub fn counted_context(&self, client: ClientId, id: GpuId) -> u64 {
        self.ask_quota(|quota, cx| quota.context(cx, client, id))
    }

    /// The lowest of all limits on a client's memory on a GPU, even if the client does not use that
    /// GPU. `None`: unlimited.
    pub fn lowest_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.lowest_max(client, self.gpus.get(id)?.total)
    }

    /// Bytes that a client's environment allows it to allocate on a GPU, including its context.
    /// `None`: no limit.
    pub fn env_memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.env_memory_max(client, self.gpus.get(id)?.total)
    }

    /// Whether a client gets no free bytes on a GPU: the client neither runs nor waits there, and
    /// the client or its group exceeds a limit.
    pub(crate) fn is_over_limit(&self, client: ClientId, id: GpuId) -> bool {
        let uses = self.gpus.hold(client, id).is_some() || self.queues.waits_for(client, id);
        !uses && self.ask_quota(|quota, cx| quota.is_over(cx, client, id))
    }

    /// Evicts memory beyond the limit of a client or its group if the client does not run on the
    /// GPU. A running client keeps the memory that it needs.
    pub(crate) fn swap_surplus(&mut self, client: ClientId, id: GpuId) {
        if !self.is_over_limit(client, id) {
            return;
        }
        let Some(account) = self.gpus.account(client, id) else { return };
        let allowance = |client| self.gpus.account(client, id).map_or(0, |account| account.allowance);
        let surplus = self.ask_quota(|quota, cx| quota.surplus(cx, client, id, allowance));
        let take = account.evictable().min(surplus);
        if take > 0 {
            let rest = account.allowance - take;
            self.allow(client, id, rest);
            self.check(client);
        }
    }
}
