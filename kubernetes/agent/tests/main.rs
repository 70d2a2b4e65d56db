//! Tests of the agent, of its page and of the manifests.

mod agent;
mod documentation;
mod hostile;
mod manifests;
mod resilience;
mod support;
