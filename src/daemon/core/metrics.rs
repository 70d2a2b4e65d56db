//! Computes the figures of metrics from a view.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::pressure;
use super::view::View;
use crate::daemon::metrics::snapshot::{
    Attachment, Counted, Figures, OfClient, OfGpu, OfWorkload, Snapshot, Used, Workload,
};
use crate::scheduler::GpuId;

impl Figures for View {
    fn figures(&self) -> Snapshot {
        let now = self.now;
        let views = self.machine.clients();
        let attachments: HashMap<_, _> = views
            .iter()
            .flat_map(|view| view.attachments.iter().map(|attachment| ((view.client, attachment.gpu), attachment)))
            .collect();
        let mut gpus: HashMap<GpuId, OfGpu> = HashMap::new();
        for view in self.machine.gpus() {
            let Some(entry) = self.gpus.get(&view.gpu) else { continue };
            let count = self.counts.gpu(view.gpu);
            let figures = OfGpu {
                uuid: entry.label(view.gpu).into(),
                index: entry.index,
                name: entry.name.clone(),
                total: view.total,
                capacity: (!view.gone).then_some(view.capacity),
                gone: view.gone,
                overhead: view.overhead,
                kept: view.kept,
                shortfall: view.shortfall,
                committed: view.committed,
                clients: 0,
                holders: view.holders.len() as u64,
                waiters: view.waiters.len() as u64,
                held: count.held(now),
                waits: count.waits,
                used: Used { counted: count.counted, ..Used::sum() },
            };
            gpus.insert(view.gpu, figures);
        }
        let mut workloads: BTreeMap<(GpuId, Workload), OfWorkload> = BTreeMap::new();
        for (id, workload, counted) in self.counts.ended() {
            let Some(gpu) = gpus.get(&id) else { continue };
            let mut of = OfWorkload::new(Arc::clone(&gpu.uuid), workload.clone());
            of.used.counted = counted.clone();
            workloads.insert((id, workload.clone()), of);
        }
        let mut clients = Vec::with_capacity(attachments.len());
        for (client, id, count) in self.counts.clients() {
            let (Some(entry), Some(gpu)) = (self.clients.get(&client), gpus.get_mut(&id)) else { continue };
            let turns = self.machine.turns(client, id, now).unwrap_or_default();
            let present = Counted { lock_time: count.lock_time(&turns), ..Counted::default() };
            let attached = attachments.get(&(client, id)).map(|attachment| Attachment {
                demand: attachment.demand,
                resident: attachment.mapped,
                swapped: attachment.swapped,
                pinned: attachment.pinned,
                limit: attachment.limit,
                memory_max: self.machine.memory_max(client, id),
                waits: turns.waits,
            });
            let mut used = Used { counted: present, attached };
            gpu.clients += u64::from(attached.is_some());
            gpu.used.add(&used);
            used.counted.add(&count.counted);
            let (gpu, identity) = (Arc::clone(&gpu.uuid), entry.identity.clone());
            let client = OfClient { gpu, client: client.0, identity, used };
            let key = (id, Workload::of(&client.identity));
            match workloads.get_mut(&key) {
                Some(workload) => workload.add(&client),
                None => {
                    let mut workload = OfWorkload::new(Arc::clone(&client.gpu), key.1.clone());
                    workload.add(&client);
                    workloads.insert(key, workload);
                }
            }
            if self.metrics_of_programs {
                clients.push(client);
            }
        }
        let workloads = workloads.into_values().collect();
        let mut gpus: Vec<OfGpu> = gpus.into_values().collect();
        gpus.sort_unstable_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        Snapshot { gpus, workloads, clients, groups: pressure::totals(&self.stalls) }
    }
}
