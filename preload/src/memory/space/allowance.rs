//! The allowance: the scheduler's limit on this client's bytes on the GPU. Tracks which allowances have
//! been carried out.

use super::Space;

/// The most pending allowances. No eviction has this many steps.
const MANY_PENDING: usize = 4096;

impl Space {
    /// Applies a new allowance.
    pub fn allow(&mut self, seq: u32, bytes: u64) {
        self.account.allowance = bytes;
        self.pending.push_back((seq, bytes));
        if self.pending.len() > MANY_PENDING {
            self.pending.pop_front(); // later allowances replace it
        }
        self.acknowledge();
    }

    /// Resets the allowance for a new scheduler. Mapped memory stays until the scheduler sends allowances.
    pub fn reset_for_scheduler(&mut self) {
        self.reset_for_successor();
        (self.account.limit_max, self.account.host_cache_max) = (0, u64::MAX);
    }

    /// Resets the allowance for a scheduler that continues on the same connection. The highest limit that
    /// can be requested stays.
    pub fn reset_for_successor(&mut self) {
        self.pending.clear();
        (self.account.allowance, self.account.ack) = (self.account.mapped + self.account.pinned, 0);
        (self.account.limit_seq, self.account.has_limit) = (0, false);
    }

    /// Removes the allowance, to run without a scheduler.
    pub fn run_ungated(&mut self, limit: u64) {
        self.pending.clear();
        (self.account.allowance, self.account.limit) = (u64::MAX, self.account.at_most(limit));
        (self.account.limit_max, self.account.host_cache_max) = (0, u64::MAX);
    }

    /// Applies a new limit on the demand. `most` is the highest limit that can be requested, and `keep` the
    /// limit on cached host buffers.
    pub fn limit(&mut self, seq: u32, bytes: u64, most: u64, keep: u64) {
        self.account.limit = bytes.min(self.account.env_max);
        self.account.limit_max = most.min(self.account.env_max);
        (self.account.limit_seq, self.account.host_cache_max) = (seq, keep);
        self.account.has_limit = true;
    }

    /// Sets the allowance so that `bytes` bytes are evicted and none are restored. Used without a
    /// scheduler, while other clients lack memory.
    pub fn make_room_for_others(&mut self, bytes: u64) {
        self.account.allowance = self.account.mapped.saturating_sub(bytes) + self.account.pinned;
    }

    /// Ends an eviction that cannot continue. The remaining memory stays on the GPU.
    pub fn give_up_eviction(&mut self) {
        self.account.allowance = self.account.mapped + self.account.pinned;
        if let Some((seq, _)) = self.pending.drain(..).next_back() {
            self.account.ack = seq;
        }
    }

    pub(super) fn update_peak(&mut self) {
        if self.account.can_run() && !self.account.demand_paged {
            self.account.peak = self.account.peak.max(self.account.demand);
        }
    }

    /// Acknowledges the allowances that have been carried out. If the latest has been carried out, all
    /// earlier allowances are obsolete.
    pub(super) fn acknowledge(&mut self) {
        let there = self.account.mapped + self.account.pinned;
        if self.pending.back().is_some_and(|(_, bytes)| there <= *bytes) {
            self.pending.drain(..self.pending.len() - 1);
        }
        while let Some((seq, _)) = self.pending.front().copied().filter(|(_, bytes)| there <= *bytes) {
            self.account.ack = seq;
            self.pending.pop_front();
        }
    }
}
