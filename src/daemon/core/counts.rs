//! Counters for metrics, derived from events, commands and clients' own counters. Counters are
//! exact and never decrease. The counters of a GPU or a workload include clients that have
//! disconnected. A workload's counters are dropped when the workload is forgotten.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_wire::Counts as Reported;

use super::model::Model;
use crate::daemon::usage::Amounts;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Command, Event, GpuId, Time, Turns};

/// Upper bounds of the buckets for waits, in seconds. The shortest waits are hand-overs that move no
/// memory. The longest are several turns with the longest common time quantum.
pub const WAIT_BOUNDS: [f64; 14] =
    [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Programs whose figures are summed for metrics: the programs of one tenant in one unit, or in one
/// container of a pod. Programs end, but a workload returns under the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Workload {
    pub tenant: String,
    pub unit: String,
    pub container: String,
    pub pod: String,
    pub namespace: String,
}

impl Workload {
    pub fn of(identity: &Identity) -> Self {
        let Identity { pod, tenant, .. } = identity;
        Self {
            tenant: tenant.to_string(),
            unit: identity.counted_unit().to_owned(),
            container: container_name(identity).to_owned(),
            pod: pod.name.clone(),
            namespace: pod.namespace.clone(),
        }
    }
}

/// The name of a process's container in Kubernetes. Outside Kubernetes, the container's ID.
pub fn container_name(identity: &Identity) -> &str {
    if identity.pod.container.is_empty() { identity.counted_container() } else { &identity.pod.container }
}

/// Counters, which never decrease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counted {
    pub lock_time: Duration,
    /// Total time of the waits that ended with a grant.
    pub wait_time: Duration,
    pub grants: u64,
    pub hand_overs: u64,
    pub swapped_out: u64,
    pub swapped_in: u64,
    pub unmoved: u64,
    pub refused: u64,
    pub mapping_failures: u64,
}

impl Counted {
    pub fn add(&mut self, more: &Self) {
        self.lock_time = self.lock_time.saturating_add(more.lock_time);
        self.wait_time = self.wait_time.saturating_add(more.wait_time);
        let numbers = [
            (&mut self.grants, more.grants),
            (&mut self.hand_overs, more.hand_overs),
            (&mut self.swapped_out, more.swapped_out),
            (&mut self.swapped_in, more.swapped_in),
            (&mut self.unmoved, more.unmoved),
            (&mut self.refused, more.refused),
            (&mut self.mapping_failures, more.mapping_failures),
        ];
        // Clients report some of the counters, so the values are not trustworthy and the sum must not
        // overflow.
        numbers.into_iter().for_each(|(count, more)| *count = count.saturating_add(more));
    }
}

/// A histogram of waiting times.
#[derive(Debug, Clone, Default)]
pub struct Waits {
    sum: Duration,
    /// Number of waits in each bucket: longer than the previous bound, up to the bucket's own bound. The
    /// last bucket is for waits longer than all bounds.
    buckets: [u64; WAIT_BOUNDS.len() + 1],
}

impl Waits {
    pub fn add(&mut self, wait: Duration) {
        let at = WAIT_BOUNDS.partition_point(|bound| *bound < wait.as_secs_f64());
        if let Some(bucket) = self.buckets.get_mut(at) {
            *bucket += 1;
        }
        self.sum = self.sum.saturating_add(wait);
    }

    pub fn sum(&self) -> Duration {
        self.sum
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Each bucket's upper bound and count.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        WAIT_BOUNDS.into_iter().chain([f64::INFINITY]).zip(self.buckets)
    }
}

#[derive(Debug, Default, Clone)]
pub struct Counts {
    gpus: BTreeMap<GpuId, GpuCounts>,
    clients: BTreeMap<ClientId, BTreeMap<GpuId, ClientCounts>>,
    /// Counters of disconnected clients, and the time at which the last of them disconnected.
    ended: BTreeMap<(GpuId, Workload), (Counted, Time)>,
}

/// Time after which a workload without clients is forgotten. The workload's pressure is forgotten after
/// the same time. Forgetting workloads bounds memory, because clients can choose unit names.
pub(super) const FORGOTTEN: Duration = Duration::from_secs(300);

/// Counters of one GPU.
#[derive(Debug, Clone, Default)]
pub struct GpuCounts {
    /// `lock_time` covers only attachments that have ended.
    pub counted: Counted,
    pub waits: Waits,
    /// Total time for which the lock was held, without the present period that began at
    /// `held_since`.
    held: Duration,
    held_since: Option<Time>,
    /// The client that was granted the lock last.
    last_holder: Option<ClientId>,
}

impl GpuCounts {
    pub fn held(&self, now: Time) -> Duration {
        self.held + self.held_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }
}

/// Counters of one client on one GPU, kept until the client disconnects.
#[derive(Debug, Clone, Default)]
pub struct ClientCounts {
    /// `lock_time` covers only attachments that have ended.
    pub counted: Counted,
    /// The client's latest report of its own counters on this attachment. The first report only sets the
    /// baseline.
    reported: Option<Reported>,
    /// The part of the client's total wait time on this attachment that is already counted.
    waited: Duration,
    used: Used,
    /// The client's total lock time at its move to this GPU. That time counts for the previous GPU.
    held_before: Duration,
}

impl ClientCounts {
    /// Lock time of the present attachment.
    pub fn lock_time(&self, turns: &Turns) -> Duration {
        turns.lock_time.saturating_sub(self.held_before)
    }
}

/// The state of recording for one client on one GPU: the counters already recorded, and the
/// client's present bytes.
#[derive(Debug, Default, Clone)]
struct Used {
    recorded: Counted,
    /// Bytes on the GPU and bytes in host memory. Both numbers have been constant since `since`.
    resident: u64,
    swapped: u64,
    since: Time,
    /// Products of bytes and time that are not recorded yet.
    resident_byte_seconds: f64,
    swapped_byte_seconds: f64,
}

impl Used {
    /// Sets the client's bytes on the GPU and in host memory, from `now` on.
    fn has(&mut self, now: Time, resident: u64, swapped: u64) {
        let seconds = now.saturating_sub(self.since).as_secs_f64();
        self.resident_byte_seconds += self.resident as f64 * seconds;
        self.swapped_byte_seconds += self.swapped as f64 * seconds;
        (self.resident, self.swapped, self.since) = (resident, swapped, self.since.max(now));
    }

    /// Returns the usage since the last call of `take`.
    fn take(&mut self, now: Time, counted: Counted) -> Amounts {
        self.has(now, self.resident, self.swapped);
        let before = std::mem::replace(&mut self.recorded, counted.clone());
        let seconds = |after: Duration, before: Duration| after.saturating_sub(before).as_secs_f64();
        let number = |after: u64, before: u64| after.saturating_sub(before) as f64;
        Amounts {
            lock_seconds: seconds(counted.lock_time, before.lock_time),
            grants: number(counted.grants, before.grants),
            wait_seconds: seconds(counted.wait_time, before.wait_time),
            resident_byte_seconds: std::mem::take(&mut self.resident_byte_seconds),
            swapped_byte_seconds: std::mem::take(&mut self.swapped_byte_seconds),
            swapped_in_bytes: number(counted.swapped_in, before.swapped_in),
            swapped_out_bytes: number(counted.swapped_out, before.swapped_out),
        }
    }
}

impl Counts {
    pub fn gpu(&self, gpu: GpuId) -> GpuCounts {
        self.gpus.get(&gpu).cloned().unwrap_or_default()
    }

    /// The counters of all connected clients, for each GPU that a client uses or has used.
    pub fn clients(&self) -> impl Iterator<Item = (ClientId, GpuId, &ClientCounts)> {
        self.clients.iter().flat_map(|(client, gpus)| gpus.iter().map(|(gpu, count)| (*client, *gpu, count)))
    }

    /// Counters of disconnected clients, summed by workload.
    pub fn ended(&self) -> impl Iterator<Item = (GpuId, &Workload, &Counted)> {
        self.ended.iter().map(|((gpu, workload), (counted, _))| (*gpu, workload, counted))
    }

    /// Handles the end of a client: adds its counters to its workload's.
    pub(super) fn end(&mut self, client: ClientId, workload: &Workload, now: Time) {
        for (gpu, count) in self.clients.remove(&client).unwrap_or_default() {
            let (counted, last) = self.ended.entry((gpu, workload.clone())).or_default();
            counted.add(&count.counted);
            *last = now;
        }
    }

    /// Forgets workloads whose last client disconnected long ago, except workloads that have clients again.
    /// `living` returns the workloads with clients. `living` is slow, so it is called only if a workload
    /// may be forgotten.
    pub(super) fn forget_ended(&mut self, now: Time, living: impl FnOnce() -> BTreeSet<Workload>) {
        let is_recent = |last: Time| now.saturating_sub(last) < FORGOTTEN;
        if self.ended.values().all(|(_, last)| is_recent(*last)) {
            return;
        }
        let living = living();
        self.ended.retain(|(_, workload), (_, last)| {
            let lives = living.contains(workload);
            if lives {
                *last = now;
            }
            lives || is_recent(*last)
        });
    }

    /// The GPUs that a client uses or has used.
    pub(super) fn gpus_of(&self, client: ClientId) -> Vec<GpuId> {
        self.clients.get(&client).into_iter().flat_map(BTreeMap::keys).copied().collect()
    }

    /// Returns a client's usage of a GPU since the last call. `None` if it has not used the GPU.
    pub(super) fn take_used(&mut self, client: ClientId, gpu: GpuId, turns: &Turns, now: Time) -> Option<Amounts> {
        let count = self.clients.get_mut(&client)?.get_mut(&gpu)?;
        let mut counted = count.counted.clone();
        counted.lock_time = counted.lock_time.saturating_add(count.lock_time(turns));
        Some(count.used.take(now, counted))
    }

    /// Records a client's present bytes on a GPU and in host memory.
    pub(super) fn note_bytes(&mut self, model: &Model, client: ClientId, gpu: GpuId, now: Time) {
        let Some((resident, swapped)) = model.machine.resident_and_swapped(client, gpu) else { return };
        self.client(client, gpu).used.has(now, resident, swapped);
    }

    /// Forgets a GPU.
    pub fn forget(&mut self, gpu: GpuId) {
        self.gpus.remove(&gpu);
        self.ended.retain(|(of, _), _| *of != gpu);
        for gpus in self.clients.values_mut() {
            gpus.remove(&gpu);
        }
    }

    /// Handles a client's move between GPUs. The scheduler's sums in `turns` continue on the new GPU. The
    /// counts up to now stay with the old GPU.
    pub fn moved(&mut self, client: ClientId, from: GpuId, to: GpuId, turns: &Turns, now: Time) {
        let Some(count) = self.clients.get_mut(&client).and_then(|gpus| gpus.get_mut(&from)) else { return };
        let lock_time = count.lock_time(turns);
        let (reported, waited) = (count.reported.take(), std::mem::take(&mut count.waited));
        count.held_before = Duration::ZERO;
        count.used.has(now, 0, 0);
        self.add(client, from, &Counted { lock_time, ..Counted::default() });
        let count = self.client(client, to);
        (count.reported, count.waited, count.held_before) = (reported, waited, turns.lock_time);
    }

    fn client(&mut self, client: ClientId, gpu: GpuId) -> &mut ClientCounts {
        self.clients.entry(client).or_default().entry(gpu).or_default()
    }

    /// Adds `more` to the counters of both the client and the GPU.
    fn add(&mut self, client: ClientId, gpu: GpuId, more: &Counted) {
        self.client(client, gpu).counted.add(more);
        self.gpus.entry(gpu).or_default().counted.add(more);
    }

    fn granted(&mut self, client: ClientId, gpu: GpuId, turns: &Turns) {
        let count = self.client(client, gpu);
        let waited = turns.wait_time.saturating_sub(std::mem::replace(&mut count.waited, turns.wait_time));
        let of_gpu = self.gpus.entry(gpu).or_default();
        of_gpu.waits.add(waited);
        let before = of_gpu.last_holder.replace(client);
        let hand_overs = u64::from(before.is_some_and(|before| before != client));
        self.add(client, gpu, &Counted { grants: 1, hand_overs, wait_time: waited, ..Counted::default() });
    }

    /// Records that the client has held the lock since before the daemon started.
    fn holds(&mut self, client: ClientId, gpu: GpuId) {
        self.gpus.entry(gpu).or_default().last_holder = Some(client);
    }

    /// Handles the end of an attachment.
    fn detached(&mut self, client: ClientId, gpu: GpuId, turns: &Turns, now: Time) {
        let count = self.client(client, gpu);
        count.used.has(now, 0, 0);
        let lock_time = count.lock_time(turns);
        (count.reported, count.waited, count.held_before) = (None, Duration::ZERO, Duration::ZERO);
        self.add(client, gpu, &Counted { lock_time, ..Counted::default() });
    }

    /// Handles a client's report of its own counters.
    pub fn report(&mut self, client: ClientId, gpu: GpuId, reported: Reported) {
        let Some(before) = self.client(client, gpu).reported.replace(reported) else { return };
        let more = Counted {
            swapped_out: reported.swapped_out.saturating_sub(before.swapped_out),
            swapped_in: reported.swapped_in.saturating_sub(before.swapped_in),
            unmoved: reported.unmoved.saturating_sub(before.unmoved),
            refused: reported.refused.saturating_sub(before.refused),
            ..Counted::default()
        };
        if more != Counted::default() {
            self.add(client, gpu, &more);
        }
    }

    /// Counts an event before the scheduler handles it.
    pub(super) fn count_event(&mut self, model: &Model, event: &Event, now: Time) {
        match event {
            Event::Attached { client, gpu, .. } => drop(self.client(*client, *gpu)),
            Event::Held { client, gpus } => gpus.iter().for_each(|gpu| self.holds(*client, *gpu)),
            Event::Detached { client, gpu } => self.count_detached(model, *client, *gpu, now),
            Event::Disconnected { client } => {
                self.gpus_of(*client).into_iter().for_each(|gpu| self.count_detached(model, *client, gpu, now));
            }
            _ => {}
        }
    }

    fn count_detached(&mut self, model: &Model, client: ClientId, gpu: GpuId, now: Time) {
        if let Some(turns) = model.machine.turns(client, gpu, now) {
            self.detached(client, gpu, &turns, now);
        }
    }

    /// Counts a command from the scheduler.
    pub(super) fn count_command(&mut self, model: &Model, command: &Command, now: Time) {
        match command {
            Command::Grant { client, gpus } => {
                for gpu in gpus {
                    if let Some(turns) = model.machine.turns(*client, *gpu, now) {
                        self.granted(*client, *gpu, &turns);
                    }
                }
            }
            Command::MappingFailed { client, gpu, .. } => {
                self.add(*client, *gpu, &Counted { mapping_failures: 1, ..Counted::default() });
            }
            _ => {}
        }
    }

    /// Updates the total time for which each lock was held. Called after each event.
    pub(super) fn count_held(&mut self, model: &Model, now: Time) {
        for (gpu, count) in &mut self.gpus {
            match (model.machine.is_held(*gpu), count.held_since) {
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
    fn only_a_grant_to_a_different_client_is_a_hand_over() {
        let mut counts = Counts::default();
        for client in [ONE, ONE, OTHER, OTHER, ONE] {
            counts.granted(client, GPU, &turns(1, 0, 0));
        }
        let Counted { grants, hand_overs, .. } = counts.gpu(GPU).counted;
        assert_eq!((grants, hand_overs), (5, 2));
        assert_eq!(counts.client(ONE, GPU).counted.hand_overs, 1);
        // A holder is counted even if an earlier daemon granted it the lock.
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
        counts.detached(ONE, GPU, &turns(3, 9, 8), Time::ZERO);
        // After a new attach, the scheduler's sums start at zero again.
        counts.granted(ONE, GPU, &turns(1, 4, 0));
        let of_gpu = counts.gpu(GPU);
        assert_eq!((of_gpu.waits.count(), of_gpu.waits.sum()), (4, Duration::from_secs(13)));
        assert_eq!(of_gpu.counted.wait_time, Duration::from_secs(13));
        assert_eq!(of_gpu.counted.lock_time, Duration::from_secs(8));
        assert_eq!(counts.client(ONE, GPU).counted, of_gpu.counted);
    }

    /// In the metrics, the counters of a GPU and of a workload must never decrease.
    #[test]
    fn a_moved_clients_counters_stay_with_the_old_gpu() {
        const THERE: GpuId = GpuId(Uuid([2; 16]));
        let mut counts = Counts::default();
        let swapped = |bytes| Reported { swapped_out: bytes, ..Reported::default() };
        counts.report(ONE, GPU, swapped(0));
        counts.report(ONE, GPU, swapped(100));
        counts.granted(ONE, GPU, &turns(1, 2, 0));
        counts.moved(ONE, GPU, THERE, &turns(1, 2, 5), Time::ZERO);
        let seen = |counts: &mut Counts, gpu, held| {
            let count = counts.client(ONE, gpu);
            let lock_time = count.counted.lock_time + count.lock_time(&turns(0, 0, held));
            let Counted { swapped_out, wait_time, grants, .. } = count.counted;
            (lock_time.as_secs(), swapped_out, wait_time.as_secs(), grants)
        };
        // The scheduler has sums only for the client's present GPU.
        assert_eq!(seen(&mut counts, GPU, 0), (5, 100, 2, 1));
        assert_eq!(seen(&mut counts, THERE, 5), (0, 0, 0, 0));
        counts.report(ONE, THERE, swapped(130));
        counts.granted(ONE, THERE, &turns(2, 3, 5));
        assert_eq!(seen(&mut counts, THERE, 7), (2, 30, 1, 1));
        counts.moved(ONE, THERE, GPU, &turns(2, 3, 8), Time::ZERO);
        assert_eq!(seen(&mut counts, THERE, 0), (3, 30, 1, 1));
        assert_eq!(seen(&mut counts, GPU, 9), (6, 100, 2, 1), "and goes on when it comes back");
        counts.detached(ONE, GPU, &turns(2, 3, 9), Time::ZERO);
        assert_eq!(counts.gpu(GPU).counted.lock_time, Duration::from_secs(6));
        assert_eq!(counts.gpu(THERE).counted.lock_time, Duration::from_secs(3));
    }

    #[test]
    fn the_first_report_and_decreasing_counters_add_nothing() {
        let mut counts = Counts::default();
        for swapped_out in [100, 130, 5, 7, u64::MAX, 0, u64::MAX] {
            counts.report(ONE, GPU, Reported { swapped_out, ..Reported::default() });
        }
        assert_eq!(counts.gpu(GPU).counted.swapped_out, u64::MAX, "it stays at the most that there is");
        assert_eq!(counts.client(OTHER, GPU).counted, Counted::default());
    }

    #[test]
    fn a_wait_counts_in_the_first_bucket_that_contains_it() {
        let mut waits = Waits::default();
        for wait in [0, 1, 2, 3, 700_000] {
            waits.add(Duration::from_millis(wait));
        }
        let counts: Vec<_> = waits.buckets().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counts, [(0.001, 2), (0.003, 2), (f64::INFINITY, 1)]);
        assert_eq!((waits.count(), waits.sum()), (5, Duration::from_millis(700_006)));
    }

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    #[test]
    fn byte_seconds_integrate_bytes_over_time() {
        let mut used = Used::default();
        used.has(at(100), 10, 1);
        used.has(at(103), 20, 0);
        used.has(at(103), 5, 7);
        let first = used.take(at(104), Counted::default());
        assert_eq!((first.resident_byte_seconds, first.swapped_byte_seconds), (35.0, 10.0));
        used.has(at(106), 0, 0); // the client ends
        let then = used.take(at(200), Counted::default());
        assert_eq!((then.resident_byte_seconds, then.swapped_byte_seconds), (10.0, 14.0));
        assert_eq!(used.take(at(300), Counted::default()), Amounts::default());
    }

    #[test]
    fn each_counter_increase_is_recorded_once() {
        let mut used = Used::default();
        let counted = |lock: u64, waits: u64, moved: u64| Counted {
            lock_time: at(lock),
            wait_time: at(waits),
            grants: lock,
            swapped_in: moved,
            swapped_out: 2 * moved,
            hand_overs: 9,
            ..Counted::default()
        };
        let first = used.take(at(1), counted(3, 4, 5));
        let expected = Amounts {
            lock_seconds: 3.0,
            grants: 3.0,
            wait_seconds: 4.0,
            swapped_in_bytes: 5.0,
            swapped_out_bytes: 10.0,
            ..Amounts::default()
        };
        assert_eq!(first, expected);
        assert_eq!(used.take(at(2), counted(3, 4, 5)), Amounts::default());
        let more = Amounts { wait_seconds: 2.0, ..Amounts::default() };
        assert_eq!(used.take(at(3), counted(3, 6, 5)), more);
    }
}
