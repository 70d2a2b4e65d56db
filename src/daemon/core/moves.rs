//! Moves of programs between GPUs of the same kind, and draining of GPUs. The state directory keeps
//! the drained GPUs for the next daemon.
//!
//! A client names GPUs by slots, and sends no message about its slots between the end of its
//! preparation for sleep and its wake. So in that time the daemon can assign a slot to another GPU.
//! The client learns the new GPU's UUID from `Awake`. For a restore, the driver accepts either no
//! pairs of old and new GPUs, or pairs for all GPUs of the host. So the daemon adds pairs for
//! the GPUs that are not part of the move.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nvshare_wire::client::GpuKind;
use tokio::sync::oneshot;
use tracing::info;
use zbus::fdo;

use super::model::{Gpu, Model};
use super::paused::Orders;
use super::placement::may_be_on;
use crate::bus;
use crate::daemon::checkpoint::Uuid;
use crate::daemon::state_file::{Saving, StateFile};
use crate::scheduler::{ClientId, Event, GpuId, GpuSet, Move, MoveObstacle};

/// The file that stores the drained GPUs.
const DRAINED: &str = "drained.toml";

/// Receives the result of a move: success, or the reason for the failure.
pub type Reply = oneshot::Sender<fdo::Result<()>>;

/// The moves that callers await, and the drained GPUs.
#[derive(Debug, Default)]
pub struct Moves {
    /// Callers that await the move of a client to another GPU.
    awaited: BTreeMap<ClientId, Reply>,
    /// UUIDs of drained GPUs, including GPUs that are absent now.
    drained: StateFile<Orders<String>>,
}

impl Moves {
    /// Restores the drained GPUs saved in this directory. From now on, saves changes in it.
    pub fn open(&mut self, directory: &Path) {
        self.drained = Orders::open(directory.join(DRAINED));
    }

    /// Begins the move of a program to another GPU. `users`: the users whose programs the caller may move. The
    /// reply is sent when the program is on the new GPU or the move has failed.
    ///
    /// The error is `InvalidArgs` if the program or GPU does not exist, or if the process ID now belongs to
    /// another user's process.
    pub fn begin(
        &mut self,
        model: &Model,
        events: &mut Vec<Event>,
        (pid, gpu): (u32, &str),
        users: &BTreeSet<u32>,
        reply: Reply,
    ) {
        match migration(model, pid, gpu, users) {
            Err(e) => drop(reply.send(Err(e))), // the caller may have left
            Ok((client, Move { from, to })) => {
                self.awaited.insert(client, reply);
                events.push(Event::Migrate { client, from, to });
            }
        }
    }

    /// Handles the end of a move. `why`: the reason for a failure. `None` if the client was moved.
    pub fn ended(&mut self, model: &Model, client: ClientId, to: GpuId, why: Option<MoveObstacle>) {
        let why = why.map(|why| describe(model, why));
        let why = why.as_deref();
        if let Some((identity, label)) = model.identity(client).zip(model.label(to)) {
            let (pid, name) = (identity.pid, identity.label());
            match why {
                None => info!(client = client.0, pid, gpu = label, "moved {name} to another GPU"),
                Some(why) => info!(client = client.0, pid, gpu = label, "cannot move {name} to another GPU: {why}"),
            }
        }
        self.reply(client, why);
    }

    /// Tells the caller that a client ended before its move.
    pub fn leave(&mut self, client: ClientId) {
        self.reply(client, Some("it has ended"));
    }

    fn reply(&mut self, client: ClientId, why: Option<&str>) {
        let text = |why| fdo::Error::Failed(format!("cannot move the program to another GPU: {why}"));
        if let Some(reply) = self.awaited.remove(&client) {
            let _ = reply.send(why.map_or(Ok(()), |why| Err(text(why)))); // the caller may have left
        }
    }

    /// Drains a GPU if `drained` is true. Otherwise, allows its use again.
    ///
    /// # Errors
    /// `InvalidArgs` if the GPU does not exist.
    pub fn drain(&mut self, model: &Model, events: &mut Vec<Event>, gpu: &str, drained: bool) -> fdo::Result<Saving> {
        let named = model.find_gpu(gpu)?;
        let what = if drained { "is being drained" } else { "can be used again" };
        info!(gpu = named.label, "{} {what}", named.title);
        let all = &mut self.drained.content.all;
        match drained {
            true => all.insert(named.label),
            false => all.remove(&named.label),
        };
        events.push(Event::Drain { gpu: GpuId(named.uuid), drained });
        Ok(self.drained.save(&self.drained.content))
    }

    /// Drains a newly found GPU if it is among the saved drained GPUs. An earlier daemon may have received
    /// the order.
    pub fn drain_again(&self, model: &Model, gpu: GpuId) -> Option<Event> {
        let is_drained = model.label(gpu).is_some_and(|label| self.drained.content.all.contains(&label));
        is_drained.then_some(Event::Drain { gpu, drained: true })
    }
}

/// Describes why a client is not moved to another GPU.
fn describe(model: &Model, obstacle: MoveObstacle) -> String {
    let MoveObstacle::Unevictable(other, why) = obstacle else { return bus::move_obstacle_name(obstacle).into() };
    let name = model
        .identity(other)
        .map_or("a program there".into(), |identity| format!("{} (process {})", identity.label(), identity.pid));
    let why = bus::eviction_block_name(why);
    format!("the memory of {name} cannot be evicted from that GPU now: {why}. Try again later, or end that program")
}

/// Checks a requested move. Returns the client, its present GPU and its new GPU.
fn migration(model: &Model, pid: u32, gpu: &str, users: &BTreeSet<u32>) -> fdo::Result<(ClientId, Move)> {
    let clients = model.program_of(pid, users)?;
    let failed = |text: &str| fdo::Error::Failed(format!("cannot move process {pid} to another GPU: {text}"));
    let named = model.find_gpu(gpu)?;
    let to = GpuId(named.uuid);
    let [client] = *clients else { return Err(failed("it has several connections to the scheduler")) };
    let gpus = model.gpus_of(client);
    let mut gpus = gpus.iter();
    let from = match (gpus.next(), gpus.next()) {
        (None, _) => return Err(failed("it uses no GPU")),
        (Some(from), None) => *from,
        (Some(_), Some(_)) => return Err(failed("it uses several GPUs")),
    };
    if from == to {
        return Err(failed("it is already on that GPU"));
    }
    if model.machine.sleep_of(client).moving.is_some() {
        return Err(failed(bus::move_obstacle_name(MoveObstacle::Moving)));
    }
    if !is_of_one_kind(model, from, to) {
        let label = model.label(from).unwrap_or_default();
        return Err(fdo::Error::Failed(format!(
            "{} does not match {label}. Both GPUs need the same model, memory size and compute capability, and no \
             GPU of the host may have MIG slices.",
            named.label
        )));
    }
    may_be_on(model, client, to).map_err(|why| failed(&why))?;
    Ok((client, Move { from, to }))
}

/// True if a process's memory on one GPU can be restored on the other: both are whole GPUs of one
/// model. The driver requires a pair for each GPU of the host, so no GPU of the host may be in MIG
/// mode.
fn is_of_one_kind(model: &Model, one: GpuId, other: GpuId) -> bool {
    let kind = |id| {
        let Gpu { kind, name, total, capability, .. } =
            model.gpus.get(&id).filter(|gpu| (gpu.index.is_some() && !gpu.gone) || gpu.is_foreign)?;
        Some((*kind, name, *total, *capability))
    };
    let is_whole = model.gpus.values().all(|gpu| gpu.kind == GpuKind::Gpu || gpu.index.is_none());
    is_whole && kind(one).is_some() && kind(one) == kind(other)
}

/// The event with the sets of GPUs that clients can move between. `None` if the scheduler knows them.
pub(super) fn kinds(model: &Model) -> Option<Event> {
    let mut kinds: Vec<GpuSet> = Vec::new();
    for id in model.gpus.keys().copied().filter(|id| is_of_one_kind(model, *id, *id)) {
        let known = kinds.iter_mut().find(|kind| kind.iter().all(|other| is_of_one_kind(model, *other, id)));
        match known {
            Some(kind) => drop(kind.insert(id)),
            None => kinds.push(GpuSet::from([id])),
        }
    }
    (model.machine.kinds() != kinds).then_some(Event::Kinds { kinds })
}

/// Pairs each GPU of the host with the GPU on which a process's memory is restored after these moves.
pub(super) fn pairs_of(model: &Model, moves: &[Move]) -> Vec<(Uuid, Uuid)> {
    let is_foreign = |id: &GpuId| model.gpus.get(id).is_some_and(|gpu| gpu.is_foreign);
    if moves.iter().any(|both| is_foreign(&both.from)) {
        // The old host's GPUs, as far as they are known, and none of this host's.
        return moves.iter().map(|both| (both.from.0.0, both.to.0.0)).collect();
    }
    let host = model.gpus.iter().filter(|(_, gpu)| gpu.index.is_some() && !gpu.is_slice()).map(|(id, _)| *id);
    pairs(&host.collect(), moves)
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
    use crate::config::Config;
    use crate::scheduler::EvictionBlock;

    #[test]
    fn a_refused_move_names_the_program_whose_memory_is_in_the_way() {
        let model = Model::new(Config::default());
        let said = describe(&model, MoveObstacle::Unevictable(ClientId(1), EvictionBlock::Late));
        assert!(said.contains("a program there") && said.contains("it does not answer. Try again later"), "{said}");
        assert!(describe(&model, MoveObstacle::NoRoom).contains("too little memory"));
    }

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
