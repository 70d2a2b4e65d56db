//! `nvsharectl`.

mod cdi;
mod ctl;
mod preload;
mod simulate;
