//! Clients' connections: packets, the protocol's state, and the identity of the process at the other end. This module does not
//! know the scheduler's state.
//!
//! - [`connection`]: one connection, with `outbox` for messages that the client has not read yet.
//! - [`peer`]: the process at the other end, as the kernel describes it.
//! - [`session`]: the protocol state of one connection. Decodes packets into [`session::ClientAction`].
pub mod connection;
mod outbox;
pub mod peer;
pub mod session;
