//! Evicts memory beyond the limits of rules.

use crate::{api::*, machine::Machine};

impl Machine {
    /// Whether a client gets no free bytes on a GPU: the client neither runs nor waits there, and
    /// the client or its group exceeds a limit.
    pub(crate) fn is_over_limit(&self, client: ClientId, id: GpuId) -> bool {
        let uses = self.gpus.hold(client, id).is_some() || self.queues.waits_for(client, id);
        !uses && self.model().ask_quota(|quota, cx| quota.is_over(cx, client, id))
    }

    /// Evicts memory beyond the limit of a client or its group if the client does not run on the
    /// GPU. A running client keeps the memory that it needs.
    pub(crate) fn swap_surplus(&mut self, client: ClientId, id: GpuId) {
        if !self.is_over_limit(client, id) {
            return;
        }
        let Some(account) = self.gpus.account(client, id) else { return };
        let allowance = |client| self.gpus.account(client, id).map_or(0, |account| account.allowance);
        let surplus = self.model().ask_quota(|quota, cx| quota.surplus(cx, client, id, allowance));
        let take = account.evictable().min(surplus);
        if take > 0 {
            let rest = account.allowance - take;
            self.allow(client, id, rest);
            self.check(client);
        }
    }
}
