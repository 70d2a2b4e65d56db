//! Clients that do not answer, or answer that they cannot drain.

use super::Sharing;
use crate::{api::*, timers::Wake};

impl Sharing<'_> {
    /// Handles a holder's report that it cannot drain or evict.
    pub fn stuck(&mut self, client: ClientId, gpus: &GpuSet, reason: StuckReason) {
        let cannot_evict = match reason {
            StuckReason::UntrackedWork | StuckReason::OtherDevice => return, // concerns the client's memory, not a drain
            StuckReason::HostFull => Some(EvictionBlock::HostFull),
            StuckReason::Broken => Some(EvictionBlock::Broken),
            StuckReason::UnseenWork => Some(EvictionBlock::UnseenWork),
            StuckReason::NeedsHost | StuckReason::LongWork | StuckReason::Capturing => None,
        };
        if let Some(why) = cannot_evict {
            for id in gpus {
                self.with_gpu(*id, |gpu, cx, fx| gpu.cannot_evict(cx, fx, client, why));
            }
            return;
        }
        if reason == StuckReason::NeedsHost {
            // The client's gate is open again and no thread waits at it. So the client's own
            // request must not cause a revoke.
            self.cancel(client, gpus);
        }
        for id in gpus {
            if self.with_gpu(*id, |gpu, cx, fx| gpu.is_stuck(cx.now, fx, client)) == Some(true) {
                self.with_requests(|requests| requests.report_wait_on(*id, WaitReason::HolderStuck));
            }
        }
        self.touch_peers(client);
        self.check(client);
    }

    /// Checks the answers that a client owes, asks again for overdue answers, and sets the time of
    /// the next check. The loop ends because a repeated revoke is not due again at the same time.
    pub fn check(&mut self, client: ClientId) {
        let mut is_revoked_again = false;
        loop {
            let mut answers = self.model().answers(client);
            for id in &answers.late {
                self.with_gpu(*id, |gpu, cx, fx| gpu.eviction_is_late(cx, fx, client));
            }
            for id in &answers.unused {
                self.with_gpu(*id, |gpu, _, fx| gpu.measure(fx));
            }
            for id in &answers.lagging {
                self.with_gpu(*id, |gpu, _, fx| gpu.lags(fx, client));
                self.touch_peers(client);
            }
            self.schedule_around(client, std::mem::take(&mut answers.undrainable));
            self.model().withdraw_unwanted(client, &mut answers);
            for id in &answers.unwanted {
                self.with_gpu(*id, |gpu, cx, fx| gpu.change_hold(cx, fx, client, |hold| hold.revoked = None));
            }
            if !answers.unwanted.is_empty() {
                self.with_requests(|requests| requests.revoke_withdrawn(client));
                self.touch_peers(client);
            }
            if !self.clients.contains_key(&client) {
                return;
            }
            let (is_probed, probed) = answers.probe(self.now, self.gpus.probed(client));
            self.gpus.set_probed(client, probed);
            if is_probed {
                self.effects.command(Command::Probe { client });
            }
            self.effects.wake(Wake::Client(client), answers.next);
            let Some((gpus, backoff)) = answers.again else { break };
            self.send_revoke(client, gpus, Some(backoff));
            is_revoked_again = true;
        }
        if is_revoked_again {
            self.requeue_peers(client);
        }
    }

    /// Requeues the requests of a client's gang members, because the client may need them in order
    /// to drain.
    pub(super) fn requeue_peers(&mut self, client: ClientId) {
        let peers = self.model().waiting_peers(client);
        self.with_each(peers, |requests, entity| requests.requeue(entity));
    }

    /// Like `requeue_peers`, and marks the GPUs of the requests.
    fn touch_peers(&mut self, client: ClientId) {
        let peers = self.model().waiting_peers(client);
        self.with_each(peers, |requests, entity| requests.requeue_and_touch(entity));
    }

    /// Marks holds as undrainable: other clients are admitted beside them from now on.
    fn schedule_around(&mut self, client: ClientId, gpus: GpuSet) {
        if gpus.is_empty() {
            return;
        }
        for id in &gpus {
            if let Some((hold, waited)) = self.model().charged_early(client, *id) {
                self.charge(client, *id, &hold, waited);
            }
            self.with_gpu(*id, |gpu, cx, fx| gpu.becomes_undrainable(cx, fx, client));
        }
        self.effects.command(Command::Undrainable { client, gpus });
        self.with_requests(|requests| requests.becomes_undrainable(client));
    }
}
