//! Rooms: GPU memory that is kept free, at a user's request, for programs that are not clients. The
//! scheduler frees and reserves the memory. This module records the owner of each room and the callers
//! that wait for a room.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tracing::info;
use zbus::fdo;

use super::model::{Model, NamedGpu, client_name, gpu_name};
use crate::bus;
use crate::config::units;
use crate::daemon::tenants::{Share, What};
use crate::identity::Identity;
use crate::scheduler::{Event, GpuId, LockState, RoomId, RoomObstacle};
use crate::sys::clock;

/// Maximum number of programs that an error message names as obstacles.
const NAMED: usize = 3;

/// The arguments of the D-Bus method `MakeRoom`, and its caller.
#[derive(Debug, Clone)]
pub struct RoomRequest {
    /// UUID or index of the GPU. Empty if the host has only one GPU.
    pub gpu: String,
    pub bytes: u64,
    /// Time for which the room is kept. Each renewal restarts this time.
    pub lasts: Duration,
    pub caller: Identity,
}

/// A room, or a pending request for one.
#[derive(Debug)]
struct Room {
    owner: Arc<Identity>,
    _share: Share,
    gpu: GpuId,
    bytes: u64,
    lasts: Duration,
    /// Sends the reply to the caller. `None` after the reply.
    reply: Option<oneshot::Sender<fdo::Result<()>>>,
    /// Notified if the room ends before its owner closes it.
    ended: Rc<Notify>,
}

/// A pending request for a room, as returned to the caller.
pub struct PendingRoom {
    pub room: RoomId,
    /// Receives the reply: success when the memory is free, or the reason why the room was refused.
    pub ready: oneshot::Receiver<fdo::Result<()>>,
    /// Notified if the room ends before its owner closes it.
    pub ended: Rc<Notify>,
}

/// Validates a request for a room. Returns its GPU.
///
/// # Errors
/// `InvalidArgs` if the request is invalid. `LimitsExceeded` if the tenant has too many rooms.
pub fn check(model: &Model, request: &RoomRequest) -> fdo::Result<NamedGpu> {
    let gpu = model.find_gpu(&request.gpu)?;
    if request.bytes == 0 {
        return Err(fdo::Error::InvalidArgs("the size of a room must be at least 1 byte".into()));
    }
    let budget = model.budgets.of(&request.caller.tenant);
    if budget.left(What::Rooms) == 0 {
        let (tenant, number) = (budget.tenant(), budget.limit(What::Rooms));
        let text = format!("{tenant} already has the maximum of {number} rooms. Close one first.");
        return Err(fdo::Error::LimitsExceeded(text));
    }
    Ok(gpu)
}

/// The rooms, by number.
#[derive(Debug, Default)]
pub struct Rooms {
    rooms: BTreeMap<RoomId, Room>,
    last: u64,
}

impl Rooms {
    /// Adds a room, and requests it from the scheduler.
    ///
    /// # Errors
    /// Fails like [`check`].
    pub fn add(&mut self, model: &Model, events: &mut Vec<Event>, request: RoomRequest) -> fdo::Result<PendingRoom> {
        let gpu = GpuId(check(model, &request)?.uuid);
        self.last += 1;
        let room = RoomId(self.last);
        let (reply, ready) = oneshot::channel();
        let ended = Rc::new(Notify::new());
        let RoomRequest { bytes, lasts, caller, .. } = request;
        let _share = model.budgets.of(&caller.tenant).hold(What::Rooms, 1);
        let (owner, reply) = (Arc::new(caller), Some(reply));
        self.rooms.insert(room, Room { owner, _share, gpu, bytes, lasts, reply, ended: ended.clone() });
        self.renew(events, room);
        Ok(PendingRoom { room, ready, ended })
    }

    /// Renews a room: restarts its full time.
    pub fn renew(&self, events: &mut Vec<Event>, room: RoomId) {
        let Some(&Room { gpu, bytes, lasts, .. }) = self.rooms.get(&room) else { return };
        events.push(Event::RoomRequested { room, gpu, bytes, until: clock::now().saturating_add(lasts) });
    }

    /// Closes a room at its owner's request.
    pub fn close(&mut self, model: &Model, events: &mut Vec<Event>, room: RoomId) {
        let Some(Room { owner, gpu, .. }) = self.rooms.remove(&room) else { return };
        info!(name: "room-closed", uid = owner.uid, pid = owner.pid, gpu = model.label(gpu), "{} closed its \
            room", owner.name);
        events.push(Event::RoomClosed { room });
    }

    /// Handles a room whose memory is free.
    pub fn ready(&mut self, model: &Model, room: RoomId) {
        let Some(Room { owner, gpu, bytes, reply, .. }) = self.rooms.get_mut(&room) else { return };
        let Some(reply) = reply.take() else { return };
        let _ = reply.send(Ok(())); // fails if the room's task has ended
        info!(name: "room-made", uid = owner.uid, pid = owner.pid, gpu = model.label(*gpu), bytes, "{} are kept free for \
            {}", units::size(*bytes), owner.name);
    }

    /// Handles a room that the scheduler cannot make or keep.
    pub fn refused(&mut self, model: &Model, room: RoomId, gpu: GpuId, why: RoomObstacle) {
        let Some(entry) = self.rooms.remove(&room) else { return };
        match entry.reply {
            Some(reply) => drop(reply.send(Err(refusal(model, gpu, why)))),
            None => entry.ended.notify_one(),
        }
    }

    /// Handles a room whose time is over, or whose GPU is gone.
    pub fn ended(&mut self, model: &Model, room: RoomId, gpu: GpuId) {
        let Some(Room { owner, ended, .. }) = self.rooms.remove(&room) else { return };
        ended.notify_one();
        info!(name: "room-closed", uid = owner.uid, pid = owner.pid, gpu = model.label(gpu), "stopped keeping memory \
            free for {}: its room has ended", owner.name);
    }

    /// The caller that owns each room.
    pub fn owners(&self) -> BTreeMap<RoomId, Arc<Identity>> {
        self.rooms.iter().map(|(room, entry)| (*room, entry.owner.clone())).collect()
    }
}

/// The error for a refused room: the reason, and a remedy for the caller.
fn refusal(model: &Model, gpu: GpuId, why: RoomObstacle) -> fdo::Error {
    let entry = model.gpus.get(&gpu);
    let name = entry.map_or_else(|| gpu.0.to_string(), |entry| gpu_name(gpu, entry.kind, entry.index));
    match why {
        RoomObstacle::TooLarge { most } => fdo::Error::InvalidArgs(format!(
            "{name} has at most {} for a room. Other programs, other rooms and reserves take the rest.",
            units::size(most)
        )),
        RoomObstacle::Unevictable { bytes } => fdo::Error::Failed(format!(
            "cannot evict {} from {name} to make the room: {}",
            units::size(bytes),
            in_the_way(model, gpu)
        )),
        RoomObstacle::Late => {
            fdo::Error::Failed(format!("cannot make the room on {name} in time: {}", in_the_way(model, gpu)))
        }
        RoomObstacle::Gone => fdo::Error::Failed(format!("{name} is gone")),
    }
}

/// Names the programs whose memory cannot be evicted from a GPU, with the reasons.
fn in_the_way(model: &Model, gpu: GpuId) -> String {
    let mut all: Vec<(u64, String)> = Vec::new();
    for view in model.machine.clients() {
        let Some(attachment) = view.attachments.iter().find(|attachment| attachment.gpu == gpu) else { continue };
        let (bytes, what) = match (attachment.eviction_blocked, attachment.state) {
            (Some(why), _) => (attachment.mapped, bus::eviction_block_name(why).to_owned()),
            (None, LockState::Revoking | LockState::Stuck) => {
                (attachment.mapped, "its work has not ended yet".to_owned())
            }
            (None, _) if attachment.pinned > 0 => {
                (attachment.pinned, format!("{} of its memory is pinned", units::size(attachment.pinned)))
            }
            (None, _) if attachment.charge > attachment.allowance => {
                (attachment.charge - attachment.allowance, "its memory is still being evicted".to_owned())
            }
            (None, _) => continue,
        };
        all.push((
            bytes,
            format!("{}: {what}", client_name(view.client, model.identity(view.client).map(|identity| &**identity))),
        ));
    }
    all.sort_by(|a, b| b.cmp(a));
    let text: Vec<String> = all.into_iter().take(NAMED).map(|(_, text)| text).collect();
    match text.is_empty() {
        true => "no program prevents this now. Try again, or end programs that use the GPU".into(),
        false => text.join("; "),
    }
}
