//! The rules that `libnvshare.so` keeps as a guest in somebody else's process. Each test runs programs without the library
//! and with it, and wants no difference: not in what they say, not in how they end.

mod compare;

mod deepbind;
mod drivers;
mod ends;
mod limits;
mod lookups;
mod neighbours;
mod plain;
mod processes;
mod secure;
mod signals;
mod sweep;
