//! `nvsharectl preload` with the real loader. Each test runs on a host with a private `/etc`, with
//! many variants of `/etc/ld.so.preload` and of the library. Requires root and `make artifacts`.

mod adopt;
mod fake_systemd;
mod host;

mod killed;
mod libraries;
mod loader;
mod services;
mod shapes;
