//! Traffic between GPUs and the host, and reports of thrashing: programs that evict each other's pages.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use super::state::Core;
use crate::config::units;
use crate::daemon::gpu::nvml::Query;
use crate::scheduler::{AntiThrash, Event, GpuId, Time, Traffic};

/// UUIDs of the GPUs that thrash.
pub type Thrashing = BTreeSet<String>;

/// Thrashing of one GPU that begins again and again is logged after this time.
const REPEAT: Duration = Duration::from_secs(600);

/// The log lines about thrashing on one GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogState {
    /// When the beginning was last logged.
    began: Option<Time>,
    /// The beginning was logged, and the end was not.
    is_open: bool,
}

impl Core {
    pub fn follow_thrashing(&self) -> watch::Receiver<Thrashing> {
        self.thrashing.subscribe()
    }

    /// True if `query_traffic` may have something to query before the next grant.
    pub fn may_thrash(&self) -> bool {
        self.machine.gpus().iter().any(|gpu| gpu.thrashes || gpu.holders.len() > 1)
    }

    /// Queries the traffic of the GPUs that the machine watches.
    pub fn query_traffic(&self) {
        let gpus = self.machine.watched();
        if !gpus.is_empty() {
            self.query_nvml(Query::Traffic(gpus));
        }
    }

    /// Handles measured traffic.
    pub(super) fn measured_traffic(&mut self, seen: Vec<(GpuId, Traffic)>, now: Time) {
        for (gpu, traffic) in seen {
            if let (Some(trace), Some(sample)) = (&mut self.trace, self.machine.sample(gpu, traffic)) {
                trace.traffic(now, gpu, &sample);
            }
            self.apply(Event::Traffic { gpu, traffic });
        }
    }

    pub(super) fn log_thrashing(&mut self, gpu: GpuId, begins: bool, demand: u64, now: Time) {
        let Some(label) = self.gpus.get(&gpu).map(|entry| entry.label(gpu)) else { return };
        let noted = self.thrashing_log.entry(gpu).or_default();
        let is_logged = if begins { noted.began.is_none_or(|at| now >= at + REPEAT) } else { noted.is_open };
        noted.is_open = begins && is_logged;
        if noted.is_open {
            noted.began = Some(now);
        }
        self.thrashing.send_modify(|thrashing| {
            if begins {
                thrashing.insert(label.clone())
            } else {
                thrashing.remove(&label)
            };
        });
        self.signals.turns.notify_one();
        if !is_logged {
            return;
        }
        if !begins {
            info!(name: "thrashing-ended", gpu = label, "thrashing on {label} has ended");
            return;
        }
        let capacity = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
        let advice = match self.machine.settings().anti_thrash {
            AntiThrash::Off => "set anti-thrash to auto, or NVSHARE_ENGINE=swap for the programs",
            AntiThrash::Auto | AntiThrash::On => "they take turns for now",
        };
        warn!(
            name: "thrashing",
            gpu = label,
            bytes = demand,
            capacity,
            "thrashing on {label}: the programs that run there together need {}, and the GPU has {} for them; {advice}",
            units::size(demand),
            units::size(capacity)
        );
    }
}
