//! Clients that are off their GPUs, or on their way off or back. The limit of such a client is its
//! demand, or the limit that it has requested if that is higher. So other clients can use the rest,
//! and the client can be moved to a GPU without spare memory. The lower limit is sent before the
//! order to prepare, because a sleeping client acknowledges nothing. Requests for more memory are
//! handled as for other clients.

use super::{Context, Quota, limit::Limit};
use crate::{api::*, effects::Effects};

impl Quota {
    /// Handles a client that is about to leave its GPUs (`asleep`), or is on its GPUs again
    /// (`!asleep`).
    pub fn set_asleep(&mut self, cx: Context, fx: &mut Effects, client: ClientId, asleep: bool) {
        let has_changed = if asleep { self.asleep.insert(client) } else { self.asleep.remove(&client) };
        if !has_changed {
            return;
        }
        for id in self.gpus_of(client) {
            self.host.mark_changed(id);
            if asleep {
                self.lower_to_demand(cx, fx, client, id);
            }
        }
    }

    fn lower_to_demand(&mut self, cx: Context, fx: &mut Effects, client: ClientId, id: GpuId) {
        let Some(entry) = self.entry_mut(client, id) else { return };
        let (told, limit) = (entry.is_told, &mut entry.limit);
        let bytes = limit.while_asleep();
        if bytes >= limit.limit || !limit.is_responsive() {
            return;
        }
        limit.target = bytes;
        limit.set(cx.now, bytes, told);
        self.rising.remove(&(id, client));
        self.recommit(cx, client, id);
        if told {
            self.tell(cx, fx, client, id);
        }
    }
}

impl Limit {
    /// The limit of a client that is off its GPUs: its demand or its requested limit, whichever is
    /// higher.
    pub(super) fn while_asleep(&self) -> u64 {
        self.demand().max(self.wanted.map_or(0, |wanted| wanted.bytes))
    }
}
