//! Replays a recording. Collects the grants and releases of locks, the moves of memory, and how
//! long clients waited for GPUs and held them. Checks that the machine returns the same commands
//! for the same events.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Entry;
use super::movement::{Direction, Movement};
use crate::scheduler::{ClientId, Command, Event, GpuId, GpuSet, Machine, ReleaseReason, TenantId, Time};

#[derive(Debug)]
pub struct Replay {
    pub entries: usize,
    /// The times of the first and the last entry.
    pub span: Option<(Time, Time)>,
    pub difference: Option<Difference>,
    pub moments: Vec<Moment>,
    /// The waits and turns in progress at the end of the recording.
    pub unfinished: Vec<Moment>,
    pub clients: Tallies,
    /// The tenants of all clients in the recording.
    pub tenants: BTreeMap<ClientId, TenantId>,
}

/// Figures by client and GPU.
pub type Tallies = BTreeMap<(ClientId, GpuId), Tally>;

/// The first entry whose commands differ from the recorded commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The index of the entry.
    pub at: usize,
    pub number: u64,
    pub event: Event,
    /// The index of the first differing command, and both versions of that command.
    pub command: usize,
    pub recorded: Option<Command>,
    pub replayed: Option<Command>,
}

/// Something that happened to a client on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    pub entry: u64,
    pub at: Time,
    pub client: ClientId,
    pub gpu: GpuId,
    pub what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The client was granted the GPU after waiting for this time.
    Granted(Duration),
    Revoked,
    /// The client released the GPU after holding it for this time.
    Released(ReleaseReason, Duration),
    /// The bytes that the client must move to the host.
    Evicted(u64),
    /// Evicted bytes, and the duration of the eviction.
    MemoryLeft(u64, Duration),
    /// Restored bytes, and the duration of the restore.
    MemoryReturned(u64, Duration),
    /// The size of a refused allocation, in bytes.
    Denied(u64),
    /// The client detached or ended, after waiting for the GPU or holding it for these times.
    Left {
        waited: Option<Duration>,
        held: Option<Duration>,
    },
}

/// The figures of a client on one GPU, within the recording.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub waited: Duration,
    pub longest_wait: Duration,
    pub held: Duration,
    pub grants: u64,
    pub revokes: u64,
    pub releases: u64,
    pub failed_mappings: u64,
    pub evictions: u64,
    pub evicted: u64,
    pub denials: u64,
}

/// Replays all events, and collects figures from the recorded commands.
pub fn replay<E>(mut machine: Machine, entries: impl IntoIterator<Item = Result<Entry, E>>) -> Result<Replay, E> {
    let (mut observer, mut difference) = (Observer::new(&machine), None);
    let mut tenants = machine.tenants();
    let (mut count, mut span) = (0, None);
    for (at, entry) in entries.into_iter().enumerate() {
        let entry = entry?;
        let (first, _) = *span.get_or_insert((entry.at, entry.at));
        span = Some((first, entry.at));
        if count == 0 {
            observer.begin(entry.at);
        }
        observer.observe(&entry);
        if let Event::Connected { client, tenant, .. } = entry.event {
            tenants.insert(client, tenant);
        }
        if difference.is_none() {
            let commands = machine.handle(entry.at, entry.event.clone());
            difference = differs(at, &entry, &commands);
        }
        count += 1;
    }
    let (moments, unfinished, clients) = observer.end(span.map_or(Time::ZERO, |(_, last)| last));
    Ok(Replay { entries: count, span, difference, moments, unfinished, clients, tenants })
}

fn differs(at: usize, entry: &Entry, replayed: &[Command]) -> Option<Difference> {
    let longest = entry.commands.len().max(replayed.len());
    let command = (0..longest).find(|place| entry.commands.get(*place) != replayed.get(*place))?;
    Some(Difference {
        at,
        number: entry.number,
        event: entry.event.clone(),
        command,
        recorded: entry.commands.get(command).cloned(),
        replayed: replayed.get(command).cloned(),
    })
}

/// Infers moments and figures from the recorded events and commands.
#[derive(Debug)]
pub(super) struct Observer {
    attachments: BTreeMap<(ClientId, GpuId), Attachment>,
    tallies: Tallies,
    moments: Vec<Moment>,
}

#[derive(Debug, Default)]
struct Attachment {
    waits_since: Option<Time>,
    holds_since: Option<Time>,
    memory: Movement,
    /// The index of the newest moment at which memory moved.
    moved: usize,
}

impl Observer {
    pub(super) fn new(machine: &Machine) -> Self {
        let mut attachments: BTreeMap<(ClientId, GpuId), Attachment> = BTreeMap::new();
        for client in machine.clients() {
            for attachment in client.attachments {
                let memory = Movement::new(attachment.allowance, attachment.mapped, attachment.swapped);
                attachments.insert((client.client, attachment.gpu), Attachment { memory, ..Attachment::default() });
            }
        }
        for gpu in machine.gpus() {
            for holder in gpu.holders {
                attachments.entry((holder.client, gpu.gpu)).or_default().holds_since = Some(Time::ZERO);
            }
            for waiter in gpu.waiters {
                attachments.entry((waiter.client, gpu.gpu)).or_default().waits_since = Some(Time::ZERO);
            }
        }
        Self {
            tallies: attachments.keys().map(|key| (*key, Tally::default())).collect(),
            attachments,
            moments: Vec::new(),
        }
    }

    /// Counts times from `at` on, including times of clients that already wait for a GPU or hold
    /// one.
    pub(super) fn begin(&mut self, at: Time) {
        for attachment in self.attachments.values_mut() {
            attachment.waits_since = attachment.waits_since.map(|_| at);
            attachment.holds_since = attachment.holds_since.map(|_| at);
            attachment.memory.begin(at);
        }
    }

    pub(super) fn observe(&mut self, entry: &Entry) {
        let at = entry.at;
        match &entry.event {
            Event::Requested { client, gpus } => self.each(*client, gpus, |attachment, _| {
                attachment.waits_since.get_or_insert(at);
                None
            }),
            Event::Cancelled { client, gpus } => self.each(*client, gpus, |attachment, tally| {
                attachment.stop_waiting(tally, at);
                None
            }),
            // An earlier scheduler granted these locks.
            Event::Held { client, gpus } => self.each(*client, gpus, |attachment, _| {
                attachment.holds_since.get_or_insert(at);
                None
            }),
            Event::Released { client, gpus, reason, .. } => {
                let what = |attachment: &mut Attachment, tally: &mut Tally| {
                    let held = attachment.stop_holding(tally, at)?;
                    tally.releases += 1;
                    tally.failed_mappings += u64::from(*reason == ReleaseReason::NoMemory);
                    Some(What::Released(*reason, held))
                };
                self.note(entry, *client, gpus, what);
            }
            Event::Memory { client, gpu, report } => {
                let attachment = self.attachments.entry((*client, *gpu)).or_default();
                if let Some((moved, continues)) = attachment.memory.report(at, report) {
                    let took = moved.until.saturating_sub(moved.since);
                    let what = match moved.direction {
                        Direction::ToHost => What::MemoryLeft(moved.bytes, took),
                        Direction::ToGpu => What::MemoryReturned(moved.bytes, took),
                    };
                    let moment = Moment { entry: entry.number, at, client: *client, gpu: *gpu, what };
                    match self.moments.get_mut(attachment.moved) {
                        Some(known) if continues => *known = moment,
                        _ => {
                            attachment.moved = self.moments.len();
                            self.moments.push(moment);
                        }
                    }
                }
            }
            Event::Detached { client, gpu } => {
                let moment = self.leave(*client, *gpu, entry.number, at);
                self.moments.extend(moment);
            }
            Event::Disconnected { client } => {
                let all =
                    (*client, GpuId(nvshare_wire::Uuid([0; 16])))..=(*client, GpuId(nvshare_wire::Uuid([255; 16])));
                let gpus: Vec<GpuId> = self.attachments.range(all).map(|((_, gpu), _)| *gpu).collect();
                for gpu in gpus {
                    let moment = self.leave(*client, gpu, entry.number, at);
                    self.moments.extend(moment);
                }
            }
            _ => {}
        }
        for command in &entry.commands {
            self.command(entry, command);
        }
    }

    fn command(&mut self, entry: &Entry, command: &Command) {
        let at = entry.at;
        match command {
            Command::Grant { client, gpus } => self.note(entry, *client, gpus, |attachment, tally| {
                let waited = attachment.stop_waiting(tally, at);
                attachment.holds_since.get_or_insert(at);
                attachment.memory.grant(at);
                tally.grants += 1;
                Some(What::Granted(waited))
            }),
            Command::Revoke { client, gpus } => self.note(entry, *client, gpus, |_, tally| {
                tally.revokes += 1;
                Some(What::Revoked)
            }),
            Command::Allowance { client, gpu, bytes, .. } => {
                self.note(entry, *client, &GpuSet::from([*gpu]), |attachment, tally| {
                    let leaves = attachment.memory.allow(at, *bytes);
                    (leaves > 0).then(|| {
                        tally.evictions += 1;
                        tally.evicted += leaves;
                        What::Evicted(leaves)
                    })
                });
            }
            Command::Denied { client, gpu, bytes, .. } => {
                self.note(entry, *client, &GpuSet::from([*gpu]), |_, tally| {
                    tally.denials += 1;
                    Some(What::Denied(*bytes))
                });
            }
            _ => {}
        }
    }

    fn each(&mut self, client: ClientId, gpus: &GpuSet, f: impl Fn(&mut Attachment, &mut Tally) -> Option<What>) {
        for gpu in gpus {
            let key = (client, *gpu);
            f(self.attachments.entry(key).or_default(), self.tallies.entry(key).or_default());
        }
    }

    fn note(
        &mut self,
        entry: &Entry,
        client: ClientId,
        gpus: &GpuSet,
        f: impl Fn(&mut Attachment, &mut Tally) -> Option<What>,
    ) {
        for gpu in gpus {
            let key = (client, *gpu);
            let what = f(self.attachments.entry(key).or_default(), self.tallies.entry(key).or_default());
            let moment = |what| Moment { entry: entry.number, at: entry.at, client, gpu: *gpu, what };
            self.moments.extend(what.map(moment));
        }
    }

    /// Handles a client's detach from a GPU. Returns `None` if the client neither waited for the
    /// GPU nor held it.
    fn leave(&mut self, client: ClientId, gpu: GpuId, entry: u64, at: Time) -> Option<Moment> {
        let mut attachment = self.attachments.remove(&(client, gpu))?;
        let tally = self.tallies.entry((client, gpu)).or_default();
        let waited = attachment.waits_since.map(|_| attachment.stop_waiting(tally, at));
        let held = attachment.stop_holding(tally, at);
        let what = What::Left { waited, held };
        (waited.is_some() || held.is_some()).then_some(Moment { entry, at, client, gpu, what })
    }

    /// Returns the moments since `from`, and then the waits and turns in progress, which last until
    /// `at`.
    pub(super) fn since(&self, from: Time, at: Time) -> (Vec<Moment>, Vec<Moment>) {
        let lasted = |since: Option<Time>| since.map(|since| at.saturating_sub(since));
        let unfinished = self.attachments.iter().filter_map(|((client, gpu), attachment)| {
            let (waited, held) = (lasted(attachment.waits_since), lasted(attachment.holds_since));
            let what = What::Left { waited, held };
            let moment = Moment { entry: 0, at, client: *client, gpu: *gpu, what };
            (waited.is_some() || held.is_some()).then_some(moment)
        });
        let recent = self.moments.iter().filter(|moment| moment.at >= from).copied().collect();
        (recent, unfinished.collect())
    }

    /// Forgets the moments before `from`, the oldest moments beyond `most`, and the figures of clients
    /// that have ended.
    pub(super) fn forget(&mut self, from: Time, most: usize) {
        let old = self.moments.iter().take_while(|moment| moment.at < from).count();
        let dropped = old.max(self.moments.len().saturating_sub(most));
        if dropped > 0 {
            self.moments.drain(..dropped);
            for attachment in self.attachments.values_mut() {
                // No moment has the index `usize::MAX`.
                attachment.moved = attachment.moved.checked_sub(dropped).unwrap_or(usize::MAX);
            }
        }
        self.tallies.retain(|key, _| self.attachments.contains_key(key));
    }

    /// The clients that are attached, and the clients of all moments.
    pub(super) fn clients(&self) -> BTreeSet<ClientId> {
        let attached = self.attachments.keys().map(|(client, _)| *client);
        attached.chain(self.moments.iter().map(|moment| moment.client)).collect()
    }

    /// Counts waits and turns in progress until `at`.
    fn end(mut self, at: Time) -> (Vec<Moment>, Vec<Moment>, Tallies) {
        let keys: Vec<(ClientId, GpuId)> = self.attachments.keys().copied().collect();
        let last = self.moments.iter().map(|moment| moment.entry).max().unwrap_or(0);
        let unfinished = keys.into_iter().filter_map(|(client, gpu)| self.leave(client, gpu, last, at)).collect();
        // The list has each move of memory at the position of its first report, but with the entry
        // of its last report.
        self.moments.sort_by_key(|moment| moment.entry);
        (self.moments, unfinished, self.tallies)
    }
}

impl Attachment {
    fn stop_waiting(&mut self, tally: &mut Tally, at: Time) -> Duration {
        let waited = self.waits_since.take().map_or(Duration::ZERO, |since| at.saturating_sub(since));
        tally.waited += waited;
        tally.longest_wait = tally.longest_wait.max(waited);
        waited
    }

    fn stop_holding(&mut self, tally: &mut Tally, at: Time) -> Option<Duration> {
        let held = at.saturating_sub(self.holds_since.take()?);
        tally.held += held;
        Some(held)
    }
}
