//! Handles clients' reports of their memory.

use super::{Account, Context, Gpu, account::Evicted};
use crate::{api::*, effects::Effects, quota::Limit, timers::Wake};
use std::time::Duration;

/// How long a client's memory has to be unchanged before the client is asked to allocate host memory
/// ahead of evictions. Programs that end soon, or are still allocating, would gain nothing from an
/// earlier request.
pub(crate) const AT_REST: Duration = Duration::from_secs(3);

impl Gpu {
    /// Handles a client's report. Returns the believed part of the report. `None`: the client has not
    /// attached the GPU.
    pub fn reported(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        client: ClientId,
        report: MemoryReport,
    ) -> Option<MemoryReport> {
        let attachment = self.attachments.get_mut(&client)?;
        if report.demand > 0 {
            attachment.used.get_or_insert(cx.now);
        }
        let before = attachment.account().report.mapped;
        let (evicted, report, missing) = self.change_account(fx, client, |account| {
            let evicted = account.reported(cx.now, report);
            (evicted, account.report, account.returning())
        })?;
        let needed = cx.quota.limit(client, self.id).map_or(0, Limit::demand);
        let attachment = self.attachments.get_mut(&client)?;
        if report.mapped >= report.demand {
            attachment.failures.succeeded();
        }
        if let Some(hold) = &mut attachment.lock.hold {
            hold.follow_return(cx.now, missing);
        }
        if report.demand > needed {
            attachment.grows(cx.now);
        }
        self.allow_resident(cx, fx, client);
        self.adjust_trial(cx.settings);
        if self.account(client).is_some_and(Account::is_worth_measuring) {
            self.measure(fx);
        }
        let unverified_until = self.account(client).and_then(Account::expires);
        if unverified_until.is_some() && fx.wakes_at(Wake::Verification(self.id)).is_none() {
            fx.wake(Wake::Verification(self.id), unverified_until);
        }
        if let Some(Evicted { bytes, contents, time }) = evicted {
            self.learn_rate(client, bytes, contents, time);
        }
        self.update_eviction_block(cx, fx, client);
        if report.mapped != before {
            fx.wake(Wake::Ahead(client, self.id), Some(cx.now + AT_REST));
        }
        Some(report)
    }
}
