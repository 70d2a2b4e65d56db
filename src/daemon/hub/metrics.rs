//! What metrics are made from, as it is at this moment.

use std::collections::HashMap;
use std::sync::Arc;

use super::Hub;
use crate::daemon::metrics::snapshot::{Memory, OfClient, OfGpu, Seat, Snapshot};
use crate::daemon::socket;
use crate::scheduler::{GpuId, SeatView};

impl Hub {
    /// A copy, so that nothing of it is looked at on the scheduling loop.
    pub fn snapshot(&self) -> Snapshot {
        let now = socket::now();
        let views = self.machine.clients();
        let seats: HashMap<_, _> =
            views.iter().flat_map(|view| view.seats.iter().map(|seat| ((view.client, seat.gpu), seat))).collect();
        let mut gpus: HashMap<GpuId, OfGpu> = HashMap::new();
        for view in self.machine.gpus() {
            let Some(entry) = self.gpus.get(&view.gpu) else { continue };
            let count = self.counts.gpu(view.gpu);
            let figures = OfGpu {
                uuid: entry.label(view.gpu).into(),
                index: entry.index,
                name: entry.name.clone(),
                total: view.total,
                capacity: view.capacity,
                overhead: view.overhead,
                shortfall: view.shortfall,
                promised: view.promised,
                memory: Memory::default(),
                clients: 0,
                holders: view.holders.len() as u64,
                waiters: view.waiters.len() as u64,
                held: count.held(now),
                waits: count.waits,
                counted: count.counted,
            };
            gpus.insert(view.gpu, figures);
        }
        let mut clients = Vec::with_capacity(seats.len());
        for (client, id, count) in self.counts.clients() {
            let (Some(entry), Some(gpu)) = (self.clients.get(&client), gpus.get_mut(&id)) else { continue };
            let mut counted = count.counted.clone();
            let turns = self.machine.turns(client, id, now).unwrap_or_default();
            counted.lock_time += turns.lock_time;
            gpu.counted.lock_time += turns.lock_time;
            let seat = seats.get(&(client, id)).map(|seat| {
                let memory = memory(seat);
                gpu.memory.add(memory);
                gpu.clients += 1;
                Seat { memory, limit: seat.limit, memory_max: self.machine.memory_max(client, id), waits: turns.waits }
            });
            let (gpu, identity) = (Arc::clone(&gpu.uuid), entry.identity.clone());
            clients.push(OfClient { gpu, client: client.0, identity, counted, seat });
        }
        let mut gpus: Vec<OfGpu> = gpus.into_values().collect();
        gpus.sort_unstable_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        Snapshot { gpus, clients }
    }
}

fn memory(seat: &SeatView) -> Memory {
    Memory { demand: seat.demand, resident: seat.mapped, swapped: seat.swapped, pinned: seat.pinned }
}
