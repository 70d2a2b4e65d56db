//! Records of a client that apply to all of its GPUs.

use crate::api::*;
use std::collections::BTreeMap;

/// The connected clients.
pub(crate) type Clients = BTreeMap<ClientId, Client>;

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Client {
    /// The gang that the client named; 0 if it named none. A rule may assign the client to another
    /// gang.
    pub named: u64,
    pub tenant: TenantId,
    /// A signal or a debugger has stopped the client's process.
    pub signalled: bool,
    /// The client's process is stopped: `signalled`, or another program has locked it.
    pub stopped: bool,
    /// When the client's last message arrived.
    pub heard: Time,
}
