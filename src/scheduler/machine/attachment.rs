//! Clients that attach and detach GPUs, and their memory reports.

use super::Machine;
use crate::{api::*, queue::Blocked, timers::Wake};
use std::time::Duration;

impl Machine {
    pub(super) fn attach(&mut self, client: ClientId, id: GpuId, engine: Engine) {
        let now = self.now;
        let Some(tenant) = self.clients.get(&client).filter(|_| self.gpus.contains(id)).map(|state| state.tenant)
        else {
            return;
        };
        if let Some(attachment) = self.gpus.attachment_mut(client, id) {
            attachment.engine = engine;
            // The request is answered again, unless its first answer is pending.
            if attachment.attached.is_some() {
                self.effects.command(Command::Attached { client, gpu: id });
                self.with_quota(|quota, cx, fx| quota.tell(cx, fx, client, id));
            }
            return;
        }
        self.gpus.attach(now, client, id, tenant, engine);
        self.quota.attach(client, id);
        self.touch(id);
        self.attached_asleep(client);
    }

    /// Removes a client from a GPU, with its memory, its hold and its requests.
    pub(super) fn detach(&mut self, client: ClientId, id: GpuId) {
        if self.gpus.attachment(client, id).is_none() {
            return;
        }
        self.touch_conflicting_gangs(self.queues.entity(client));
        self.cancel(client, &GpuSet::from([id]));
        self.end_hold(client, id, Duration::ZERO, false);
        self.quota.detach(client, id, &self.rules);
        self.gpus.detach(client, id);
        self.effects.wake(Wake::Eviction(client, id), None);
        self.effects.wake(Wake::Ahead(client, id), None);
        self.sleep.detached(client, id);
        self.limit_sleeper(client);
        self.answer_move(client);
        self.touch(id);
        if self.sleep.is_drained(client) {
            self.drain_client(client);
        }
        self.forget_if_gone(id);
    }

    /// Handles a client's report of its memory on a GPU.
    pub(super) fn report(&mut self, client: ClientId, id: GpuId, report: MemoryReport) {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        let Some((report, has_moved)) = gpu.reported(cx, fx, client, report) else { return };
        if has_moved {
            self.memory_changed(client, id);
        }
        self.with_quota(|quota, cx, _| quota.reported(cx, client, id, report.limit_ack, report.demand));
        self.check(client); // the report may be a late answer to a revoke or an eviction
        // The client's need may have changed, and its blocked request may now be servable.
        if let Some(entity) = self.queues.waiting(client)
            && self.queues.request(entity).is_some_and(|request| request.blocked == Some(Blocked::Pinned(id)))
        {
            self.enqueue(entity);
        }
        // Holders and the first request in the queue are served first. Bytes that are still free
        // may then go to a client that is not waiting.
        self.effects.untouch(id);
        self.settle(id);
        if self.gpus.get(id).is_some_and(|gpu| !gpu.lacking) && !self.is_over_limit(client, id) {
            self.credit(client, id, self.model().overdrawn(id));
        }
    }
}
