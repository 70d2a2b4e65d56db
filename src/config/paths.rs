//! Paths that several programs share.

/// The configuration file. Its drop-ins are in the directory with the same name plus `.d`.
pub const CONFIGURATION: &str = "/etc/nvshare/nvshare.toml";

/// The clients' socket. The socket's directory can be mounted into containers.
pub const CLIENTS_SOCKET: &str = "/run/nvshare/scheduler.sock";

/// The control socket. It serves D-Bus without a bus, for hosts that have no system bus. The
/// socket's directory is never mounted into a container.
pub const CONTROL_SOCKET: &str = "/run/nvshare-control/control.sock";

/// The directory of the clients' socket in containers. Programs always look at the host's path, so
/// the path in containers is the same.
pub const SOCKETS_IN_CONTAINERS: &str = "/run/nvshare";

/// The loader's list of preloaded libraries, in containers.
pub const PRELOAD_IN_CONTAINERS: &str = "/etc/ld.so.preload";

/// The loader's list of preloaded libraries as the package installs it on a host. The file is
/// mounted into containers as [`PRELOAD_IN_CONTAINERS`].
pub const PRELOAD_LIST: &str = "/usr/share/nvshare/ld.so.preload";

/// The library in containers, at the path that the list of preloaded libraries contains.
pub const LIBRARY_IN_CONTAINERS: &str = "/usr/lib/nvshare/libnvshare.so";
