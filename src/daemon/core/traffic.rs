//! What moves between GPUs and the host, and who is told when programs push each other's memory off a GPU.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use super::state::Core;
use crate::config::units;
use crate::daemon::gpu::nvml::Query;
use crate::scheduler::{AntiThrash, Event, GpuId, Time, Traffic};

/// GPUs on which programs push each other's memory off, by their UUIDs.
pub type Thrashing = BTreeSet<String>;

/// Where it begins and ends over and over, the journal has it so often.
const PAUSE: Duration = Duration::from_secs(600);

/// What the journal has of one GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogState {
    /// When it was last there that it began.
    began: Option<Time>,
    /// It is not there yet that it ended.
    is_open: bool,
}

impl Core {
    pub fn follow_thrashing(&self) -> watch::Receiver<Thrashing> {
        self.thrashing.subscribe()
    }

    /// Whether `ask_about_traffic` can come to have something to ask without anything more being granted.
    pub fn may_be_crowded(&self) -> bool {
        self.machine.gpus().iter().any(|gpu| gpu.thrashes || gpu.holders.len() > 1)
    }

    /// Asks for what moves now on GPUs of which the machine wants to know it.
    pub fn ask_about_traffic(&self) {
        let gpus = self.machine.watched();
        if !gpus.is_empty() {
            self.query_nvml(Query::Traffic(gpus));
        }
    }

    /// What was seen of those GPUs.
    pub(super) fn traffic_seen(&mut self, seen: Vec<(GpuId, Traffic)>, now: Time) {
        for (gpu, traffic) in seen {
            if let (Some(trace), Some(sample)) = (&mut self.trace, self.machine.sample(gpu, traffic)) {
                trace.traffic(now, gpu, &sample);
            }
            self.apply(Event::Traffic { gpu, traffic });
        }
    }

    pub(super) fn note_thrashing(&mut self, gpu: GpuId, begins: bool, demand: u64, now: Time) {
        let Some(label) = self.gpus.get(&gpu).map(|entry| entry.label(gpu)) else { return };
        let noted = self.thrashing_log.entry(gpu).or_default();
        let is_told = if begins { noted.began.is_none_or(|at| now >= at + PAUSE) } else { noted.is_open };
        noted.is_open = begins && is_told;
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
        if !is_told {
            return;
        }
        if !begins {
            info!(name: "thrashing-ended", gpu = label, "programs no longer push each other's memory off {label}");
            return;
        }
        let capacity = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
        let advice = match self.machine.settings().anti_thrash {
            AntiThrash::Off => "set anti-thrash to auto, or have them use engine swap",
            AntiThrash::Auto | AntiThrash::On => "they take turns for now",
        };
        warn!(
            name: "thrashing",
            gpu = label,
            bytes = demand,
            capacity,
            "programs push each other's memory off {label}: those that run there together need {}, it has {} for them; \
             {advice}",
            units::size(demand),
            units::size(capacity)
        );
    }
}
