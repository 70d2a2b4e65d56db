//! Classes: the precedence of clients regardless of arrival.

use super::{Shares, bound};
use crate::{
    api::*,
    policy::Precedence,
    queue::{Class, Entity, Gang, Tier},
};
use std::cmp::{Ordering, Reverse};

impl Shares<'_> {
    /// The class of a client that wants or holds these GPUs: the worst class among the members of
    /// its gang, because they run together. So a client cannot gain precedence by joining a gang.
    pub fn class(&self, client: ClientId, gpus: &GpuSet) -> Class {
        if self.rules.are_none() {
            return Class::default();
        }
        // All members of a gang made by a rule have the same share if no member's environment sets
        // limits.
        let gang = self.queues.gang(client);
        if let (Some(Gang::Group(_)), true) = (gang, self.rules.with_env().next().is_none()) {
            return self.own_class(client, gpus);
        }
        let all = self.queues.gang_peers(client).chain([client]).map(|member| self.own_class(member, gpus));
        all.max().unwrap_or_default()
    }

    fn own_class(&self, client: ClientId, gpus: &GpuSet) -> Class {
        let Some(owner) = self.owner(client) else { return Class::default() };
        let share = self.share_of(client);
        let has_had_more = |id: &GpuId| self.latest_finish_tag(client, *id) > self.now;
        Class {
            tier: share.tier(),
            interactive_first: Reverse(share.interactive && !gpus.iter().any(has_had_more)),
            below_minimum: Reverse(share.min > 0 && gpus.iter().any(|id| self.is_below_minimum(owner, *id))),
        }
    }

    /// The class of a holder on all GPUs that it holds.
    pub fn class_of_holder(&self, holder: ClientId) -> Class {
        self.class(holder, &self.gpus.holds_of(holder).map(|(id, _)| id).collect())
    }

    /// The precedence of a waiting request over a holder.
    pub fn precedence(&self, waiter: Entity, holder: ClientId) -> Precedence {
        let Some(request) = self.queues.request(waiter) else { return Precedence::Equal };
        if !self.rules.have_classes() {
            return Precedence::Equal;
        }
        let (first, has) = (request.key.class, self.class_of_holder(holder));
        // An interactive holder counts as interactive even if its owner has used more than its
        // share.
        let is_interactive = has.interactive_first.0 || self.share_of(holder).interactive;
        match (first.tier.cmp(&has.tier), first.interactive_first.0, (first.below_minimum.0, has.below_minimum.0)) {
            (Ordering::Less, ..) => Precedence::Before,
            (Ordering::Greater, ..) => Precedence::After,
            (_, true, _) if is_interactive => Precedence::BelowMinimum,
            (_, true, _) => Precedence::Before,
            (.., (true, false)) => Precedence::BelowMinimum,
            (.., (false, true)) => Precedence::After,
            _ => Precedence::Equal,
        }
    }

    /// Whether a client must be the only holder, because its usage is counted or its tier is not
    /// the default tier.
    pub fn runs_alone(&self, client: ClientId) -> bool {
        let share = self.share_of(client);
        bound::is_watched(share) || share.tier() != Tier::default()
    }
}
