//! The figures behind the metrics.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::daemon::core::{Counted, GroupStall, View, Waits, Workload};
use crate::identity::Identity;
use crate::scheduler::{GpuId, GpuView};

#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub gpus: Vec<OfGpu>,
    pub workloads: Vec<OfWorkload>,
    /// One entry for each client and each GPU that the client uses or has used. Empty if metrics of
    /// programs are not configured.
    pub clients: Vec<OfClient>,
    pub groups: Vec<GroupStall>,
}

impl Snapshot {
    /// Computes the figures of a view.
    pub fn new(view: &View) -> Self {
        let now = view.now;
        let clients = view.machine.clients();
        let attachments: HashMap<_, _> = clients
            .iter()
            .flat_map(|seen| seen.attachments.iter().map(|attachment| ((seen.client, attachment.gpu), attachment)))
            .collect();
        let mut gpus: HashMap<GpuId, OfGpu> = HashMap::new();
        for seen in view.machine.gpus() {
            let Some(entry) = view.gpus.get(&seen.gpu) else { continue };
            let count = view.counts.gpu(seen.gpu);
            let figures = OfGpu {
                uuid: entry.label(seen.gpu).into(),
                index: entry.index,
                name: entry.name.clone(),
                clients: 0,
                held: count.held(now),
                waits: count.waits,
                used: Used { counted: count.counted, ..Used::sum() },
                seen,
            };
            gpus.insert(figures.seen.gpu, figures);
        }
        let mut workloads: BTreeMap<(GpuId, Workload), OfWorkload> = BTreeMap::new();
        for (id, workload, counted) in view.counts.ended() {
            let Some(gpu) = gpus.get(&id) else { continue };
            let mut of = OfWorkload::new(Arc::clone(&gpu.uuid), workload.clone());
            of.used.counted = counted.clone();
            workloads.insert((id, workload.clone()), of);
        }
        let mut programs = Vec::with_capacity(attachments.len());
        for (client, id, count) in view.counts.clients() {
            let (Some(entry), Some(gpu)) = (view.clients.get(&client), gpus.get_mut(&id)) else { continue };
            let turns = view.machine.turns(client, id, now).unwrap_or_default();
            let present = Counted { lock_time: count.lock_time(&turns), ..Counted::default() };
            let attached = attachments.get(&(client, id)).map(|attachment| Attachment {
                demand: attachment.demand,
                resident: attachment.mapped,
                swapped: attachment.swapped,
                pinned: attachment.pinned,
                limit: attachment.limit,
                memory_max: view.machine.memory_max(client, id),
                waits: turns.waits,
            });
            let mut used = Used { counted: present, attached };
            gpu.clients += u64::from(attached.is_some());
            gpu.used.add(&used);
            used.counted.add(&count.counted);
            let (gpu, identity) = (Arc::clone(&gpu.uuid), entry.identity.clone());
            let client = OfClient { gpu, client: client.0, identity, used };
            let key = (id, Workload::of(&client.identity));
            let new = |(_, workload): &(GpuId, Workload)| OfWorkload::new(Arc::clone(&client.gpu), workload.clone());
            workloads.entry(key).or_insert_with_key(new).add(&client);
            if view.metrics_of_programs {
                programs.push(client);
            }
        }
        let workloads = workloads.into_values().collect();
        let mut gpus: Vec<OfGpu> = gpus.into_values().collect();
        gpus.sort_unstable_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        Self { gpus, workloads, clients: programs, groups: view.stalls.clone() }
    }
}

/// A workload on a GPU. Its counters also count programs that have ended.
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

#[derive(Debug, Clone)]
pub struct OfGpu {
    pub uuid: Arc<str>,
    /// NVML's index, if NVML lists the GPU.
    pub index: Option<u32>,
    pub name: String,
    pub seen: GpuView,
    pub clients: u64,
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
