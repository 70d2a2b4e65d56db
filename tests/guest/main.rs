//! The rules that `libnvshare.so` follows in a foreign process. Each test runs programs with and
//! without the library. Their output and the way they end must not differ. A *guest* is a library
//! that is preloaded into a program, such as `libnvshare.so`.

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
