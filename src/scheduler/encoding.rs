//! Serde implementations for the state, events and commands. `nvshare-wire` has no dependencies, so
//! this module implements serde for its types. Maps whose keys are not strings are encoded as
//! pairs, because JSON allows only string keys.

use nvshare_wire::{client, scheduler};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(remote = "client::Engine", rename_all = "kebab-case")]
pub(crate) enum Engine {
    Swap,
    Managed,
    None,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "client::ReleaseReason", rename_all = "kebab-case")]
pub(crate) enum ReleaseReason {
    Idle,
    Revoked,
    NoMemory,
    Gone,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "client::StuckReason", rename_all = "kebab-case")]
pub(crate) enum StuckReason {
    NeedsHost,
    LongWork,
    Capturing,
    UntrackedWork,
    HostFull,
    Broken,
    UnseenWork,
    OtherDevice,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "scheduler::WaitReason", rename_all = "kebab-case")]
pub(crate) enum WaitReason {
    Queue,
    HolderStuck,
    Eviction,
    Pinned,
    Context,
    Memory,
}

/// An optional [`scheduler::WaitReason`].
pub(crate) mod wait_reason {
    use crate::encoding::WaitReason;
    use nvshare_wire::scheduler;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Given(#[serde(with = "WaitReason")] scheduler::WaitReason);

    pub fn serialize<S: Serializer>(why: &Option<scheduler::WaitReason>, serializer: S) -> Result<S::Ok, S::Error> {
        why.map(Given).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<scheduler::WaitReason>, D::Error> {
        Ok(Option::<Given>::deserialize(deserializer)?.map(|given| given.0))
    }
}

/// Encodes a map as a sequence of pairs.
pub(crate) mod pairs {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::collections::BTreeMap;

    pub fn serialize<K, V, S>(map: &BTreeMap<K, V>, serializer: S) -> Result<S::Ok, S::Error>
    where
        K: Serialize,
        V: Serialize,
        S: Serializer,
    {
        serializer.collect_seq(map)
    }

    pub fn deserialize<'de, K, V, D>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
    }
}
