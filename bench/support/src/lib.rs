//! What benchmarks share: [`results`] writes figures for programs to read, and [`stage`] has a GPU and a scheduler to measure on.

pub mod results;
pub mod stage;
