//! What benchmarks share: [`results`] writes figures for programs to read, [`figures`] puts them beside their aims, and [`stage`] has
//! a GPU and a scheduler to measure on.

pub mod figures;
pub mod results;
pub mod stage;
