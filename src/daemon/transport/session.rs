//! The protocol state of one connection: its slots, and values sent in several messages. Decodes
//! packets into [`ClientAction`]s, rejects packets that violate the protocol, and turns the scheduler's
//! commands into messages. This module does no I/O.

use std::time::Duration;

use nvshare_wire::client::{CheckpointStep, EngineReason, GpuKind, LeaveAnswer, SleepRefusal};
use nvshare_wire::env_limits::{self, LimitName};
use nvshare_wire::visible_devices::Chooser;
use nvshare_wire::{ClientMessage, Counts, MAX_SLOTS, Moves, SchedulerMessage, SlotSet, WireError, scheduler as wire};

use crate::config::rules::variable;
use crate::scheduler::{ClientId, Command, Denial, Event, GpuId, GpuSet, MemoryReport, Move, SleepObstacle};

/// Larger sizes are rejected: no GPU has that much memory, and sums of such sizes could overflow.
const MAX_BYTES: u64 = 1 << 50;
/// Maximum length of a list of GPUs in bytes. The list has room for every GPU that a client can attach,
/// each with its full UUID.
const MAX_CHOICE: usize = MAX_SLOTS as usize * 64;

/// A violation of the protocol. The client is then disconnected. Other clients are not affected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the first message is not Hello")]
    NotHello,
    #[error("a second Hello")]
    SecondHello,
    #[error("unexpected Held message")]
    Held,
    #[error("slot {slot} does not exist: the last slot is {}", MAX_SLOTS - 1)]
    Slot { slot: u32 },
    #[error("slot {slot} is attached already")]
    SlotTaken { slot: u32 },
    #[error("GPU {} is attached already, as slot {slot}", gpu.0)]
    GpuTaken { slot: u32, gpu: GpuId },
    #[error("slot {slot} is not attached")]
    NotAttached { slot: u32 },
    #[error("{message} without a GPU")]
    NoGpu { message: &'static str },
    #[error("{field} is too large: {bytes} bytes")]
    Bytes { field: &'static str, bytes: u64 },
    #[error("its tenant uses too many GPUs that NVML does not list")]
    TooManyGpus,
    #[error("it has not shown that it can open the device file of {gpu} for reading and writing")]
    Unproven { gpu: String },
    #[error("a list of GPUs of more than {MAX_CHOICE} bytes")]
    Choice,
    #[error("a value of {} with more than {} bytes", variable(*limit), env_limits::LONGEST)]
    EnvLimit { limit: LimitName },
    #[error("it does not read its messages")]
    Unread,
}

/// A client's managed memory on one GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Managed {
    /// All of the memory, wherever it is.
    pub bytes: u64,
    /// The part that is mapped.
    pub mapped: u64,
}

/// The action that the daemon takes in response to a packet.
#[derive(Debug, Clone, PartialEq)]
pub enum ClientAction {
    /// Pass the event to the scheduler.
    Event(Event),
    Attach {
        event: Event,
        slot: u32,
        gpu: GpuId,
        kind: GpuKind,
        total: u64,
        name: String,
        reason: EngineReason,
    },
    Memory {
        gpu: GpuId,
        report: MemoryReport,
        device_free: Option<u64>,
        /// Bytes of host memory that the client uses.
        host: u64,
        /// Bytes that the client has in a swap file.
        in_file: u64,
        managed: Managed,
        counts: Counts,
    },
    /// Decide which GPUs the client sees.
    RequestPlacement(PlacementQuery),
    /// Set a limit from the client's environment.
    EnvLimit {
        limit: LimitName,
        text: String,
    },
    /// Record that the client can use a swap file, and may use at most `ram_max` bytes of host memory.
    UseSwapFile {
        ram_max: u64,
    },
    /// Add the client to the gang of this name.
    JoinGang {
        gang: u64,
    },
    /// Handle a change that the client makes to another process's CUDA state.
    ForeignCheckpoint {
        step: CheckpointStep,
        ticket: u32,
    },
    /// Handle a client that leaves for hibernation, or refuses to.
    Leaving(LeaveAnswer),
    /// Do nothing: the value is still incomplete, or was already known.
    Incomplete,
    /// Handle a message about shared memory. `gpu`: the GPU that the message names, if any.
    SharedMemory {
        message: ClientMessage,
        gpu: Option<GpuId>,
    },
}

/// A client's request for the GPUs that it may see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementQuery {
    pub chooser: Chooser,
    /// The client's list of GPUs, if it has one.
    pub choice: String,
    /// Number of GPUs. 0 if the program does not specify it.
    pub count: u32,
    pub bytes: Option<u64>,
    /// Minor numbers of the device files that the client can open, as a bit mask. 0 if they are unknown.
    pub devices: u64,
    /// The GPUs are for a program that this process will execute or start.
    pub ahead: bool,
}

/// The protocol state of a welcomed client.
#[derive(Debug)]
pub struct Session {
    client: ClientId,
    pub version: u16,
    slots: Vec<Option<GpuId>>,
    /// The parts received so far of the client's list of GPUs.
    choice: String,
    /// The parts received so far of an environment limit.
    env_limit: Option<(LimitName, String)>,
    /// The connection was taken over from an earlier daemon. That daemon may have requested the client's
    /// state too.
    is_taken_over: bool,
    /// True while the client repeats its state, until it sends `Held`.
    repeats: bool,
}

/// Checks that fields of a message are at most [`MAX_BYTES`].
///
/// # Errors
/// [`Violation::Bytes`] with the first larger field.
fn check_bytes(fields: &[(&'static str, u64)]) -> Result<(), Violation> {
    match fields.iter().find(|(_, bytes)| *bytes > MAX_BYTES) {
        Some((field, bytes)) => Err(Violation::Bytes { field, bytes: *bytes }),
        None => Ok(()),
    }
}

impl Session {
    pub fn new(client: ClientId, version: u16) -> Self {
        Self {
            client,
            version,
            slots: Vec::new(),
            choice: String::new(),
            env_limit: None,
            is_taken_over: false,
            repeats: false,
        }
    }

    /// Allows the client to repeat its whole state. The client sends the state once for each daemon
    /// that requested it, including daemons that ended before reading it. Repeated state changes
    /// nothing, except for memory that has changed since the last report.
    pub fn taken_over(&mut self) {
        self.is_taken_over = true;
    }

    /// Decodes and validates one packet.
    ///
    /// # Errors
    /// The packet violates the protocol.
    pub fn receive(&mut self, packet: &[u8]) -> Result<ClientAction, Violation> {
        let client = self.client;
        Ok(match ClientMessage::decode(packet, self.version)? {
            ClientMessage::Hello { .. } if self.is_taken_over => {
                self.repeats = true;
                ClientAction::Incomplete
            }
            ClientMessage::Held { .. } if self.repeats => {
                self.repeats = false;
                ClientAction::Incomplete
            }
            ClientMessage::Hello { .. } => return Err(Violation::SecondHello),
            ClientMessage::Held { .. } => return Err(Violation::Held),
            ClientMessage::Attach { slot, uuid, .. } if self.repeats && self.gpu(slot) == Ok(GpuId(uuid)) => {
                ClientAction::Incomplete
            }
            ClientMessage::Attach { slot, uuid, kind, engine, total, name, reason } => {
                let gpu = GpuId(uuid);
                if total == 0 || total > MAX_BYTES {
                    return Err(Violation::Bytes { field: "total", bytes: total });
                }
                self.attach(slot, gpu)?;
                let event = Event::Attached { client, gpu, engine };
                ClientAction::Attach { event, slot, gpu, kind, total, name: name.as_str().to_owned(), reason }
            }
            ClientMessage::Detach { slot } => {
                let gpu = self.gpu(slot)?;
                if let Some(gpu) = self.slots.get_mut(slot as usize) {
                    *gpu = None;
                }
                ClientAction::Event(Event::Detached { client, gpu })
            }
            ClientMessage::Memory {
                slot,
                ack,
                demand,
                mapped,
                swapped,
                pinned,
                device_free,
                limit_ack,
                host,
                counts,
                in_file,
                managed,
                managed_mapped,
            } => {
                let gpu = self.gpu(slot)?;
                check_bytes(&[
                    ("demand", demand),
                    ("mapped", mapped),
                    ("swapped", swapped),
                    ("pinned", pinned),
                    ("host", host),
                    ("in_file", in_file),
                    ("managed", managed),
                ])?;
                // Pinned bytes are part of the mapped bytes.
                let report = MemoryReport { ack, demand, mapped, swapped, pinned: pinned.min(mapped), limit_ack };
                // Swapped bytes are either in a file or in host memory.
                let in_file = in_file.min(swapped);
                let host = host.max(swapped - in_file);
                let managed = Managed { bytes: managed, mapped: managed_mapped.min(managed) };
                let device_free = (device_free != u64::MAX).then_some(device_free);
                ClientAction::Memory { gpu, report, device_free, host, in_file, managed, counts }
            }
            ClientMessage::RequestLimit { slot, bytes } => {
                ClientAction::Event(Event::LimitRequested { client, gpu: self.gpu(slot)?, bytes })
            }
            ClientMessage::Utilization { slot, permille } => {
                ClientAction::Event(Event::Utilization { client, gpu: self.gpu(slot)?, permille })
            }
            ClientMessage::Reserve { slot, bytes } => {
                ClientAction::Event(Event::ReservationRequested { client, gpu: self.gpu(slot)?, bytes })
            }
            ClientMessage::Request { gpus } => {
                ClientAction::Event(Event::Requested { client, gpus: self.gpus(gpus, "Request")? })
            }
            ClientMessage::Cancel { gpus } => {
                ClientAction::Event(Event::Cancelled { client, gpus: self.gpus(gpus, "Cancel")? })
            }
            ClientMessage::Release { gpus, reason, busy_us } => {
                let gpus = self.gpus(gpus, "Release")?;
                ClientAction::Event(Event::Released { client, gpus, reason, busy: Duration::from_micros(busy_us) })
            }
            ClientMessage::Stuck { gpus, reason } => {
                ClientAction::Event(Event::Stuck { client, gpus: self.gpus(gpus, "Stuck")?, reason })
            }
            ClientMessage::VisibleDevices { text } => {
                self.choice.push_str(text.as_str());
                if self.choice.len() > MAX_CHOICE {
                    return Err(Violation::Choice);
                }
                ClientAction::Incomplete
            }
            ClientMessage::RequestPlacement { chooser, count, bytes, devices, ahead } => {
                check_bytes(&[("bytes", bytes)])?;
                let (choice, bytes) = (std::mem::take(&mut self.choice), Some(bytes).filter(|bytes| *bytes > 0));
                ClientAction::RequestPlacement(PlacementQuery {
                    chooser,
                    choice,
                    count,
                    bytes,
                    devices,
                    ahead: ahead != 0,
                })
            }
            ClientMessage::EnvLimit { limit, more, text: part } => {
                let before = self.env_limit.take().filter(|(other, _)| *other == limit);
                let mut text = before.map(|(_, text)| text).unwrap_or_default();
                text.push_str(part.as_str());
                if text.len() > env_limits::LONGEST {
                    return Err(Violation::EnvLimit { limit });
                }
                if more == 0 {
                    return Ok(ClientAction::EnvLimit { limit, text });
                }
                self.env_limit = Some((limit, text));
                ClientAction::Incomplete
            }
            ClientMessage::JoinGang { gang } => ClientAction::JoinGang { gang },
            ClientMessage::UseSwapFile { ram_max } => ClientAction::UseSwapFile { ram_max },
            ClientMessage::ForeignCheckpoint { step, ticket } => ClientAction::ForeignCheckpoint { step, ticket },
            ClientMessage::SleepReady {} => ClientAction::Event(Event::SleepReady { client }),
            ClientMessage::SleepRefused { why } => {
                ClientAction::Event(Event::SleepRefused { client, why: obstacle(why) })
            }
            ClientMessage::Leaving { answer } => ClientAction::Leaving(answer),
            ClientMessage::Wake {} => ClientAction::Event(Event::WakeRequested { client }),
            message @ (ClientMessage::Exported { slot, bytes, .. } | ClientMessage::Imported { slot, bytes, .. }) => {
                check_bytes(&[("bytes", bytes)])?;
                ClientAction::SharedMemory { message, gpu: self.slots.get(slot as usize).copied().flatten() }
            }
            message @ (ClientMessage::Exporter { .. }
            | ClientMessage::Open { .. }
            | ClientMessage::Withdrawn { .. }
            | ClientMessage::Adopted { .. }
            | ClientMessage::Closed { .. }) => ClientAction::SharedMemory { message, gpu: None },
        })
    }

    /// The slot of a GPU in messages to the client. `None` if the GPU is not attached.
    pub fn slot(&self, gpu: GpuId) -> Option<u32> {
        self.slots.iter().position(|slot| *slot == Some(gpu)).map(|slot| slot as u32)
    }

    /// The slots of those GPUs in `gpus` that are still attached.
    pub fn slots(&self, gpus: &GpuSet) -> SlotSet {
        gpus.iter().filter_map(|gpu| self.slot(*gpu)).fold(0, |set, slot| set | 1 << slot)
    }

    /// Assigns the slot of GPU `from` to GPU `to`.
    pub fn moved(&mut self, from: GpuId, to: GpuId) {
        self.slots.iter_mut().filter(|slot| **slot == Some(from)).for_each(|slot| *slot = Some(to));
    }

    /// The GPUs attached to the slots in `set`.
    pub fn attached(&self, set: SlotSet) -> GpuSet {
        (0..MAX_SLOTS).filter(|slot| set & (1 << slot) != 0).filter_map(|slot| self.gpu(slot).ok()).collect()
    }

    /// The message that tells the client of a command. `None` if the command is for the daemon, or the
    /// client has no slot for the GPU any more.
    pub fn message(&self, command: &Command) -> Option<SchedulerMessage> {
        let slots_of = |gpus: &GpuSet| Some(self.slots(gpus)).filter(|slots| *slots != 0);
        Some(match command {
            Command::Attached { gpu, .. } => SchedulerMessage::Attached { slot: self.slot(*gpu)? },
            Command::Limit { gpu, bytes, seq, most, spare, max, .. } => {
                let (slot, max) = (self.slot(*gpu)?, max.unwrap_or(0));
                SchedulerMessage::Limit { slot, bytes: *bytes, seq: *seq, most: *most, spare: *spare, max }
            }
            Command::Reserved { gpu, bytes, .. } => {
                SchedulerMessage::Reserved { slot: self.slot(*gpu)?, bytes: *bytes }
            }
            Command::Denied { gpu, bytes, why, .. } => {
                let what = match why {
                    Denial::NoContext => wire::Denial::Context,
                    Denial::Unmappable => wire::Denial::Mapping,
                    _ => wire::Denial::Limit,
                };
                SchedulerMessage::Denied { slot: self.slot(*gpu)?, bytes: *bytes, what }
            }
            Command::Prepare { gpu, bytes, .. } => SchedulerMessage::Prepare { slot: self.slot(*gpu)?, bytes: *bytes },
            Command::Allowance { gpu, seq, bytes, .. } => {
                SchedulerMessage::Allowance { slot: self.slot(*gpu)?, seq: *seq, bytes: *bytes }
            }
            Command::Grant { gpus, .. } => SchedulerMessage::Grant { gpus: slots_of(gpus)? },
            Command::Revoke { gpus, .. } => SchedulerMessage::Revoke { gpus: slots_of(gpus)? },
            Command::Contended { gpus, waiters, grace, .. } => {
                let grace_us = u32::try_from(grace.as_micros()).unwrap_or(u32::MAX);
                SchedulerMessage::Contended { gpus: slots_of(gpus)?, waiters: *waiters, grace_us }
            }
            Command::Waiting { gpus, why, .. } => SchedulerMessage::Waiting { gpus: slots_of(gpus)?, why: *why },
            Command::PrepareSleep { paused, .. } => {
                SchedulerMessage::PrepareSleep { flags: if *paused { wire::PAUSED } else { 0 } }
            }
            Command::Awake { moved, .. } => {
                let moved = Moves::new(moved.iter().map(|Move { from, to }| (from.0, to.0))).unwrap_or_default();
                SchedulerMessage::Awake { moved }
            }
            Command::Probe { .. }
            | Command::Measure { .. }
            | Command::Placed { .. }
            | Command::Unplaced { .. }
            | Command::Checkpoint { .. }
            | Command::RestoreAllowed { .. }
            | Command::Migrated { .. }
            | Command::Moved { .. }
            | Command::RoomReady { .. }
            | Command::RoomRefused { .. }
            | Command::RoomEnded { .. }
            | Command::Undrainable { .. }
            | Command::EvictionBlocked { .. }
            | Command::MappingFailed { .. } => return None,
        })
    }

    fn attach(&mut self, slot: u32, gpu: GpuId) -> Result<(), Violation> {
        if slot >= MAX_SLOTS {
            return Err(Violation::Slot { slot });
        }
        if let Some(slot) = self.slot(gpu) {
            return Err(Violation::GpuTaken { slot, gpu });
        }
        let index = slot as usize;
        if self.slots.len() <= index {
            self.slots.resize(index + 1, None);
        }
        match self.slots.get_mut(index) {
            Some(free @ None) => *free = Some(gpu),
            _ => return Err(Violation::SlotTaken { slot }),
        }
        Ok(())
    }

    fn gpu(&self, slot: u32) -> Result<GpuId, Violation> {
        self.slots.get(slot as usize).copied().flatten().ok_or(Violation::NotAttached { slot })
    }

    fn gpus(&self, set: SlotSet, message: &'static str) -> Result<GpuSet, Violation> {
        if set == 0 {
            return Err(Violation::NoGpu { message });
        }
        (0..MAX_SLOTS).filter(|slot| set & (1 << slot) != 0).map(|slot| self.gpu(slot)).collect()
    }
}
fn obstacle(why: SleepRefusal) -> SleepObstacle {
    match why {
        SleepRefusal::Busy => SleepObstacle::Busy,
        SleepRefusal::Managed => SleepObstacle::Managed,
        SleepRefusal::Ipc => SleepObstacle::Ipc,
        SleepRefusal::Peers => SleepObstacle::Peers,
        SleepRefusal::Immovable => SleepObstacle::Immovable,
        SleepRefusal::Rdma => SleepObstacle::Rdma,
        SleepRefusal::UnseenWork => SleepObstacle::UnseenWork,
        SleepRefusal::Capture => SleepObstacle::Capture,
        SleepRefusal::Gang => SleepObstacle::Gang,
    }
}
