//! The rules that `libnvshare.so` keeps as a guest in somebody else's process. Each test runs programs without the library
//! and with it, and wants no difference: not in what they say, not in how they end.

mod sharing;

#[path = "guest/compare.rs"]
mod compare;

#[path = "guest/drivers.rs"]
mod drivers;
#[path = "guest/ends.rs"]
mod ends;
#[path = "guest/limits.rs"]
mod limits;
#[path = "guest/lookups.rs"]
mod lookups;
#[path = "guest/neighbours.rs"]
mod neighbours;
#[path = "guest/plain.rs"]
mod plain;
#[path = "guest/processes.rs"]
mod processes;
#[path = "guest/secure.rs"]
mod secure;
#[path = "guest/signals.rs"]
mod signals;
#[path = "guest/sweep.rs"]
mod sweep;
