//! [`Containers`]: what the daemon knows of units, pods and claims, and the lock files in their
//! directories.

use std::sync::Arc;

use super::claims::Claims;
use super::lock_files::LockDirectories;
use super::model::Arrival;
use super::pods::Pods;
use super::units::Units;
use crate::daemon::tenants::What;
use crate::identity::Identity;
use crate::sys::clock;

#[derive(Debug, Default)]
pub struct Containers {
    /// Names of this node's pods, from Kubernetes.
    pub(super) pods: Pods,
    pub(super) claims: Claims,
    pub(super) units: Units,
    pub lock_files: LockDirectories,
}

impl Containers {
    /// Adds the names of a new client's pod and claim to its identity, and counts its unit.
    pub(super) fn name_arrival(&mut self, arrival: &mut Arrival) {
        self.name(&mut arrival.identity);
        let most = arrival.connection.budget().limit(What::Units);
        self.units.admit(clock::now(), most, &mut arrival.identity);
    }

    /// Adds the names of a process's pod and claim to its identity.
    pub(super) fn name(&self, identity: &mut Arc<Identity>) {
        self.pods.name(identity);
        self.claims.name(identity);
    }
}
