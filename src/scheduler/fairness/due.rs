//! Each client's due part of a GPU's time. Users compare it with the client's actual part. No
//! decision depends on the due part.

use super::{ShareOwner, Shares};
use crate::{api::*, queue::Entity};
use std::collections::{BTreeMap, BTreeSet};

/// All of a GPU's time, in thousandths.
const WHOLE: u32 = 1000;

impl Shares<'_> {
    /// The due part of the GPU's time, in thousandths, of each client that holds the GPU or waits
    /// for it. Assumes that all these clients always have work. The owners of the best tier divide
    /// the time by weight. The requests of one owner divide the owner's part equally.
    pub fn due(&self, id: GpuId) -> BTreeMap<ClientId, u32> {
        let waiting = self.queues.queued(id).flat_map(|entity| self.queues.members(entity, id));
        let clients: BTreeSet<ClientId> = waiting.chain(self.gpus.running_on(id)).collect();
        let Some(best) = clients.iter().map(|client| self.share_of(*client).tier()).min() else {
            return BTreeMap::new();
        };
        let is_best = |client: &&ClientId| self.share_of(**client).tier() == best;
        // Members of a gang run at the same time, so a gang counts as one request.
        let mut owners: BTreeMap<ShareOwner, BTreeSet<Entity>> = BTreeMap::new();
        for client in clients.iter().filter(is_best) {
            if let Some(owner) = self.owner(*client) {
                owners.entry(owner).or_default().insert(self.queues.entity(*client));
            }
        }
        // Each owner's weight is computed once, because the computation can take time proportional
        // to the number of clients.
        let weigh = |(owner, requests): (ShareOwner, BTreeSet<Entity>)| {
            (owner, (u64::from(self.weight_on(owner, id)), requests.len() as u64))
        };
        let owners: BTreeMap<ShareOwner, (u64, u64)> = owners.into_iter().map(weigh).collect();
        let sum: u64 = owners.values().map(|(weight, _)| weight).sum();
        let part = |client: &ClientId| {
            let owner = self.owner(*client).filter(|_| is_best(&client))?;
            let (weight, requests) = owners.get(&owner)?;
            let part = u64::from(WHOLE) * weight / (sum * requests).max(1);
            let most = u32::from(self.share_of(*client).max) * WHOLE / 100;
            Some(u32::try_from(part).unwrap_or(WHOLE).min(most))
        };
        clients.iter().map(|client| (*client, part(client).unwrap_or(0))).collect()
    }
}
