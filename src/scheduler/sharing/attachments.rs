//! GPUs that appear and disappear, and clients that attach and detach them.

use super::Sharing;
use crate::{api::*, gpu::Access};
use std::time::Duration;

/// What a client that is being moved has requested.
pub(crate) struct Requested {
    /// The limit in bytes.
    bytes: Option<u64>,
    locks: Option<GpuSet>,
}

impl Sharing<'_> {
    /// `suspended`: the host is about to suspend.
    pub fn gpu_found(&mut self, id: GpuId, total: u64, suspended: bool) {
        self.gpus.found(id, total).found(total, suspended);
        self.quota.gpu_found(id);
        self.queues.gpu_found(id);
        self.fairness.gpu_found(id);
        self.effects.touch(id);
    }

    pub fn gpu_gone(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.access = Access::Gone;
        gpu.end_rooms(self.effects);
        self.effects.touch(id);
        self.forget_if_gone(id);
    }

    /// Forgets a GPU that is gone and has no clients.
    pub fn forget_if_gone(&mut self, id: GpuId) {
        if !self.gpus.get(id).is_some_and(|gpu| gpu.access == Access::Gone && gpu.attachments.is_empty()) {
            return;
        }
        self.gpus.forget(id);
        self.quota.gpu_forgotten(id);
        self.queues.gpu_forgotten(id);
        self.fairness.gpu_forgotten(id);
        self.effects.forget(id);
    }

    /// Adds a client that is about to create a context. If the client has attached the GPU before, its
    /// request is answered again, unless its first answer is pending. Returns whether the client is new
    /// on the GPU.
    pub fn attach(&mut self, client: ClientId, id: GpuId, engine: Engine) -> bool {
        let Some(state) = self.clients.get(&client).filter(|_| self.gpus.contains(id)) else { return false };
        if let Some(attachment) = self.gpus.attachment_mut(client, id) {
            attachment.engine = engine;
            if attachment.attached.is_some() {
                self.effects.command(Command::Attached { client, gpu: id });
                self.with_quota(|quota, cx, fx| quota.tell(cx, fx, client, id));
            }
            return false;
        }
        self.gpus.attach(self.now, client, id, state.tenant, engine);
        self.quota.attach(client, id);
        self.effects.touch(id);
        true
    }

    /// Removes a client from a GPU, with its memory, its hold and its requests. Returns whether the
    /// client had attached the GPU.
    pub fn detach(&mut self, client: ClientId, id: GpuId) -> bool {
        if self.gpus.attachment(client, id).is_none() {
            return false;
        }
        let entity = self.queues.entity(client);
        self.with_requests(|requests| requests.touch_conflicting_gangs(entity));
        self.cancel(client, &GpuSet::from([id]));
        self.end_hold(client, id, Duration::ZERO, false);
        self.quota.detach(client, id, self.rules);
        self.gpus.detach(client, id);
        self.effects.forget_client(client, id);
        true
    }

    /// Moves the attachment and the limit of a sleeping client from one GPU to another. Returns the
    /// limit and the locks that the client has requested, which [`moved`](Self::moved) requests again.
    /// `None`: the target is unknown or the client has already attached it.
    pub fn move_client(&mut self, client: ClientId, both @ Move { from, to }: Move) -> Option<Requested> {
        if !self.gpus.move_client(self.now, client, both) {
            return None;
        }
        let bytes = self.with_quota(|quota, cx, _| quota.move_client(cx, client, from, to));
        let locks = self.queues.wants(client).filter(|wants| wants.contains(&from)).cloned();
        self.effects.forget_client(client, from);
        Some(Requested { bytes, locks })
    }

    /// Completes a move, in the same step. Otherwise other clients could be promised the client's bytes.
    pub fn moved(&mut self, client: ClientId, Move { from, to }: Move, wanted: Requested) {
        self.limit_sleeper(client);
        self.effects.command(Command::Moved { client, from, to });
        if let Some(mut wants) = wanted.locks {
            wants.remove(&from);
            wants.insert(to);
            self.request(client, wants); // the request keeps its place
        }
        if let Some(bytes) = wanted.bytes {
            self.request_limit(client, to, bytes);
        }
        self.with_gpu(to, |gpu, cx, fx| gpu.lock_changed(cx, fx, client));
        self.with_gpu(from, |gpu, _, fx| gpu.schedule_verification(fx));
        for id in [from, to] {
            self.measure(id);
            self.effects.touch(id);
        }
        self.forget_if_gone(from);
    }

    /// Moves all requests to their current positions after rules have changed.
    pub fn requeue_all(&mut self) {
        let all = self.queues.entities();
        self.with_each(all, |requests, entity| requests.rules_changed(entity));
        self.fairness.forget_usage(self.now, self.settings.time_period);
        self.effects.touch_all(self.gpus.ids());
    }
}
