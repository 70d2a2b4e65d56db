//! What is known of a client's past on a GPU, from which policies expect its future.

use super::{progress::Progress, utilization::Utilization};
use crate::api::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// What a client's burst is taken to be before one was seen.
const FIRST_BURST: Duration = Duration::from_millis(50);

#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct History {
    pub bursts: Bursts,
    pub progress: Progress,
    pub utilization: Utilization,
}

/// The history of each client on each GPU that it has attached.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Histories {
    gpus: BTreeMap<GpuId, BTreeMap<ClientId, History>>,
}

impl Histories {
    pub fn begin(&mut self, now: Time, client: ClientId, id: GpuId) {
        let (bursts, progress) = (Bursts::default(), Progress::new(now));
        let history = History { bursts, progress, utilization: Utilization::default() };
        self.gpus.entry(id).or_default().insert(client, history);
    }

    pub fn end(&mut self, client: ClientId, id: GpuId) {
        self.gpus.get_mut(&id).into_iter().for_each(|clients| drop(clients.remove(&client)));
    }

    pub fn of(&self, client: ClientId, id: GpuId) -> Option<&History> {
        self.gpus.get(&id)?.get(&client)
    }

    pub fn of_mut(&mut self, client: ClientId, id: GpuId) -> Option<&mut History> {
        self.gpus.get_mut(&id)?.get_mut(&client)
    }
}

/// What is known of how long a client runs on a GPU between two times without work.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Bursts {
    estimate: Option<Duration>,
    /// Run since it last had no work, over the turns that were cut short.
    attained: Duration,
    busy: Duration,
}

impl Bursts {
    pub fn expected(&self) -> Duration {
        self.expected_after(Duration::ZERO)
    }

    /// What would be expected if a turn of that length were cut short now.
    pub fn expected_after(&self, contended: Duration) -> Duration {
        self.attained.saturating_add(contended).max(self.estimate.unwrap_or(FIRST_BURST))
    }

    /// A turn ended. A holder that nobody waits for keeps the lock through idle times too, so of its uncontended time
    /// no more is counted than one burst.
    pub fn ran(&mut self, contended: Duration, uncontended: Duration, busy: Duration, idle: bool) {
        let usual = self.estimate.unwrap_or(FIRST_BURST);
        self.attained = self.attained.saturating_add(contended).saturating_add(uncontended.min(usual));
        self.busy = self.busy.saturating_add(busy);
        if idle {
            let sample = if self.busy.is_zero() { self.attained } else { self.attained.min(self.busy) };
            self.estimate = Some(self.estimate.map_or(sample, |e| e / 2 + sample / 2));
            self.attained = Duration::ZERO;
            self.busy = Duration::ZERO;
        }
    }
}
