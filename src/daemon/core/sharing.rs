//! Passes messages about shared memory between exporters and importers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::client::Sharing;
use nvshare_wire::{ClientMessage, MAX_DESCRIPTORS, SchedulerMessage, Secret};
use tracing::warn;

use super::shared_memory::Import;
use super::state::{Client, Core};
use crate::daemon::tenants::{Budget, What};
use crate::identity::Identity;
use crate::scheduler::{ClientId, GpuId, Time};
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

impl Core {
    pub(super) fn shared_memory_message(
        &mut self,
        client: ClientId,
        message: ClientMessage,
        gpu: Option<GpuId>,
        descriptors: &[Foreign],
        now: Time,
    ) {
        match message {
            ClientMessage::Exporter { key } => {
                let importers = self.shared_memory.announce(client, key);
                importers.into_iter().for_each(|importer| self.report_all_gpus(importer));
            }
            ClientMessage::Open { ticket, exporter, secret, range, allocation, first } => {
                let clients = &self.clients;
                let may = |other| {
                    let [a, b] = [client, other].map(|id| clients.get(&id).map(|c| &*c.identity));
                    a.zip(b).is_some_and(|(a, b)| a.may_share_with(b))
                };
                if self.budget(client).is_none_or(|budget| budget.left(What::Imports) == 0) {
                    self.log_over_budget(client, "has imported too much memory of other programs");
                    return self.send_open_result(client, ticket, Sharing::Failed);
                }
                match self.shared_memory.request(client, ticket, (exporter, range), may) {
                    Ok((exporter, ticket)) => {
                        self.send(exporter, SchedulerMessage::Export { ticket, secret, range, allocation, first });
                    }
                    // The exporter may be about to reconnect after a restart of the daemon, or its messages may be
                    // unread.
                    Err(Sharing::Unknown)
                        if now < self.started + LATE_RETURN || self.may_come(client, exporter, now) =>
                    {
                        self.send_open_result(client, ticket, Sharing::Busy);
                    }
                    Err(outcome) => self.send_open_result(client, ticket, outcome),
                }
            }
            ClientMessage::Exported { ticket, outcome, slot: _, bytes, chunk } => {
                let Some(request) = self.shared_memory.answer(client, ticket) else { return };
                let Some((importer, ticket)) = request.importer else { return };
                let (Sharing::Done, Some(gpu), 1..=MAX_DESCRIPTORS) = (outcome, gpu, descriptors.len()) else {
                    let outcome = if outcome == Sharing::Done { Sharing::Failed } else { outcome };
                    return self.send_open_result(importer, ticket, outcome);
                };
                let Some(connection) = self.clients.get(&importer).map(|entry| entry.connection.clone()) else {
                    return;
                };
                // Since the request, other clients of the tenant may have opened memory and used up the
                // tenant's budget.
                let Some(share) = connection.budget().take(What::Imports, 1) else {
                    return self.send_open_result(importer, ticket, Sharing::Failed);
                };
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                // Recorded before the memory is sent, so that the memory counts as soon as the importer has it open.
                self.shared_memory.open(&request, gpu, bytes.min(total), share);
                if connection
                    .send_with(SchedulerMessage::Opened { ticket, outcome, bytes, chunk }, descriptors)
                    .is_err()
                {
                    self.send_open_result(importer, ticket, Sharing::Failed);
                }
            }
            ClientMessage::Withdrawn { range } => {
                let adopter = self.shared_memory.withdraw(client, range);
                self.ask_to_adopt(adopter);
            }
            ClientMessage::Imported { slot: _, exporter, range, bytes, adopted } => {
                let Some(gpu) = gpu else { return };
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                let import = Import { importer: client, exporter, range };
                // The previous daemon enforced the same budget, so this report is false.
                let Some(share) = self.budget(client).and_then(|budget| budget.take(What::Imports, 1)) else {
                    return self
                        .log_over_budget(client, "reports that it has imported too much memory of other programs");
                };
                self.shared_memory.restore(import, gpu, bytes.min(total), adopted != 0, now, share);
                self.report(client, gpu);
            }
            ClientMessage::Adopted { exporter, range } => {
                self.shared_memory.adopted(Import { importer: client, exporter, range });
                self.adoption_answered(client);
            }
            ClientMessage::Closed { exporter, range } => {
                let adopter = self.shared_memory.close(Import { importer: client, exporter, range });
                self.adoption_answered(client);
                self.ask_to_adopt(adopter);
                self.report_all_gpus(client);
            }
            _ => {}
        }
    }

    /// True if a requested exporter may still announce itself. An exporter may do so for
    /// `READ_TIME` after the importer first requested the exporter's memory.
    fn may_come(&mut self, importer: ClientId, exporter: Secret, now: Time) -> bool {
        let Some(entry) = self.clients.get_mut(&importer) else { return false };
        let asked = entry.asked_for.filter(|(key, _)| *key == exporter);
        let (_, since) = *entry.asked_for.insert(asked.unwrap_or((exporter, now)));
        now < since + READ_TIME
    }

    pub(super) fn budget(&self, client: ClientId) -> Option<Arc<Budget>> {
        Some(self.clients.get(&client)?.connection.budget().clone())
    }

    /// Logs that a client requests more than its tenant's budget allows.
    fn log_over_budget(&mut self, client: ClientId, what: &str) {
        let Some(identity) = self.clients.get(&client).map(|entry| entry.identity.clone()) else { return };
        let Identity { pid, uid, unit, name, tenant, .. } = &*identity;
        if self.log_limit.allows("over-budget", tenant) {
            warn!(name: "over-budget", client = client.0, pid, uid, unit, %tenant, "{name} {what}. Further imports by \
                {tenant} are refused");
        }
    }

    pub(super) fn send_open_result(&self, importer: ClientId, ticket: u32, outcome: Sharing) {
        self.send(importer, SchedulerMessage::Opened { ticket, outcome, bytes: 0, chunk: 0 });
    }

    /// Asks importers to adopt shared memory that no client counts any more.
    pub(super) fn ask_to_adopt(&mut self, imports: impl IntoIterator<Item = Import>) {
        let imports: Vec<Import> = imports.into_iter().collect();
        // An exporter can leave thousands of ranges, so each importer's memory is reported once, not once per
        // range.
        let importers: BTreeSet<ClientId> = imports.iter().map(|import| import.importer).collect();
        importers.into_iter().for_each(|importer| self.report_all_gpus(importer));
        for import in imports {
            if let Some(entry) = self.clients.get_mut(&import.importer) {
                entry.adoptions.waiting.push_back(import);
                self.ask_next(import.importer);
            }
        }
    }

    /// Sends a client requests to adopt memory until `MAX_ADOPTIONS` requests are unanswered.
    fn ask_next(&mut self, importer: ClientId) {
        let Some(Client { adoptions, connection, .. }) = self.clients.get_mut(&importer) else { return };
        while adoptions.asked < MAX_ADOPTIONS {
            let Some(import) = adoptions.waiting.pop_front() else { return };
            // The client may have closed the memory since the request was queued.
            if self.shared_memory.is_adopting(import) {
                adoptions.asked += 1;
                let Import { exporter, range, .. } = import;
                connection.send(SchedulerMessage::Adopt { exporter, range });
            }
        }
    }

    /// Handles a client's answer to a request to adopt memory.
    fn adoption_answered(&mut self, importer: ClientId) {
        if let Some(entry) = self.clients.get_mut(&importer) {
            entry.adoptions.asked = entry.adoptions.asked.saturating_sub(1);
        }
        self.ask_next(importer);
    }

    fn report_all_gpus(&mut self, client: ClientId) {
        let gpus: Vec<GpuId> = self.clients.get(&client).map_or_else(Vec::new, |c| c.gpus.keys().copied().collect());
        for gpu in gpus {
            self.report(client, gpu);
        }
    }
}
