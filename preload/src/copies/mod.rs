//! Copies whose sides may be of different GPUs.
//!
//! - [`route`]: which GPUs a copy has to do with, where it waits, and how it is made.
//! - [`shapes`]: descriptions of copies in two and three dimensions, and of nodes of graphs.
//! - [`staged`]: copies out of a GPU's reach.

pub mod route;
pub mod shapes;
pub mod staged;
