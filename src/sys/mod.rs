//! System calls for the programs, through rustix where it supports them. This module knows nothing
//! about GPUs or the protocol.
//!
//! - [`access`]: another user's permission to open a file.
//! - [`atomic_file`]: atomic replacement of a file.
//! - [`clock`]: the monotonic clock, a timer on it, and dates.
//! - [`credentials`]: the identity of a socket's peer.
//! - [`detached`]: work in a process that is not a child of this one.
//! - [`descriptors`]: the limit of file descriptors, a spare descriptor, and registration with the
//!   runtime.
//! - [`device_file`]: the identity of device files.
//! - [`lease`]: checks whether another open file description of a file exists.
//! - [`listen`]: a listening socket with a single owner.
//! - [`privileges`]: dropping capabilities.
//! - [`small_file`]: reading of small files.
//! - [`socket`]: connections, packets and the descriptors in them.
pub mod access;
pub mod atomic_file;
pub mod clock;
pub mod credentials;
pub mod descriptors;
pub mod detached;
pub mod device_file;
pub mod foreign;
pub mod lease;
pub mod listen;
pub mod pidfd;
pub mod privileges;
pub mod small_file;
pub mod socket;
