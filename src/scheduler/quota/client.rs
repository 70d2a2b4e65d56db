//! Limits that a client sets for itself by its environment. They apply beside those of its group's rule, and only tighten them: no
//! client gains by them, and no other client loses.
//!
//! - **Weight**: the client is queued by the later of two finish tags: its owner's, and that of an owner of its own with that weight,
//!   for which the rest of its owner counts among the others. While it waits it counts for no more than that weight.
//! - **Maximum of time**: counted for the client alone, beside its owner's.
//! - **Memory**: its limit is at most this, its context included. An allocation beyond it fails at once, since no other client could
//!   free memory for it.
//! - **Protected memory** (`memory-low`): the client uses its group's protection for at most this much.

use crate::{api::*, fairness::share::ShareOwner, machine::Machine};

impl EnvLimits {
    /// What it has of a share.
    pub(crate) fn of(&self, share: Share) -> Share {
        let weight = self.weight.map_or(share.weight, |weight| weight.min(share.weight));
        Share {
            weight,
            // What is idle has no least time.
            min: if weight == 0 { 0 } else { share.min },
            max: self.time_max.min(share.max),
            priority: self.priority.map_or(share.priority, |priority| priority.min(share.priority)),
            interactive: share.interactive && !self.patient,
        }
    }

    /// Whether it can have others go before its client, or its client before fewer.
    pub(crate) fn makes_classes(&self) -> bool {
        self.weight == Some(0) || self.priority.is_some() || self.patient
    }

    /// Whether what its client has had of the time matters.
    pub(crate) fn is_watched(&self) -> bool {
        self.time_max < 100
    }

    /// Whether its client cannot have all that others leave.
    pub(crate) fn is_bounded(&self) -> bool {
        self.memory_max != Amount::Infinity || self.is_bounded_everywhere()
    }

    pub(crate) fn is_bounded_everywhere(&self) -> bool {
        self.swap_max.is_some()
    }

    /// What of it decides where its client stands.
    fn time(&self) -> (Option<u16>, u8, Option<i8>, bool) {
        (self.weight, self.time_max, self.priority, self.patient)
    }
}

impl Machine {
    pub(crate) fn set_client_limits(&mut self, client: ClientId, own: EnvLimits) {
        let Some(state) = self.clients.get(&client) else { return };
        let stands = state.waiting.is_some() || state.holds();
        let attachments: Vec<(GpuId, bool)> =
            state.attachments.iter().map(|(id, attachment)| (*id, attachment.attached.is_some())).collect();
        let before = self.client_limits.remove(&client).unwrap_or_default();
        if own != EnvLimits::default() {
            self.client_limits.insert(client, own);
        }
        if before == own {
            return;
        }
        for (id, is_told) in attachments {
            self.host.mark_changed(id);
            self.swap_surplus(client, id);
            if is_told {
                self.tell_limit(client, id); // of the bound; the limit itself follows
            }
        }
        if stands && before.time() != own.time() {
            self.requeue_all();
        }
    }

    pub(crate) fn forget_client_limits(&mut self, client: ClientId) {
        if self.client_limits.remove(&client).is_some() {
            let owner = ShareOwner::Client(client);
            for gpu in self.gpus.values_mut() {
                gpu.finish_tags.remove(&owner);
                gpu.used.remove(&owner);
            }
        }
    }

    /// As a party of its own.
    pub(crate) fn client_share(&self, client: ClientId) -> Share {
        let default = Share::default();
        self.client_limits.get(&client).map_or(default, |own| Share {
            weight: own.weight.unwrap_or(default.weight),
            max: own.time_max,
            ..default
        })
    }

    /// As whom a client takes turns: as its party, and as itself where it has a lower weight.
    pub(crate) fn owners(&self, client: ClientId) -> impl Iterator<Item = ShareOwner> {
        let owner = self.owner(client);
        let own = self.client_limits.get(&client).and_then(|own| own.weight);
        let is_lower = |own: &u16| owner.is_some_and(|owner| *own < self.share(owner).weight);
        owner.into_iter().chain(own.filter(is_lower).map(|_| ShareOwner::Client(client)))
    }

    /// What it counts for when turns are divided, of what its party does.
    pub(crate) fn weight_of(&self, client: ClientId) -> u32 {
        self.owners(client).map(|owner| self.weight(owner)).min().unwrap_or(0)
    }

    /// Until when a client has been served there.
    pub(crate) fn latest_finish_tag(&self, client: ClientId, id: GpuId) -> Time {
        let Some(gpu) = self.gpus.get(&id) else { return Time::ZERO };
        self.owners(client).filter_map(|owner| gpu.finish_tags.get(&owner).copied()).max().unwrap_or_default()
    }

    /// What the client itself may have on that GPU, its context included; `None`: it says nothing of that.
    pub fn client_memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.client_limits.get(&client)?.memory_max.on(self.gpus.get(&id)?.total)
    }

    /// What its demand can come to there by that.
    pub(crate) fn client_bound(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let context = self.attachment(client, id).map_or(0, |attachment| self.context(attachment, id));
        Some(self.client_memory_max(client, id)?.saturating_sub(context))
    }

    /// What it may have over all GPUs, since all of it may have to leave them.
    pub(crate) fn client_swap_max(&self, client: ClientId) -> Option<u64> {
        self.client_limits.get(&client)?.swap_max
    }

    /// By how much its promises can rise by that. `None`: they are above what they may be.
    pub(crate) fn client_room(&self, client: ClientId) -> Option<u64> {
        let Some(max) = self.client_swap_max(client) else { return Some(u64::MAX) };
        let attachments = self.clients.get(&client).into_iter().flat_map(|state| state.attachments.values());
        max.checked_sub(attachments.fold(0, |sum: u64, attachment| sum.saturating_add(attachment.limit_state.counted)))
    }

    /// What of its memory there it does not claim to be kept on the GPU, whatever its rule says.
    pub(crate) fn unclaimed(&self, client: ClientId, id: GpuId) -> u64 {
        let low = self.client_limits.get(&client).and_then(|own| own.memory_low?.on(self.gpus.get(&id)?.total));
        let has = self.account(client, id).map_or(0, |account| account.allowance);
        low.map_or(0, |low| has.saturating_sub(low))
    }
}
