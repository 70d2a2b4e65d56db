//! Moves of programs between GPUs of the same kind, and draining of GPUs. The state directory keeps
//! the drained GPUs for the next daemon.
//!
//! A client names GPUs by slots, and sends no message about its slots between the end of its
//! preparation for sleep and its wake. So in that time the daemon can assign a slot to another GPU.
//! The client learns the new GPU's UUID from `Awake`. For a restore, the driver accepts either no
//! pairs of old and new GPUs, or pairs for all GPUs of the host. So the daemon adds pairs for
//! the GPUs that are not part of the move.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_wire::client::GpuKind;
use tokio::sync::oneshot;
use tracing::info;
use zbus::fdo;

use super::saved::Saving;
use super::state::{ClientGpuStats, Core, Gpu};
use crate::bus;
use crate::daemon::checkpoint::Uuid;
use crate::daemon::gpu::accounting::History;
use crate::daemon::gpu::device_files;
use crate::scheduler::{ClientId, Event, GpuId, GpuSet, Move, MoveObstacle, Time};

/// Receives the result of a move: success, or the reason for the failure.
pub type Reply = oneshot::Sender<fdo::Result<()>>;

impl Core {
    /// Moves a program to another GPU. `users`: the users whose programs the caller may move. The
    /// reply is sent when the program is on the new GPU or the move has failed.
    ///
    /// The error is `InvalidArgs` if the program or GPU does not exist, or if the process ID now belongs to
    /// another user's process.
    pub fn migrate(&mut self, pid: u32, gpu: &str, users: &BTreeSet<u32>, reply: Reply) {
        match self.migration(pid, gpu, users) {
            Err(e) => drop(reply.send(Err(e))),
            Ok((client, Move { from, to })) => {
                self.migrations.insert(client, reply);
                self.apply(Event::Migrate { client, from, to });
            }
        }
    }

    /// Checks a requested move. Returns the client, its present GPU and its new GPU.
    fn migration(&self, pid: u32, gpu: &str, users: &BTreeSet<u32>) -> fdo::Result<(ClientId, Move)> {
        if !self.users_of(pid)?.is_subset(users) {
            return Err(fdo::Error::InvalidArgs(format!("process {pid} has just ended")));
        }
        let failed = |text: &str| fdo::Error::Failed(format!("cannot move process {pid} to another GPU: {text}"));
        let named = self.find_gpu(gpu).map_err(fdo::Error::InvalidArgs)?;
        let to = GpuId(named.uuid);
        let [client] = *self.program(pid)? else {
            return Err(failed("it has several connections to the scheduler"));
        };
        let Some(entry) = self.clients.get(&client) else { return Err(failed("it has ended")) };
        let mut gpus = entry.gpus.keys();
        let from = match (gpus.next(), gpus.next()) {
            (None, _) => return Err(failed("it uses no GPU")),
            (Some(from), None) => *from,
            (Some(_), Some(_)) => return Err(failed("it uses several GPUs")),
        };
        if from == to {
            return Err(failed("it is already on that GPU"));
        }
        if self.machine.sleep_of(client).moving.is_some() {
            return Err(failed(bus::move_obstacle_name(MoveObstacle::Moving)));
        }
        if !self.is_of_one_kind(from, to) {
            let label = self.label(from).unwrap_or_default();
            return Err(fdo::Error::Failed(format!(
                "{} does not match {label}. Both GPUs need the same model, memory size and compute capability, and no \
                 GPU of the host may have MIG slices.",
                named.label
            )));
        }
        self.may_be_on(client, to).map_err(|why| failed(&why))?;
        Ok((client, Move { from, to }))
    }

    /// True if a process's memory on one GPU can be restored on the other: both are whole GPUs of one
    /// model. The driver requires a pair for each GPU of the host, so no GPU of the host may be in MIG
    /// mode.
    fn is_of_one_kind(&self, one: GpuId, other: GpuId) -> bool {
        let kind = |id| {
            let Gpu { kind, name, total, capability, .. } =
                self.gpus.get(&id).filter(|gpu| gpu.index.is_some() && !gpu.gone)?;
            Some((*kind, name, *total, *capability))
        };
        let is_whole = self.gpus.values().all(|gpu| gpu.kind == GpuKind::Gpu || gpu.index.is_none());
        is_whole && kind(one).is_some() && kind(one) == kind(other)
    }

    /// Handles the end of a move. `why`: the reason for a failure. `None` if the client was moved.
    pub(super) fn migrated(&mut self, client: ClientId, to: GpuId, why: Option<MoveObstacle>) {
        let reply = self.migrations.remove(&client);
        if let (Some(entry), Some(label)) = (self.clients.get(&client), self.label(to)) {
            let (pid, name) = (entry.identity.pid, entry.identity.label());
            match why {
                None => info!(client = client.0, pid, gpu = label, "moved {name} to another GPU"),
                Some(why) => {
                    let why = bus::move_obstacle_name(why);
                    info!(client = client.0, pid, gpu = label, "cannot move {name} to another GPU: {why}");
                }
            }
        }
        if let Some(reply) = reply {
            let text = |why| format!("cannot move the program to another GPU: {}", bus::move_obstacle_name(why));
            let answer = why.map_or(Ok(()), |why| Err(fdo::Error::Failed(text(why))));
            let _ = reply.send(answer); // the caller may have left
        }
    }

    /// Moves a client's records to the new GPU after its memory has moved.
    pub(super) fn moved(&mut self, client: ClientId, from: GpuId, to: GpuId, now: Time) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        entry.session.moved(from, to);
        // The driver has restored the process there.
        entry.devices.extend(self.gpus.get(&to).and_then(|gpu| gpu.minor).map(device_files::of_gpu));
        if let Some(stats) = entry.gpus.remove(&from) {
            // The history describes the old GPU, so it is not copied.
            entry.gpus.insert(to, ClientGpuStats { history: History::default(), ..stats });
        }
        self.record_usage_of(client, from, to, now);
        let turns = self.machine.turns(client, to, now).unwrap_or_default();
        self.counts.moved(client, from, to, &turns);
        if let Some(counts) = self.counts.of(client, from) {
            counts.used.has(now, 0, 0);
        }
        self.record_extent(client, to, now);
    }

    /// Drains a GPU if `drained` is true. Otherwise, allows its use again.
    ///
    /// # Errors
    /// `InvalidArgs` if the GPU does not exist.
    pub fn drain(&mut self, gpu: &str, drained: bool) -> fdo::Result<Saving> {
        let named = self.find_gpu(gpu).map_err(fdo::Error::InvalidArgs)?;
        let id = GpuId(named.uuid);
        let what = if drained { "is being drained" } else { "can be used again" };
        info!(gpu = named.label, "{} {what}", named.title);
        match drained {
            true => self.drained.all.insert(named.label),
            false => self.drained.all.remove(&named.label),
        };
        let saving = self.drained.save();
        self.apply(Event::Drain { gpu: id, drained });
        Ok(saving)
    }

    /// Drains a newly found GPU if it is among the saved drained GPUs. An earlier daemon may have received
    /// the order.
    pub(super) fn drain_again(&mut self, gpu: GpuId) {
        if self.label(gpu).is_some_and(|label| self.drained.all.contains(&label)) {
            self.apply(Event::Drain { gpu, drained: true });
        }
    }

    /// Sends the scheduler the sets of GPUs that clients can move between. Called after a change of
    /// `gpus`.
    pub(super) fn tell_kinds(&mut self) {
        let mut kinds: Vec<GpuSet> = Vec::new();
        for id in self.gpus.keys().copied().filter(|id| self.is_of_one_kind(*id, *id)) {
            let known = kinds.iter_mut().find(|kind| kind.iter().all(|other| self.is_of_one_kind(*other, id)));
            match known {
                Some(kind) => drop(kind.insert(id)),
                None => kinds.push(GpuSet::from([id])),
            }
        }
        if self.machine.kinds() != kinds {
            self.apply(Event::Kinds { kinds });
            self.tell_allowed(self.clients.keys().copied().collect::<Vec<_>>());
        }
    }

    /// Sends the scheduler the GPUs that each of these clients may use.
    pub(super) fn tell_allowed(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        let allowed = |client: ClientId| {
            let (may, may_not): (GpuSet, GpuSet) =
                self.gpus.keys().partition(|gpu| self.may_be_on(client, **gpu).is_ok());
            (client, (!may_not.is_empty()).then_some(may))
        };
        let has_changed = |(client, gpus): &(ClientId, Option<GpuSet>)| self.machine.allowed(*client) != gpus.as_ref();
        let allowed: BTreeMap<ClientId, Option<GpuSet>> =
            clients.into_iter().map(allowed).filter(has_changed).collect();
        if !allowed.is_empty() {
            self.apply(Event::Allowed { allowed });
        }
    }

    /// Pairs each GPU of the host with the GPU on which a process's memory is restored after these moves.
    pub(super) fn pairs(&self, moves: &[Move]) -> Vec<(Uuid, Uuid)> {
        let host = self.gpus.iter().filter(|(_, gpu)| gpu.index.is_some() && !gpu.is_slice()).map(|(id, _)| *id);
        pairs(&host.collect(), moves)
    }
}

/// Pairs all GPUs of the host, because the driver rejects incomplete lists. Returns an empty list
/// if nothing moves.
fn pairs(host: &GpuSet, moves: &[Move]) -> Vec<(Uuid, Uuid)> {
    if moves.is_empty() {
        return Vec::new();
    }
    let (from, to): (GpuSet, GpuSet) = moves.iter().map(|both| (both.from, both.to)).unzip();
    // A GPU that only receives memory is paired with a GPU that only loses memory.
    let others = to.difference(&from).zip(from.difference(&to)).map(|(to, from)| (*to, *from));
    let same = host.iter().filter(|id| !from.contains(id) && !to.contains(id)).map(|id| (*id, *id));
    let all = moves.iter().map(|both| (both.from, both.to)).chain(others).chain(same);
    all.map(|(from, to)| (from.0.0, to.0.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restore_pairs_are_a_permutation_of_the_hosts_gpus() {
        let gpu = |n| GpuId(nvshare_wire::Uuid([n; 16]));
        let host = (0..4).map(gpu).collect::<GpuSet>();
        assert_eq!(pairs(&host, &[]), []);
        let shown = |moves: &[(u8, u8)]| {
            let moves: Vec<Move> = moves.iter().map(|(from, to)| Move { from: gpu(*from), to: gpu(*to) }).collect();
            let mut pairs: Vec<(u8, u8)> = pairs(&host, &moves).iter().map(|(from, to)| (from[0], to[0])).collect();
            pairs.sort_unstable();
            pairs
        };
        assert_eq!(shown(&[(0, 2)]), [(0, 2), (1, 1), (2, 0), (3, 3)]);
        assert_eq!(shown(&[(0, 2), (2, 3)]), [(0, 2), (1, 1), (2, 3), (3, 0)]);
        assert_eq!(shown(&[(0, 1), (1, 0)]), [(0, 1), (1, 0), (2, 2), (3, 3)]);
        assert_eq!(shown(&[(0, 2), (1, 3)]), [(0, 2), (1, 3), (2, 0), (3, 1)]);
    }
}
