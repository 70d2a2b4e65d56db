//! Copies whose source and destination may be on different GPUs.
//!
//! - [`route`]: the GPUs that a copy concerns, the gate at which it waits, and the method of copying.
//! - [`shapes`]: the driver's structures for two- and three-dimensional copies, and for graph nodes.
//! - [`stage`]: copies of memory that a GPU cannot access directly.

pub mod route;
pub mod shapes;
pub mod stage;
