//! What benchmarks share: [`results`] writes figures for programs to read, [`figures`] puts them beside their aims, [`charts`] draws
//! them, and [`stage`] has a GPU and a scheduler to measure on.

pub mod charts;
pub mod figures;
pub mod results;
pub mod stage;
