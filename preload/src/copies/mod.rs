//! Copies whose sides may be on different GPUs.
//!
//! - [`route`]: which GPUs a copy concerns, where it waits, and how it is made.
//! - [`shapes`]: descriptions of copies in two and three dimensions, and of graph nodes.
//! - [`staged`]: copies from memory out of a GPU's reach.

pub mod route;
pub mod shapes;
pub mod staged;
