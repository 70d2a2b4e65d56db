//! Classes: which clients go before which, whenever they came.

use super::{Shares, bound};
use crate::{
    api::*,
    lock::{Entity, Gang},
};
use std::cmp::{Ordering, Reverse};

/// Who goes before whom, whenever they came: the smaller first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Class {
    pub tier: Tier,
    interactive_first: Reverse<bool>,
    below_minimum: Reverse<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Tier {
    /// Of that priority; the higher goes first.
    Ordinary(Reverse<i8>),
    /// Has what nobody else wants.
    Idle,
}

impl Default for Tier {
    fn default() -> Self {
        Self::Ordinary(Reverse(0))
    }
}

/// What somebody who waits is to somebody who holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Precedence {
    /// Waits for no turn to end; in `auto` for no drain either.
    Before,
    /// Has had less than it is to have, which the other has not.
    BelowMinimum,
    #[default]
    Equal,
    /// Has to wait until the other has no work, or has had what it is to have.
    After,
}

impl Share {
    fn tier(self) -> Tier {
        if self.weight == 0 { Tier::Idle } else { Tier::Ordinary(Reverse(self.priority)) }
    }
}

impl Shares<'_> {
    /// Whether any client can be of another class than another one.
    pub fn have_classes(&self) -> bool {
        self.rules.have_classes()
    }

    /// The class of a client that wants these GPUs, or has them: the last of its gang's, which goes together. Nobody gains
    /// anything by joining one.
    pub fn class(&self, client: ClientId, gpus: &GpuSet) -> Class {
        // All of a gang that a rule makes have the same share, where none of them claims less.
        let gang = self.lock.gang(client);
        if let (Some(Gang::Group(_)), true) = (gang, self.rules.with_env().next().is_none()) {
            return self.own_class(client, gpus);
        }
        let all = self.lock.gang_peers(client).chain([client]).map(|member| self.own_class(member, gpus));
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

    /// Whether they share what is left by those of better tiers.
    pub fn are_peers(&self, one: ClientId, other: ClientId) -> bool {
        self.share_of(one).tier() == self.share_of(other).tier()
    }

    /// The class of a holder, by all that it has.
    pub fn class_of_holder(&self, holder: ClientId) -> Class {
        self.class(holder, &self.lock.holds_of(holder).map(|(id, _)| id).collect())
    }

    /// What the first in line is to a holder.
    pub fn precedence(&self, waiter: Entity, holder: ClientId) -> Precedence {
        let Some(request) = self.lock.request(waiter) else { return Precedence::Equal };
        if !self.have_classes() {
            return Precedence::Equal;
        }
        let (first, has) = (request.key.class, self.class_of_holder(holder));
        // Even if it has had more than its share.
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

    /// Whether a client holds a GPU alone, since its time is counted or it is not to be slowed down.
    pub fn runs_alone(&self, client: ClientId) -> bool {
        let share = self.share_of(client);
        bound::is_watched(share) || share.tier() != Tier::default()
    }
}
