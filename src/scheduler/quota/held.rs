//! Limit requests that are held until the next measurement. A request is held for one of three
//! reasons:
//!
//! - The request exceeds the room that the last measurement showed. Other programs may have freed
//!   memory since.
//! - Together with a context of unknown size, the request exceeds a rule's limit. The context may
//!   be small.
//! - The request lacks only the room set aside for contexts under creation. The request is held
//!   until these contexts are measured.

use super::{Context, Quota};
use crate::{api::*, effects::Effects, timers::Wake};
use std::time::Duration;

/// How long after its admission a client may still be creating its context, if the client has not
/// used the context yet. The driver creates contexts one at a time, and some take more than a
/// second.
pub(crate) const CONTEXT_APPEARS: Duration = Duration::from_secs(10);
/// How long a request is held for a measurement.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);
/// A context can be measured once no memory has moved for this long.
const AT_REST: Duration = Duration::from_millis(100);
/// How often contexts under creation are measured while a request waits for them.
const CONTEXTS_LOOK: Duration = Duration::from_millis(100);

/// A request that is held for a measurement.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(super) struct HeldRequest {
    bytes: u64,
    /// The earliest start of a measurement that can decide on the request.
    since: Time,
    /// When the request began to wait for other clients' contexts. `None`: no such wait.
    for_contexts: Option<Time>,
}

impl HeldRequest {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Quota {
    /// Holds a request that exceeds the GPU's present offer. Returns `false` if the request exceeds
    /// even the highest possible offer, and managed memory may not exceed the GPU.
    pub(super) fn hold_for_room(&mut self, cx: Context, client: ClientId, id: GpuId, bytes: u64) -> bool {
        let may_fit = cx.gpus.offer_at_best(id).is_some_and(|best| bytes <= best || cx.rules.may_exceed_gpu(client));
        if let Some(gpu) = self.gpus.get_mut(&id).filter(|_| may_fit) {
            gpu.held_requests.insert(client, HeldRequest { bytes, since: cx.now, for_contexts: None });
        }
        may_fit
    }

    /// Holds a request that the measurement did not admit, if it would fit beside small contexts.
    /// Returns `false` if the request would not fit even then, or has waited too long for the
    /// contexts.
    pub(super) fn hold_for_contexts(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        client: ClientId,
        id: GpuId,
        before: HeldRequest,
    ) -> bool {
        let first = before.for_contexts.unwrap_or(cx.now);
        let waits = before.bytes <= cx.gpus.offer_as_measured(id) && cx.now < first + CONTEXT_APPEARS;
        if let Some(gpu) = self.gpus.get_mut(&id).filter(|_| waits) {
            let held = HeldRequest { since: cx.now + CONTEXTS_LOOK, for_contexts: Some(first), ..before };
            gpu.held_requests.insert(client, held);
            if before.for_contexts.is_none() {
                // This message keeps the client's request from timing out.
                fx.command(Command::Waiting { client, gpus: GpuSet::from([id]), why: WaitReason::Memory });
            }
        }
        waits
    }

    /// Holds a request if the client's context counts towards its memory limit and has not been
    /// measured yet. Returns whether the request is held.
    pub(super) fn hold_for_context(&mut self, cx: Context, client: ClientId, id: GpuId, bytes: u64) -> bool {
        let total = cx.gpus.total(id);
        let is_bounded = cx.rules.memory_max(client, total).or(cx.rules.env_memory_max(client, total)).is_some();
        let is_open = is_bounded && self.is_context_unmeasured(cx, client, id) && cx.gpus.offer_at_best(id).is_some();
        let Some(gpu) = self.gpus.get_mut(&id).filter(|_| is_open) else { return false };
        // A replacement request keeps the deadline of the request it replaces.
        let since = cx.now + AT_REST;
        let since = gpu.held_requests.get(&client).map_or(since, |before| before.since.min(since));
        gpu.held_requests.insert(client, HeldRequest { bytes, since, for_contexts: None });
        true
    }

    /// Decides on requests that were held for a measurement that began at `begun`. Returns whether
    /// another measurement is needed.
    #[must_use]
    pub fn answer_held(&mut self, cx: Context, fx: &mut Effects, id: GpuId, begun: Time) -> bool {
        let Some(gpu) = self.gpus.get_mut(&id) else { return false };
        let answered = gpu.held_requests.iter().filter(|(_, held)| held.since <= begun);
        let answered: Vec<(ClientId, HeldRequest)> = answered.map(|(client, held)| (*client, *held)).collect();
        gpu.held_requests.retain(|_, held| held.since > begun);
        for (client, held) in answered {
            self.decide_request(cx, fx, client, id, held.bytes, Some(held));
        }
        self.schedule_samples(cx, fx, id)
    }

    /// Decides on requests whose measurement did not arrive in time. Returns whether another
    /// measurement is needed.
    #[must_use]
    pub fn held_requests_timed_out(&mut self, cx: Context, fx: &mut Effects, id: GpuId) -> bool {
        self.answer_held(cx, fx, id, cx.now.saturating_sub(SAMPLE_TIMEOUT))
    }

    /// Schedules the next check of held requests. Returns whether a measurement has to begin now. A
    /// measurement that began earlier would not count.
    pub(super) fn schedule_samples(&self, cx: Context, fx: &mut Effects, id: GpuId) -> bool {
        let held = || self.gpus.get(&id).into_iter().flat_map(|gpu| gpu.held_requests.values());
        let due = |held: &HeldRequest| if held.since > cx.now { held.since } else { held.since + SAMPLE_TIMEOUT };
        fx.wake(Wake::HeldRequests(id), held().map(due).min());
        held().any(|held| held.since <= cx.now)
    }
}
