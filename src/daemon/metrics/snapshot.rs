//! The figures behind the metrics.

use std::sync::Arc;
use std::time::Duration;

use crate::identity::Identity;

/// Upper bounds of the buckets for waits, in seconds. The shortest waits are hand-overs that move no
/// memory. The longest are several turns with the longest common time quantum.
pub const WAIT_BOUNDS: [f64; 14] =
    [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// A view of the scheduling loop's state that can compute the figures.
pub trait Figures: Send + Sync {
    fn figures(&self) -> Snapshot;
}

#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub gpus: Vec<OfGpu>,
    pub workloads: Vec<OfWorkload>,
    /// One entry for each client and each GPU that the client uses or has used. Empty if metrics of
    /// programs are not configured.
    pub clients: Vec<OfClient>,
    pub groups: Vec<OfGroup>,
}

/// Stall times of the clients of a GPU, a tenant or a unit.
#[derive(Debug, Clone)]
pub struct OfGroup {
    pub kind: &'static str,
    pub name: String,
    /// `some`: time for which at least one client was stalled. `full`: the part of this time in
    /// which no client of the group held a lock.
    pub some: Duration,
    pub full: Duration,
}

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

/// A workload on a GPU. The counters include those of programs that have ended.
#[derive(Debug, Clone)]
pub struct OfWorkload {
    pub gpu: Arc<str>,
    pub workload: Workload,
    pub programs: u64,
    pub used: Used,
}

impl OfWorkload {
    pub fn new(gpu: Arc<str>, workload: Workload) -> Self {
        Self { gpu, workload, programs: 0, used: Used::sum() }
    }

    /// Adds a program of the workload.
    pub fn add(&mut self, client: &OfClient) {
        self.programs += u64::from(client.used.attached.is_some());
        self.used.add(&client.used);
    }
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

#[derive(Debug, Clone)]
pub struct OfGpu {
    pub uuid: Arc<str>,
    /// NVML's index, if NVML lists the GPU.
    pub index: Option<u32>,
    pub name: String,
    pub total: u64,
    /// `None` if NVML no longer lists the GPU.
    pub capacity: Option<u64>,
    pub gone: bool,
    pub overhead: u64,
    pub kept: u64,
    pub shortfall: u64,
    pub committed: u64,
    pub clients: u64,
    pub holders: u64,
    pub waiters: u64,
    pub held: Duration,
    pub waits: Waits,
    pub used: Used,
}

#[derive(Debug, Clone)]
pub struct OfClient {
    pub gpu: Arc<str>,
    pub client: u64,
    pub identity: Arc<Identity>,
    pub used: Used,
}

/// The use of a GPU by one client or several.
#[derive(Debug, Clone, Default)]
pub struct Used {
    pub counted: Counted,
    /// `None` if the client no longer uses the GPU.
    pub attached: Option<Attachment>,
}

impl Used {
    /// The sum of no clients.
    pub fn sum() -> Self {
        Self { counted: Counted::default(), attached: Some(Attachment::default()) }
    }

    pub fn add(&mut self, more: &Self) {
        self.counted.add(&more.counted);
        if let (Some(sum), Some(more)) = (&mut self.attached, &more.attached) {
            for (sum, more) in [
                (&mut sum.demand, more.demand),
                (&mut sum.resident, more.resident),
                (&mut sum.swapped, more.swapped),
                (&mut sum.pinned, more.pinned),
                (&mut sum.limit, more.limit),
            ] {
                *sum = sum.saturating_add(more);
            }
            sum.memory_max = sum.memory_max.max(more.memory_max);
            sum.waits = sum.waits.max(more.waits);
        }
    }
}

/// The clients that use the GPU: sums of their bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attachment {
    pub demand: u64,
    pub resident: u64,
    pub swapped: u64,
    pub pinned: u64,
    pub limit: u64,
    /// The highest number of bytes that a rule allows the clients' groups. `None` without such a rule.
    pub memory_max: Option<u64>,
    /// The longest wait in progress.
    pub waits: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
