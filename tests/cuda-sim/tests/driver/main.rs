//! Tests of the simulated driver. Each test loads the library as a program would.

mod checkpoint;
mod lookup;
mod memory;
mod peers;
mod streams;
mod support;
mod trouble;
mod waits;
