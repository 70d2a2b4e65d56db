//! The rules that `libnvshare.so` keeps as a guest in a foreign process. Each test runs programs with and without the
//! library, and expects no difference in their output or in how they end.

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
