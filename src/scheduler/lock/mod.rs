//! The GPU lock: which entity (a client, or the members of a gang) holds it, and which wait for it in what state.
//!
//! - `queue`: requests, the queue of each GPU, grants, revokes, releases.
//! - `gang`: clients that are granted and revoked together.
//! - `gang_conflict`: gangs that need the same GPUs, of which one has to wait for the other.
//! - `corun`: clients that hold a lock at the same moment because together they do not fill the GPU.
//! - `drain_time`: how long a client takes to finish its work and release the lock.
//! - `unresponsive`: clients that do not answer: stuck, stopped, slow to evict.

pub(crate) mod corun;
pub(crate) mod drain_time;
pub(crate) mod gang;
pub(crate) mod gang_conflict;
pub(crate) mod queue;
pub(crate) mod unresponsive;
