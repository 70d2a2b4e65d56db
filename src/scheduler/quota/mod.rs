//! Limits on what clients may allocate: Σ committed ≤ capacity of all GPUs + host memory, and less where rules or clients
//! set limits of their own.
//!
//! - `limit`: brings each client's limit to what the solver found.
//! - `limit_state`: one client's limit on one GPU, with the changes that it has not acknowledged.
//! - `solver`: divides memory among clients: max-min fairness by water-filling.
//! - `request`: allocations that need a higher limit.
//! - `remeasure`: limit requests that are refused only after another measurement.
//! - `group`: limits that a rule sets for a group of clients.
//! - `client`: limits that a client sets for itself by its environment.

pub(crate) mod client;
pub(crate) mod group;
pub(crate) mod limit;
pub(crate) mod limit_state;
pub(crate) mod remeasure;
pub(crate) mod request;
pub(crate) mod solver;
