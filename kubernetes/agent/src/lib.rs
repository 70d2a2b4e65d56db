//! `nvshare-agent`: sends the names of a node's pods, and the rules that the pods request, to the
//! node's scheduler.
//!
//! - [`config`]: the configuration file, shared with the device plugin.
//! - [`permissions`]: the keys that pods may set, shared with the device plugin.
//! - [`annotations`]: converts a pod's annotations to a rule, without I/O.
//! - [`pod`]: one pod, without I/O.
//! - [`node`]: all pods of the node, and the message to the scheduler. The module's only I/O is
//!   waiting.
//! - [`kubernetes`]: reads pods from the API server.
//! - [`scheduler`]: sends the pods to the scheduler.
//! - [`links`]: the state of both connections, for the log and for [`probe`].
//! - [`retry`]: pauses between attempts.
//! - [`pod_warnings`]: logs each warning about a pod once.
//! - [`agent`]: the whole agent as one process.

pub mod agent;
pub mod annotations;
pub mod arguments;
pub mod kubernetes;
pub mod links;
pub mod node;
pub mod pod;
pub mod pod_warnings;
pub mod probe;
pub mod scheduler;

pub use nvshare_kubernetes::permissions::{self, file as config};
pub use nvshare_kubernetes::retry;
