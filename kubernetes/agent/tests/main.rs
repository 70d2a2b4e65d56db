//! Tests of the agent, its man page, the manifests and the Helm chart.

mod agent;
mod documentation;
mod helm;
mod hostile;
mod manifests;
mod resilience;
mod support;
