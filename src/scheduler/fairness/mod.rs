//! How the time of a GPU is divided.
//!
//! - `fair_queue`: the order of the queue: weighted fair queueing by virtual finish times.
//! - `share`: weights, priorities, minimum and maximum parts of the time, by rule.
//! - `usage`: how much of the last period a GPU was in use by whom.

pub(crate) mod fair_queue;
pub(crate) mod share;
pub(crate) mod usage;
