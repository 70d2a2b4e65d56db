//! Code that benchmarks share.
//!
//! - [`results`]: writes figures for programs to read.
//! - [`figures`]: compares figures with their aims.
//! - [`charts`]: draws figures.
//! - [`stage`]: provides a GPU and a scheduler.

pub mod charts;
pub mod figures;
pub mod results;
pub mod stage;
