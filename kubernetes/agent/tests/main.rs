//! Tests of the agent, of its page, of the manifests and of the Helm chart.

mod agent;
mod documentation;
mod helm;
mod hostile;
mod manifests;
mod resilience;
mod support;
