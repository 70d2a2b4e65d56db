//! Limits the number of different units of each tenant. A user or a container's root can invent any
//! number of units. Metrics and pressure are kept for each unit, even for some time after its last
//! client has disconnected.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::counts::FORGOTTEN;
use crate::identity::{Identity, Tenant};
use crate::scheduler::Time;

/// The units of each tenant's clients, with the time of the last connection.
#[derive(Debug, Default)]
pub(super) struct Units(BTreeMap<Tenant, BTreeMap<String, Time>>);

impl Units {
    /// Records the unit of a new client. If the tenant has `most` units within [`FORGOTTEN`], marks the
    /// client's unit and container as counted under "others".
    pub fn admit(&mut self, now: Time, most: u32, identity: &mut Arc<Identity>) {
        if identity.unit.is_empty() && identity.container.is_empty() {
            return;
        }
        let is_recent = |last: &Time| now.saturating_sub(*last) < FORGOTTEN;
        if !self.0.contains_key(&identity.tenant) {
            self.0.retain(|_, units| units.values().any(is_recent));
        }
        let units = self.0.entry(identity.tenant.clone()).or_default();
        // A user can invent containers, too.
        let key = format!("{} {}", identity.unit, identity.container);
        let most = most as usize;
        if units.len() >= most && !units.contains_key(&key) {
            units.retain(|_, last| is_recent(last));
        }
        if units.len() < most || units.contains_key(&key) {
            units.insert(key, now);
            return;
        }
        Arc::make_mut(identity).is_among_others = true;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MAX_UNITS: u32 = 100;

    #[test]
    fn units_of_one_tenant_are_limited_and_forgotten() {
        let mut units = Units::default();
        let mut admitted = |seconds, user, unit: u32| {
            let unit = format!("{unit}.scope");
            let mut identity = Arc::new(Identity { tenant: Tenant::User(user), unit, ..Identity::default() });
            units.admit(Duration::from_secs(seconds), MAX_UNITS, &mut identity);
            !identity.is_among_others
        };
        assert!((0..MAX_UNITS).all(|unit| admitted(1, 1, unit)));
        assert!(!admitted(2, 1, MAX_UNITS) && admitted(2, 1, 0) && admitted(2, 2, MAX_UNITS));
        assert!(admitted(301, 1, MAX_UNITS), "the other units are forgotten");
    }
}
