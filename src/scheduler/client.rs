//! Records of a client that do not depend on a GPU.

use crate::api::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// The connected clients.
pub(crate) type Clients = BTreeMap<ClientId, Client>;

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Client {
    /// The gang that the client named; 0: none. A rule may put it into another one.
    pub named: u64,
    pub tenant: TenantId,
    pub stopped: bool,
    /// When its last message arrived.
    pub heard: Time,
    /// When the daemon was last asked to probe the process, and the least time until the next probe.
    pub probed: Option<(Time, Duration)>,
}
