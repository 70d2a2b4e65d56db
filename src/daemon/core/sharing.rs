//! Passes messages about shared memory between exporters and importers.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_wire::client::Sharing as OpenOutcome;
use nvshare_wire::{ClientMessage, MAX_DESCRIPTORS, SchedulerMessage, Secret};

use super::model::Model;
use super::shared_memory::{Import, OpenRequest, SharedMemoryRegistry};
use crate::daemon::tenants::What;
use crate::scheduler::{ClientId, GpuId, Time};
use crate::sys::clock;
use crate::sys::foreign::Foreign;

/// Maximum number of unanswered requests to adopt memory, per client. An exporter can leave
/// thousands of ranges. Requests for all ranges at the same time would overflow the client's
/// socket.
const MAX_ADOPTIONS: usize = 64;

/// The daemon reads an exporter's messages within this time, even if other clients of its tenant send
/// at their limit. Messages from different clients may be read in another order than they were sent.
const READ_TIME: Duration = Duration::from_millis(500);

/// Programs of an earlier daemon reconnect within this time, even if they lost two daemons in a row. A
/// program retries after 2 s.
const LATE_RETURN: Duration = Duration::from_secs(3);

/// The memory that programs share, and the messages about it that clients have not answered.
#[derive(Debug)]
pub struct Sharing {
    registry: SharedMemoryRegistry,
    adoptions: BTreeMap<ClientId, Adoptions>,
    /// The unknown exporter whose memory a client requested last, and the time of the first such request.
    asked_for: BTreeMap<ClientId, (Secret, Time)>,
    /// The range that a client is about to request again, because it was off the GPU.
    awaited: BTreeMap<ClientId, (Secret, u32)>,
    /// Ranges that processes had open when they disconnected, and the numbers of these processes. A
    /// process that continues without a connection still has the memory mapped.
    kept_open: BTreeMap<(Secret, u32), u32>,
}

/// Memory that the daemon asks a client to adopt.
#[derive(Debug, Default)]
struct Adoptions {
    /// Memory that the client has not been asked to adopt yet.
    waiting: VecDeque<Import>,
    /// Number of requests to adopt memory that the client has not answered.
    asked: usize,
}

/// The results of a message that concern other parts.
#[derive(Debug, Default)]
pub struct Shared {
    /// The attachments whose memory the scheduler must be told again, because other memory counts for them
    /// now.
    pub changed: BTreeSet<(ClientId, GpuId)>,
    /// The client exceeded its tenant's budget: completes a log line that begins with the client's name.
    pub excess: Option<&'static str>,
}

impl Default for Sharing {
    fn default() -> Self {
        let registry = SharedMemoryRegistry::new(clock::now());
        let (adoptions, asked_for, awaited, kept_open) = Default::default();
        Self { registry, adoptions, asked_for, awaited, kept_open }
    }
}

impl Sharing {
    /// Bytes on the GPU that count for this client, but that its own reports do not include yet.
    pub fn uncounted(&self, client: ClientId, gpu: GpuId) -> u64 {
        self.registry.uncounted(client, gpu)
    }

    /// Bytes on the GPU that count for this client, but that another program allocated.
    pub fn adopted_by(&self, client: ClientId, gpu: GpuId) -> u64 {
        self.registry.adopted_by(client, gpu)
    }

    /// Handles a client's report, which includes the memory that it adopted before.
    pub fn reported(&mut self, client: ClientId, gpu: GpuId) {
        self.registry.reported(client, gpu);
    }

    /// Handles a client's message. `gpu`: the GPU that the message names, if any.
    pub fn receive(
        &mut self,
        model: &Model,
        client: ClientId,
        message: ClientMessage,
        gpu: Option<GpuId>,
        descriptors: &[Foreign],
        now: Time,
    ) -> Shared {
        let mut shared = Shared::default();
        match message {
            ClientMessage::Exporter { key } => {
                let importers = self.registry.announce(client, key);
                importers.into_iter().for_each(|importer| shared.changed.extend(attachments(model, importer)));
            }
            ClientMessage::Open { ticket, exporter, secret, range, allocation, first } => {
                if model.budget(client).is_none_or(|budget| budget.left(What::Imports) == 0) {
                    shared.excess = Some("has imported too much memory of other programs");
                    send_open_result(model, client, ticket, OpenOutcome::Failed);
                    return shared;
                }
                let may = |other| {
                    let identities = model.identity(client).zip(model.identity(other));
                    identities.is_some_and(|(a, b)| a.may_share_with(b))
                };
                match self.registry.request(client, ticket, (exporter, range), may) {
                    Ok((exporter, ticket)) => {
                        model.send(exporter, SchedulerMessage::Export { ticket, secret, range, allocation, first });
                    }
                    // The exporter may be about to reconnect after a restart of the daemon, or its messages may be
                    // unread.
                    Err(OpenOutcome::Unknown)
                        if now < model.started + LATE_RETURN || self.may_come(client, exporter, now) =>
                    {
                        send_open_result(model, client, ticket, OpenOutcome::Busy);
                    }
                    Err(outcome) => send_open_result(model, client, ticket, outcome),
                }
            }
            ClientMessage::Exported { ticket, outcome, slot: _, bytes, chunk } => {
                self.exported(model, client, (ticket, outcome, bytes, chunk), gpu, descriptors);
            }
            ClientMessage::Withdrawn { range } => {
                if let Some(secret) = self.registry.sole_secret(client) {
                    self.kept_open.remove(&(secret, range));
                }
                let adopter = self.registry.withdraw(client, range);
                shared.changed = self.ask_to_adopt(model, adopter);
            }
            ClientMessage::Imported { slot: _, exporter, range, bytes, adopted } => {
                let Some(gpu) = gpu else { return shared };
                let import = Import { importer: client, exporter, range };
                // The previous daemon enforced the same budget, so a report beyond it is false.
                let Some(share) = model.budget(client).and_then(|budget| budget.take(What::Imports, 1)) else {
                    shared.excess = Some("reports that it has imported too much memory of other programs");
                    return shared;
                };
                self.registry.restore(import, gpu, bytes.min(model.total(gpu)), adopted != 0, now, share);
                shared.changed.insert((client, gpu));
            }
            ClientMessage::Adopted { exporter, range } => {
                self.registry.adopted(Import { importer: client, exporter, range });
                self.adoption_answered(model, client);
            }
            ClientMessage::Closed { exporter, range } => {
                let import = Import { importer: client, exporter, range };
                let adopter = self.registry.close(import);
                if self.awaited.get(&client) == Some(&(exporter, range)) {
                    self.awaited.remove(&client);
                }
                self.tell_unused(model, (exporter, range));
                self.adoption_answered(model, client);
                shared.changed = self.ask_to_adopt(model, adopter);
                shared.changed.extend(attachments(model, client));
            }
            _ => {}
        }
        shared
    }

    /// Passes an exporter's answer on to the importer: the ticket, the outcome, and the memory's bytes and
    /// chunk.
    fn exported(
        &mut self,
        model: &Model,
        client: ClientId,
        (ticket, outcome, bytes, chunk): (u64, OpenOutcome, u64, u64),
        gpu: Option<GpuId>,
        descriptors: &[Foreign],
    ) {
        let Some(request) = self.registry.answer(client, ticket) else { return };
        self.pass_on(model, &request, (outcome, bytes, chunk), gpu, descriptors);
        // If the memory is not open now, the exporter has prepared it in vain.
        self.tell_unused(model, (request.key, request.range));
    }

    fn pass_on(
        &mut self,
        model: &Model,
        request: &OpenRequest,
        (outcome, bytes, chunk): (OpenOutcome, u64, u64),
        gpu: Option<GpuId>,
        descriptors: &[Foreign],
    ) {
        let Some((importer, ticket)) = request.importer else { return };
        let range = (request.key, request.range);
        let before = match outcome {
            OpenOutcome::Busy => self.awaited.insert(importer, range),
            _ => self.awaited.remove(&importer),
        };
        if let Some(other) = before.filter(|before| *before != range) {
            self.tell_unused(model, other);
        }
        let (OpenOutcome::Done, Some(gpu), 1..=MAX_DESCRIPTORS) = (outcome, gpu, descriptors.len()) else {
            let outcome = if outcome == OpenOutcome::Done { OpenOutcome::Failed } else { outcome };
            return send_open_result(model, importer, ticket, outcome);
        };
        let Some(connection) = model.clients.get(&importer).map(|entry| &entry.connection) else { return };
        // Since the request, other clients of the tenant may have opened memory and used up the
        // tenant's budget.
        let Some(share) = connection.budget().take(What::Imports, 1) else {
            return send_open_result(model, importer, ticket, OpenOutcome::Failed);
        };
        // Recorded before the memory is sent, so that the memory counts as soon as the importer has it open.
        self.registry.open(request, gpu, bytes.min(model.total(gpu)), share);
        if connection.send_with(SchedulerMessage::Opened { ticket, outcome, bytes, chunk }, descriptors).is_err() {
            send_open_result(model, importer, ticket, OpenOutcome::Failed);
        }
    }

    /// Tells the exporter of a range if no client has it open or requests it.
    fn tell_unused(&self, model: &Model, range: (Secret, u32)) {
        if self.kept_open.contains_key(&range) || self.awaited.values().any(|awaited| *awaited == range) {
            return;
        }
        for exporter in self.registry.exporters_of_unused(range) {
            model.send(exporter, SchedulerMessage::Unused { range: range.1 });
        }
    }

    /// Notes that a client disconnects. Returns the ranges that it has open or is about to open. They
    /// stay open until its process has ended, or until they are freed.
    pub fn keep_open(&mut self, client: ClientId) -> Vec<(Secret, u32)> {
        let ranges = self.registry.opened_by(client).into_iter().chain(self.awaited.get(&client).copied());
        let ranges: Vec<_> = ranges.collect();
        for range in &ranges {
            let processes = self.kept_open.entry(*range).or_default();
            *processes = processes.saturating_add(1);
        }
        ranges
    }

    /// Handles the end of a process that had these ranges open when it disconnected.
    pub fn importer_ended(&mut self, model: &Model, ranges: Vec<(Secret, u32)>) {
        for range in ranges {
            if let Entry::Occupied(mut processes) = self.kept_open.entry(range) {
                *processes.get_mut() -= 1;
                if *processes.get() == 0 {
                    processes.remove();
                }
            }
            self.tell_unused(model, range);
        }
    }

    /// True if a requested exporter may still announce itself. An exporter may do so for
    /// `READ_TIME` after the importer first requested the exporter's memory.
    fn may_come(&mut self, importer: ClientId, exporter: Secret, now: Time) -> bool {
        let (key, since) = self.asked_for.entry(importer).or_insert((exporter, now));
        if *key != exporter {
            (*key, *since) = (exporter, now);
        }
        now < *since + READ_TIME
    }

    /// Asks importers to adopt shared memory that no client counts any more. Returns the importers'
    /// attachments. An exporter can leave thousands of ranges, so each attachment is returned once.
    fn ask_to_adopt(
        &mut self,
        model: &Model,
        imports: impl IntoIterator<Item = Import>,
    ) -> BTreeSet<(ClientId, GpuId)> {
        let mut importers = BTreeSet::new();
        for import in imports.into_iter().filter(|import| model.clients.contains_key(&import.importer)) {
            self.adoptions.entry(import.importer).or_default().waiting.push_back(import);
            self.ask_next(model, import.importer);
            importers.insert(import.importer);
        }
        importers.into_iter().flat_map(|importer| attachments(model, importer)).collect()
    }

    /// Sends a client requests to adopt memory until `MAX_ADOPTIONS` requests are unanswered.
    fn ask_next(&mut self, model: &Model, importer: ClientId) {
        let Some(adoptions) = self.adoptions.get_mut(&importer) else { return };
        while adoptions.asked < MAX_ADOPTIONS {
            let Some(import) = adoptions.waiting.pop_front() else { return };
            // The client may have closed the memory since the request was queued.
            if self.registry.is_adopting(import) {
                adoptions.asked += 1;
                let Import { exporter, range, .. } = import;
                model.send(importer, SchedulerMessage::Adopt { exporter, range });
            }
        }
    }

    /// Handles a client's answer to a request to adopt memory.
    fn adoption_answered(&mut self, model: &Model, importer: ClientId) {
        if let Some(adoptions) = self.adoptions.get_mut(&importer) {
            adoptions.asked = adoptions.asked.saturating_sub(1);
        }
        self.ask_next(model, importer);
    }

    /// Asks for the adoption of a client's imports whose exporters have not reconnected in time. Returns the
    /// adopters' attachments.
    pub fn overdue(&mut self, model: &Model, client: ClientId, now: Time) -> BTreeSet<(ClientId, GpuId)> {
        let overdue = self.registry.overdue(client, now);
        self.ask_to_adopt(model, overdue)
    }

    /// Handles the end of a client. Returns the attachments of the clients that adopt its memory.
    pub fn leave(&mut self, model: &Model, client: ClientId) -> BTreeSet<(ClientId, GpuId)> {
        self.adoptions.remove(&client);
        self.asked_for.remove(&client);
        self.awaited.remove(&client);
        if let Some(secret) = self.registry.sole_secret(client) {
            self.kept_open.retain(|(exporter, _), _| *exporter != secret);
        }
        let (adopters, unanswered) = self.registry.leave(client);
        let changed = self.ask_to_adopt(model, adopters);
        for (importer, ticket) in unanswered.into_iter().filter_map(|request| request.importer) {
            send_open_result(model, importer, ticket, OpenOutcome::Unknown);
        }
        changed
    }
}

fn attachments(model: &Model, client: ClientId) -> impl Iterator<Item = (ClientId, GpuId)> {
    model.gpus_of(client).into_iter().map(move |gpu| (client, gpu))
}

fn send_open_result(model: &Model, importer: ClientId, ticket: u32, outcome: OpenOutcome) {
    model.send(importer, SchedulerMessage::Opened { ticket, outcome, bytes: 0, chunk: 0 });
}
