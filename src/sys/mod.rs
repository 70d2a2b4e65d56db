//! System calls as the programs need them, on rustix wherever it has them. Nothing here knows about GPUs or the protocol.
//!
//! - [`access`]: whether another user may open a file.
//! - [`atomic_file`]: replacing a file as a whole.
//! - [`clock`]: the monotonic clock, a timer on it, and dates.
//! - [`credentials`]: the identity of a socket's peer.
//! - [`detached`]: a process that is no child of this one.
//! - [`descriptors`]: file descriptors: their limit, a spare one, the runtime's view of them.
//! - [`listen`]: a listening socket that only one process can own.
//! - [`privileges`]: dropping capabilities.
//! - [`socket`]: connections, packets and the descriptors that they carry.
pub mod access;
pub mod atomic_file;
pub mod clock;
pub mod credentials;
pub mod descriptors;
pub mod detached;
pub mod listen;
pub mod privileges;
pub mod socket;
