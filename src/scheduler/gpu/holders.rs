//! Changes of the holds of a GPU's lock, from their grant to their end.

use super::{Account, ClientLock, Context, Gpu, Hold, STUCK, TurnStep, hold::Revoked};
use crate::{api::*, effects::Effects};
use std::time::Duration;

impl Gpu {
    /// Takes a step of a holder's turn.
    pub fn step_turn(&mut self, fx: &mut Effects, client: ClientId, step: TurnStep) {
        let Some(attachment) = self.attachments.get_mut(&client) else { return };
        attachment.lock.hold = Some(step.hold);
        if let Some((waiters, grace)) = step.tell {
            fx.command(Command::Contended { client, gpus: GpuSet::from([self.id]), waiters, grace });
        }
        if let Some(bytes) = step.prepare {
            fx.command(Command::Prepare { client, gpu: self.id, bytes });
        }
    }

    /// Gives a client the lock. `waited`: how long the client waited for it.
    pub fn begin_hold(&mut self, cx: Context, fx: &mut Effects, client: ClientId, hold: Hold, waited: Duration) {
        // A client does not evict memory while it holds the lock, so a pending eviction is cancelled.
        // A client that runs by page faults can be granted the lock while its eviction is blocked.
        self.stop_evicting(cx, fx, client);
        self.take_over_hold(cx, fx, client, hold);
        if let Some(attachment) = self.attachments.get_mut(&client) {
            attachment.lock.grants += 1;
            attachment.lock.wait_time += waited;
        }
    }

    /// Records a lock that a client holds.
    pub fn take_over_hold(&mut self, cx: Context, fx: &mut Effects, client: ClientId, mut hold: Hold) {
        if let Some(attachment) = self.attachments.get_mut(&client) {
            hold.begin_return(attachment.account().returning());
            self.holders.insert(hold.number, client);
            attachment.lock.hold = Some(hold);
        }
        self.lock_changed(cx, fx, client);
    }

    /// Ends a client's hold. `busy`: how long the GPU worked for the client. `idle`: the client
    /// released the lock because it had no more work. Returns the hold, and how long other clients
    /// waited for it.
    pub fn end_hold(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        client: ClientId,
        busy: Duration,
        idle: bool,
    ) -> Option<(Hold, Duration)> {
        let attachment = self.attachments.get_mut(&client)?;
        let hold = attachment.lock.hold.take()?;
        self.holders.remove(&hold.number);
        self.preempted = (!idle).then_some(client);
        let held = cx.now.saturating_sub(hold.since);
        let waited = hold.waited(cx.now).min(held);
        let uncontended = held - waited;
        attachment.lock.ended(cx.now, &hold);
        let history = &mut attachment.history;
        // As with bursts, uncontended time counts as at most one burst if the client ran out of
        // work.
        let ran = if idle { waited + uncontended.min(history.bursts.expected()) } else { held };
        history.progress.ran(cx.now, ran, idle);
        history.bursts.ran(waited, uncontended, busy, idle);
        history.utilization.turn_ended(waited, idle);
        self.change_account(fx, client, Account::has_run);
        self.lock_changed(cx, fx, client);
        self.end_trial(fx, client);
        Some((hold, waited))
    }

    /// Changes a client's hold, and updates the ledger.
    pub fn change_hold(&mut self, cx: Context, fx: &mut Effects, client: ClientId, change: impl FnOnce(&mut Hold)) {
        if let Some(hold) = self.hold_mut(client) {
            change(hold);
            self.lock_changed(cx, fx, client);
        }
    }

    /// Records that a revoke is being sent. `again`: the revoke is a repetition, with this backoff.
    pub fn revoke(&mut self, cx: Context, fx: &mut Effects, client: ClientId, again: Option<Duration>) {
        let since = cx.now;
        self.change_hold(cx, fx, client, |hold| {
            hold.revoked = Some(Revoked {
                first: hold.revoked.map_or(since, |revoked| revoked.first),
                since,
                again: None,
                backoff: again.unwrap_or(STUCK.0),
            });
        });
    }

    /// Handles a holder's report that it cannot drain. Returns whether the holder was revoked.
    pub fn is_stuck(&mut self, now: Time, fx: &mut Effects, client: ClientId) -> bool {
        let Some(hold) = self.hold_mut(client) else { return false };
        let Some(revoked) = hold.revoked.as_mut() else { return false };
        hold.stuck = true;
        revoked.again = Some(now + revoked.backoff);
        revoked.backoff = (revoked.backoff * 2).min(STUCK.1);
        fx.touch(self.id);
        true
    }

    /// Records that a holder's drain lags, so that other members of its gang are granted first.
    pub fn lags(&mut self, fx: &mut Effects, client: ClientId) {
        self.hold_mut(client).into_iter().for_each(|hold| hold.lags = true);
        fx.touch(self.id);
    }

    /// Marks a hold as undrainable: other clients are admitted beside it from now on.
    pub fn becomes_undrainable(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        self.change_hold(cx, fx, client, |hold| hold.undrainable = true);
        if !self.lock(client).is_some_and(ClientLock::may_need_memory) {
            self.measure(fx);
        }
    }

    /// Handles a client whose process was stopped or continues. `changed`: this is news.
    pub fn process_stopped(&mut self, cx: Context, fx: &mut Effects, client: ClientId, stopped: bool, changed: bool) {
        if let Some(hold) = self.hold_mut(client)
            && let Some(revoked) = hold.revoked.as_mut()
        {
            if stopped {
                // The driver locks a process only when none of its work runs, so nothing else can be stuck.
                hold.suspended |= revoked.again.is_none() || cx.sleep.is_foreign(client);
            } else if changed {
                // Possibly the client has not read the revoke yet, so its time to answer and to
                // drain starts anew. An undrainable holder has had that time.
                hold.suspended = false;
                revoked.since = cx.now;
                if !hold.undrainable {
                    revoked.first = cx.now;
                }
            }
        }
        self.lock_changed(cx, fx, client);
    }

    fn hold_mut(&mut self, client: ClientId) -> Option<&mut Hold> {
        self.attachments.get_mut(&client)?.lock.hold.as_mut()
    }
}
