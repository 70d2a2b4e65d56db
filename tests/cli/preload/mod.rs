//! `nvsharectl preload` with the real loader, for many shapes of `/etc/ld.so.preload` and of the
//! library, each on a host with a private `/etc`. Requires root and `make artifacts`.

mod adopt;
mod fake_systemd;
mod host;

mod killed;
mod libraries;
mod loader;
mod services;
mod shapes;
