//! The class of a request: the first part of its key in queues.

use std::cmp::Reverse;

/// A client's class. Requests of the smallest class are served first, regardless of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Class {
    pub tier: Tier,
    pub interactive_first: Reverse<bool>,
    pub below_minimum: Reverse<bool>,
}

/// The part of a class that depends only on the rule. Better tiers are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Tier {
    /// The priority of the rule. The highest priority is served first.
    Ordinary(Reverse<i8>),
    /// Weight 0: served only while no other client wants the GPU.
    Idle,
}

impl Default for Tier {
    fn default() -> Self {
        Self::Ordinary(Reverse(0))
    }
}
