//! [`Containers`]: what the daemon knows of units, pods and claims, and the lock files in their
//! directories.

use std::path::Path;
use std::sync::Arc;

use super::claims::Claims;
use super::lock_files::LockDirectories;
use super::model::{Arrival, Model};
use super::pods::{Pods, Refused};
use super::units::Units;
use crate::config::rules::Rules;
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

    /// Replaces the list of this node's pods. Returns the reasons for refusing pods' rules that contradict
    /// other rules, and whether the list has changed.
    pub fn set_pods(&mut self, mut pods: Pods, rules: &Rules) -> (Refused, bool) {
        let refused = pods.reconcile(|rule, kept| {
            kept.iter().find_map(|other| rule.contradicts(other)).or_else(|| rules.contradicted(rule))
        });
        let has_changed = pods != self.pods;
        self.pods = pods;
        (refused, has_changed)
    }

    /// Replaces the list of this node's claims.
    pub fn set_claims(&mut self, claims: Claims) -> ((), bool) {
        let has_changed = claims != self.claims;
        self.claims = claims;
        ((), has_changed)
    }

    /// Puts the rules of claims and pods after the configuration's rules.
    pub(super) fn put_rules(&self, rules: &mut Rules) {
        rules.put_last(self.claims.rules(), self.pods.rules());
    }

    /// Also creates lock files for the claims whose directories are in this directory.
    pub fn serve_claims_in(&mut self, model: &Model, directory: &Path) {
        self.lock_files.serve_claims_in(directory);
        model.known_gpus().for_each(|(gpu, _)| self.lock_files.create(*gpu));
    }

    /// Hard-links the lock files of all GPUs into the directory of a new claim.
    pub fn link_lock_files(&self, model: &Model, directory: &Path) {
        model.known_gpus().for_each(|(gpu, _)| self.lock_files.link(*gpu, directory));
    }

    /// Adds the names of a process's pod and claim to its identity.
    pub(super) fn name(&self, identity: &mut Arc<Identity>) {
        self.pods.name(identity);
        self.claims.name(identity);
    }
}
