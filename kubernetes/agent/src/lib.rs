//! `nvshare-agent`: tells the scheduler of a node what Kubernetes calls the pods there, and what they rule for themselves.
//!
//! - [`config`]: the configuration file; [`permissions`]: which wishes pods may have.
//! - [`annotations`]: a pod's annotations as a rule. [`pod`]: a pod as Kubernetes tells of it. [`node`]: all of them, and what
//!   the scheduler is to know. All pure, but for the waiting in `node`.
//! - [`kubernetes`]: asking the API server. [`scheduler`]: telling the scheduler.
//! - [`links`]: whether both are there, for the log and for [`probe`]; [`retry`]: when to try again.
//! - [`complaints`]: saying once what is wrong with a pod.
//! - [`agent`]: all of it as one process.

pub mod agent;
pub mod annotations;
pub mod arguments;
pub mod complaints;
pub mod config;
pub mod kubernetes;
pub mod links;
pub mod node;
pub mod permissions;
pub mod pod;
pub mod probe;
pub mod retry;
pub mod scheduler;
