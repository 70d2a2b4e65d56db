//! `nvsharectl preload` against the real loader, one shape of `/etc/ld.so.preload` and of the library after the other, each
//! on a machine with an `/etc` of its own. As root; what it needs is built by `make artifacts`.

mod adopt;
mod fake_systemd;
mod host;

mod killed;
mod libraries;
mod loader;
mod services;
mod shapes;
