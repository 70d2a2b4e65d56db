//! `nvsharectl preload` against the real loader, one shape of `/etc/ld.so.preload` and of the library after the other, each
//! on a machine with an `/etc` of its own. As root; what it needs is built by `make artifacts`.

#[path = "preload_toggle/host.rs"]
mod host;

#[path = "preload_toggle/killed.rs"]
mod killed;
#[path = "preload_toggle/libraries.rs"]
mod libraries;
#[path = "preload_toggle/loader.rs"]
mod loader;
#[path = "preload_toggle/shapes.rs"]
mod shapes;
