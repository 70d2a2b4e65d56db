//! What is counted for metrics, at the border of the machine: by the events that it is given, the commands that it gives, and
//! what clients say that they have counted. Exact, and only ever more: a GPU's counts keep those of clients that have gone.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_wire::{Counts as Said, version};

use super::state::Core;
use crate::daemon::metrics::snapshot::{Counted, Waits};
use crate::scheduler::{ClientId, Command, Event, GpuId, GpuSet, Time, Turns};

#[derive(Debug, Default)]
pub struct Counts {
    gpus: BTreeMap<GpuId, OfGpu>,
    clients: BTreeMap<ClientId, BTreeMap<GpuId, OfClient>>,
}

/// Of one GPU.
#[derive(Debug, Clone, Default)]
pub struct OfGpu {
    /// `lock_time` is of attachments that are no more.
    pub counted: Counted,
    pub waits: Waits,
    /// For how long anybody has had the lock, and since when somebody has it.
    held: Duration,
    held_since: Option<Time>,
    /// Who was granted the lock last.
    last: Option<ClientId>,
}

impl OfGpu {
    pub fn held(&self, now: Time) -> Duration {
        self.held + self.held_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }
}

/// Of one client on one GPU, for as long as it is connected.
#[derive(Debug, Clone, Default)]
pub struct OfClient {
    /// `lock_time` is of attachments that are no more.
    pub counted: Counted,
    /// What it said first on this attachment, and last. What it counted before is not of this daemon's time.
    said: Option<Said>,
    /// What the machine knows of this attachment's waits, as far as it has been counted.
    waited: Duration,
}

impl Counts {
    pub fn gpu(&self, gpu: GpuId) -> OfGpu {
        self.gpus.get(&gpu).cloned().unwrap_or_default()
    }

    /// Clients that are here, with each GPU that they use or have used.
    pub fn clients(&self) -> impl Iterator<Item = (ClientId, GpuId, &OfClient)> {
        self.clients.iter().flat_map(|(client, gpus)| gpus.iter().map(|(gpu, count)| (*client, *gpu, count)))
    }

    fn client(&mut self, client: ClientId, gpu: GpuId) -> &mut OfClient {
        self.clients.entry(client).or_default().entry(gpu).or_default()
    }

    /// Adds to what both have counted.
    fn add(&mut self, client: ClientId, gpu: GpuId, more: &Counted) {
        self.client(client, gpu).counted.add(more);
        self.gpus.entry(gpu).or_default().counted.add(more);
    }

    fn granted(&mut self, client: ClientId, gpu: GpuId, turns: &Turns) {
        let count = self.client(client, gpu);
        let waited = turns.wait_time.saturating_sub(std::mem::replace(&mut count.waited, turns.wait_time));
        let of_gpu = self.gpus.entry(gpu).or_default();
        of_gpu.waits.add(waited);
        let before = of_gpu.last.replace(client);
        let hand_overs = u64::from(before.is_some_and(|before| before != client));
        self.add(client, gpu, &Counted { grants: 1, hand_overs, wait_time: waited, ..Counted::default() });
    }

    /// It has had the lock since an earlier daemon's time.
    fn holds(&mut self, client: ClientId, gpu: GpuId) {
        self.gpus.entry(gpu).or_default().last = Some(client);
    }

    /// The attachment is about to be no more.
    fn seat_ends(&mut self, client: ClientId, gpu: GpuId, turns: &Turns) {
        let count = self.client(client, gpu);
        (count.said, count.waited) = (None, Duration::ZERO);
        self.add(client, gpu, &Counted { lock_time: turns.lock_time, ..Counted::default() });
    }

    /// What a client says that it has counted.
    pub fn report(&mut self, client: ClientId, gpu: GpuId, said: Said) {
        let Some(before) = self.client(client, gpu).said.replace(said) else { return };
        let more = Counted {
            swapped_out: said.swapped_out.saturating_sub(before.swapped_out),
            swapped_in: said.swapped_in.saturating_sub(before.swapped_in),
            unmoved: said.unmoved.saturating_sub(before.unmoved),
            refused: said.refused.saturating_sub(before.refused),
            ..Counted::default()
        };
        if more != Counted::default() {
            self.add(client, gpu, &more);
        }
    }
}

impl Core {
    /// Before the machine hears of it.
    pub(super) fn count_event(&mut self, event: &Event, now: Time) {
        match event {
            Event::Attached { client, gpu, .. } => drop(self.counts.client(*client, *gpu)),
            Event::Detached { client, gpu } => self.count_seat(*client, *gpu, now),
            Event::Held { client, gpus } => gpus.iter().for_each(|gpu| self.counts.holds(*client, *gpu)),
            Event::Disconnected { client } => {
                let gpus: GpuSet = self.counts.clients.get(client).into_iter().flatten().map(|(gpu, _)| *gpu).collect();
                gpus.into_iter().for_each(|gpu| self.count_seat(*client, gpu, now));
                self.counts.clients.remove(client);
            }
            _ => {}
        }
    }

    fn count_seat(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        if let Some(turns) = self.machine.turns(client, gpu, now) {
            self.counts.seat_ends(client, gpu, &turns);
        }
    }

    /// After the machine has decided it.
    pub(super) fn count_command(&mut self, command: &Command, now: Time) {
        match command {
            Command::Grant { client, gpus } => {
                for gpu in gpus {
                    if let Some(turns) = self.machine.turns(*client, *gpu, now) {
                        self.counts.granted(*client, *gpu, &turns);
                    }
                }
            }
            Command::MappingFailed { client, gpu, .. } => {
                self.counts.add(*client, *gpu, &Counted { mapping_failures: 1, ..Counted::default() });
            }
            // A newer library counts allocations that failed, for which it need not have asked.
            Command::Denied { client, gpu, .. }
                if self.clients.get(client).is_some_and(|c| c.session.version < version::COUNTERS) =>
            {
                self.counts.add(*client, *gpu, &Counted { refused: 1, ..Counted::default() });
            }
            _ => {}
        }
    }

    /// After all that followed from an event.
    pub(super) fn count_held(&mut self, now: Time) {
        for (gpu, count) in &mut self.counts.gpus {
            match (self.machine.is_held(*gpu), count.held_since) {
                (true, None) => count.held_since = Some(now),
                (false, Some(since)) => {
                    count.held += now.saturating_sub(since);
                    count.held_since = None;
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Uuid;

    const GPU: GpuId = GpuId(Uuid([1; 16]));
    const ONE: ClientId = ClientId(1);
    const OTHER: ClientId = ClientId(2);

    fn turns(grants: u64, waited: u64, held: u64) -> Turns {
        let seconds = Duration::from_secs;
        Turns { grants, lock_time: seconds(held), wait_time: seconds(waited), waits: Duration::ZERO }
    }

    #[test]
    fn a_hand_over_is_a_grant_to_another_than_before() {
        let mut counts = Counts::default();
        for client in [ONE, ONE, OTHER, OTHER, ONE] {
            counts.granted(client, GPU, &turns(1, 0, 0));
        }
        let Counted { grants, hand_overs, .. } = counts.gpu(GPU).counted;
        assert_eq!((grants, hand_overs), (5, 2));
        assert_eq!(counts.client(ONE, GPU).counted.hand_overs, 1);
        // Also where the one before had it from an earlier daemon.
        let mut counts = Counts::default();
        counts.holds(ONE, GPU);
        counts.granted(OTHER, GPU, &turns(1, 0, 0));
        assert_eq!(counts.gpu(GPU).counted.hand_overs, 1);
    }

    #[test]
    fn each_wait_is_counted_once() {
        let mut counts = Counts::default();
        counts.granted(ONE, GPU, &turns(1, 2, 0));
        counts.granted(ONE, GPU, &turns(2, 2, 5));
        counts.granted(ONE, GPU, &turns(3, 9, 6));
        counts.seat_ends(ONE, GPU, &turns(3, 9, 8));
        // It attaches again: the machine begins anew.
        counts.granted(ONE, GPU, &turns(1, 4, 0));
        let of_gpu = counts.gpu(GPU);
        assert_eq!((of_gpu.waits.count(), of_gpu.waits.sum()), (4, Duration::from_secs(13)));
        assert_eq!(of_gpu.counted.wait_time, Duration::from_secs(13));
        assert_eq!(of_gpu.counted.lock_time, Duration::from_secs(8));
        assert_eq!(counts.client(ONE, GPU).counted, of_gpu.counted);
    }

    #[test]
    fn what_was_counted_before_and_what_gets_less_adds_nothing() {
        let mut counts = Counts::default();
        for swapped_out in [100, 130, 5, 7, u64::MAX, 0, u64::MAX] {
            counts.report(ONE, GPU, Said { swapped_out, ..Said::default() });
        }
        assert_eq!(counts.gpu(GPU).counted.swapped_out, u64::MAX, "it stays at the most that there is");
        assert_eq!(counts.client(OTHER, GPU).counted, Counted::default());
    }
}
