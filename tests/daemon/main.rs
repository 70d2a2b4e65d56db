//! The daemon as a process, with clients that speak the protocol themselves. The tests cover the
//! daemon's service on sockets and on the bus, its metrics, its records, and its robustness.

mod bus;
mod clients;
mod describe;
mod fake_polkit;
mod flood;
mod games;
mod journal;
mod metrics;
mod nvml;
mod polkit;
mod private_bus;
mod progress;
mod recorder;
mod restart;
mod service;
mod settings;
mod shared_memory;
mod sleep;
mod terminal;
mod top;
mod unverified_frees;
mod usage;
