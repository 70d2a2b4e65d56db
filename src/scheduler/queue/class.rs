//! The class of a request: the first part of its key in queues.

use std::cmp::Reverse;

/// A client's class. The smallest is served first, regardless of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Class {
    pub tier: Tier,
    pub interactive_first: Reverse<bool>,
    pub below_minimum: Reverse<bool>,
}

/// The part of a class that the rule alone decides. A better tier is smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Tier {
    /// The priority of the rule; the highest is served first.
    Ordinary(Reverse<i8>),
    /// Weight 0: served only while no other client wants the GPU.
    Idle,
}

impl Default for Tier {
    fn default() -> Self {
        Self::Ordinary(Reverse(0))
    }
}
