//! The Kubernetes ResourceClaims prepared on this node: their names, and the rules for their
//! allocations. The device plugin reports them to the daemon.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::pods::{Refused, read_rule};
use crate::bus::{self, MAX_CLAIMS, is_pod_name, is_pod_uid};
use crate::config::rules::Rule;
use crate::identity::Identity;

/// Claims by UID.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Claims(BTreeMap<String, Known>);

#[derive(Debug, Clone, PartialEq)]
struct Known {
    namespace: String,
    name: String,
    rule: Rule,
}

impl Claims {
    /// Validates the claims that a device plugin sent. Leaves out claims with an invalid rule: without its
    /// rule, a claim's programs would get more than their allocation.
    ///
    /// # Errors
    /// Returns a sentence if the list as a whole is invalid.
    pub fn read(claims_of_node: Vec<bus::Claim>) -> Result<(Self, Refused), String> {
        if claims_of_node.len() > MAX_CLAIMS {
            let count = claims_of_node.len();
            return Err(format!("too many claims for a node: {count}. At most {MAX_CLAIMS} are allowed"));
        }
        let (mut claims, mut refused) = (BTreeMap::new(), HashMap::new());
        for claim in claims_of_node {
            let bus::Claim { uid, namespace, name, rule } = claim;
            if !is_pod_uid(&uid) {
                return Err(format!("{uid:?} is not the UID of a claim"));
            }
            if let Some(text) = [&namespace, &name].into_iter().find(|text| !is_pod_name(text)) {
                return Err(format!("claim {uid}: {text:?} is not a valid Kubernetes name"));
            }
            match read_rule("claim", &uid, &format!("{namespace}/{name}"), &rule, "the ResourceClaim") {
                Ok(rule) => drop(claims.insert(uid, Known { namespace, name, rule })),
                Err(why) => drop(refused.insert(uid, why)),
            }
        }
        Ok((Self(claims), refused))
    }

    /// The UIDs of the claims.
    pub fn uids(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Removes a claim, as if the device plugin had never reported it.
    pub fn remove(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    pub fn rules(&self) -> Vec<Rule> {
        self.0.values().map(|claim| claim.rule.clone()).collect()
    }

    /// Adds the claim's names to a process's identity.
    pub fn name(&self, identity: &mut Arc<Identity>) {
        if identity.claim.uid.is_empty() {
            return;
        }
        let mut claim = identity.claim.clone();
        let names = self.0.get(&claim.uid).map(|known| (known.namespace.clone(), known.name.clone()));
        (claim.namespace, claim.name) = names.unwrap_or_default();
        if claim != identity.claim {
            Arc::make_mut(identity).claim = claim;
        }
    }
}

#[cfg(test)]
mod tests {
    use zbus::{OwnedVariant, Variant};

    use super::*;

    const UID: &str = "01234567-89ab-cdef-0123-456789abcdef";

    fn claim(rule: &[(&str, &str)]) -> bus::Claim {
        let value = |text: &str| OwnedVariant::try_from(Variant::from(text)).expect("a value");
        bus::Claim {
            uid: UID.into(),
            namespace: "team-a".into(),
            name: "half".into(),
            rule: rule.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect(),
        }
    }

    #[test]
    fn a_claims_rule_applies_to_its_programs() {
        let (claims, refused) = Claims::read(vec![claim(&[("memory-max", "8G")])]).expect("a claim");
        assert!(refused.is_empty());
        let [rule] = &claims.rules()[..] else { panic!("one rule") };
        assert_eq!(rule.to_string(), "\"team-a/half\" (the ResourceClaim)");
        assert_eq!(rule.to_table().get("claim").and_then(toml::Value::as_str), Some(UID));
        let mut identity = Identity::default();
        identity.claim.uid = UID.into();
        let mut identity = Arc::new(identity);
        claims.name(&mut identity);
        assert_eq!((&*identity.claim.namespace, &*identity.claim.name), ("team-a", "half"));
        Claims::default().name(&mut identity);
        assert_eq!((&*identity.claim.uid, &*identity.claim.name), (UID, ""));
    }

    #[test]
    fn a_claim_with_an_invalid_or_empty_rule_is_skipped() {
        for wrong in [&[("memory-max", "much")][..], &[("claim", "*"), ("weight", "5")], &[("pod", "*")], &[]] {
            let (claims, refused) = Claims::read(vec![claim(wrong)]).expect("a list");
            assert_eq!((claims.uids().count(), refused.len()), (0, 1), "{wrong:?}");
        }
    }

    #[test]
    fn an_invalid_claim_is_an_error() {
        for (uid, name) in [("../..", "a"), (UID, ""), (UID, "a/b")] {
            let claim = bus::Claim { uid: uid.into(), name: name.into(), ..claim(&[("weight", "idle")]) };
            assert!(Claims::read(vec![claim]).is_err(), "{uid} {name:?}");
        }
    }
}
