//! The types that the machine shares with its caller. Ids and time are in this file. Inputs are
//! [`Event`]s, outputs are [`Command`]s. [`Settings`] are an administrator's settings.
//! [`RuleLimits`] and [`EnvLimits`] are the limits of rules and environments.

mod command;
mod event;
mod placement;
mod rules;
mod settings;
mod sleep;

pub use command::{Command, Denial, EvictionBlock, RoomObstacle};
pub use event::{Event, Found, MemoryReport};
pub use rules::{Amount, EnvLimits, Group, GroupId, OnMemoryFull, RuleLimits, Share, SleepAfter};
pub(crate) use settings::MAX_TIME;
pub use settings::{AntiThrash, PolicyName, Settings};
pub use sleep::{
    ForeignState, Move, MoveObstacle, SleepObstacle, SleepOperation, SleepOutcome, SleepPhase, SleepView, WakeReason,
    Woken,
};

pub use nvshare_wire::Uuid;
pub use nvshare_wire::client::{Engine, ReleaseReason, StuckReason};
pub use nvshare_wire::scheduler::WaitReason;
pub use placement::{Labels, Placement, PlacementError, PlacementRequest};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::collections::BTreeSet;
use std::time::Duration;

/// Time since an arbitrary start. The daemon passes `CLOCK_MONOTONIC`.
pub type Time = Duration;

/// A GPU or a MIG slice, identified by its UUID. Indexes would not do, because they differ between
/// processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GpuId(pub Uuid);

/// A client. The client exists while its process lives. Ids are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize)]
pub struct ClientId(pub u64);

/// GPU memory that is kept free for programs that are not clients. Ids are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct RoomId(pub u64);

/// A tenant. Its clients trust each other's reports, and under [`PolicyName::Fcfs`] together take
/// turns like a single client. The caller chooses the tenants. The daemon's choice is a client's
/// container or pod, or else its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct TenantId(pub u64);

/// A set of GPUs, ordered so that the machine is deterministic.
pub type GpuSet = BTreeSet<GpuId>;

/// Serializes the UUID as text, in `nvidia-smi`'s form, in human-readable formats, and as bytes in
/// other formats.
impl Serialize for GpuId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => serializer.collect_str(&self.0),
            false => self.0.0.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for GpuId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return Ok(Self(Uuid(<[u8; 16]>::deserialize(deserializer)?)));
        }
        let text = String::deserialize(deserializer)?;
        Uuid::parse(&text).map(Self).ok_or_else(|| Error::custom(format_args!("{text:?} is not a UUID")))
    }
}
