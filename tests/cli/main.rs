//! `nvsharectl`.

mod ctl;
mod preload;
mod simulate;
