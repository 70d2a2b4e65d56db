//! Transport between the daemon and its clients: packets, the protocol's state, and the identity of the
//! process at the other end. This module is independent of the scheduler's state.
//!
//! - [`connection`]: one connection. The connection's `outbox` queues messages that the client has not
//!   read yet.
//! - [`peer`]: the process at the other end, as the kernel describes it.
//! - [`session`]: the protocol state of one connection. The session decodes packets into
//!   [`session::ClientAction`].
pub mod connection;
mod outbox;
pub mod peer;
pub mod session;
