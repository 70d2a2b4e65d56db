//! Paths that several programs share.

/// The configuration file; drop-ins are in the directory of the same name with `.d`.
pub const CONFIGURATION: &str = "/etc/nvshare/nvshare.toml";

/// The clients' socket. Its directory can be mounted into containers.
pub const CLIENTS_SOCKET: &str = "/run/nvshare/scheduler.sock";

/// The control socket: D-Bus without a bus, for hosts that have no bus. Its directory is never
/// mounted into a container.
pub const CONTROL_SOCKET: &str = "/run/nvshare-control/control.sock";

/// The directory of the clients' socket in containers. It is the same path as on the host, because
/// programs always look there.
pub const SOCKETS_IN_CONTAINERS: &str = "/run/nvshare";

/// The loader's list of preloaded libraries, in containers.
pub const PRELOAD_IN_CONTAINERS: &str = "/etc/ld.so.preload";

/// The path of that list on a host.
pub const PRELOAD_LIST: &str = "/usr/share/nvshare/ld.so.preload";

/// The library in containers: the path that the list names.
pub const LIBRARY_IN_CONTAINERS: &str = "/usr/lib/nvshare/libnvshare.so";
