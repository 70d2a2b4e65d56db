//! `nvshare-agent`: sends a node's scheduler the names of the node's pods, and the rules that they request.
//!
//! - [`config`]: the configuration file; [`permissions`]: the keys that pods may set. Both are shared with the device plugin.
//! - [`annotations`]: a pod's annotations as a rule. [`pod`]: one pod. [`node`]: all pods of the node, and the
//!   message to the scheduler. All of these are pure, except the waiting in `node`.
//! - [`kubernetes`]: reads pods from the API server. [`scheduler`]: sends them to the scheduler.
//! - [`links`]: the state of both connections, for the log and for [`probe`]; [`retry`]: pauses between attempts.
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
