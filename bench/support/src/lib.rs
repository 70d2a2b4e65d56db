//! Code that benchmarks share: [`results`] writes figures for programs to read, [`figures`] puts
//! them beside their aims, [`charts`] draws them, and [`stage`] provides a GPU and a scheduler.

pub mod charts;
pub mod figures;
pub mod results;
pub mod stage;
