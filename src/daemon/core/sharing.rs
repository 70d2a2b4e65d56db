//! Messages about memory that programs share, passed between exporter and importer.

use std::os::fd::OwnedFd;
use std::time::Duration;

use nvshare_wire::client::Sharing;
use nvshare_wire::{ClientMessage, MAX_DESCRIPTORS, SchedulerMessage};

use super::shared_memory::Import;
use super::state::Core;
use crate::scheduler::{ClientId, GpuId, Time};

/// Programs that ran under an earlier scheduler are back within this time, even if they lost two in a row: such a one waits
/// 2 s before it tries again.
const LATE_RETURN: Duration = Duration::from_secs(3);

impl Core {
    pub(super) fn shared_memory_message(
        &mut self,
        client: ClientId,
        message: ClientMessage,
        gpu: Option<GpuId>,
        descriptors: &[OwnedFd],
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
                match self.shared_memory.request(client, ticket, (exporter, range), may) {
                    Ok((exporter, ticket)) => {
                        self.send(exporter, SchedulerMessage::Export { ticket, secret, range, allocation, first });
                    }
                    // It may be on its way back from an earlier daemon.
                    Err(Sharing::Unknown) if now < self.started + LATE_RETURN => {
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
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                // Before it is sent, so that open memory is always counted.
                self.shared_memory.open(&request, gpu, bytes.min(total));
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
                self.shared_memory.restore(import, gpu, bytes.min(total), adopted != 0, now);
                self.report(client, gpu);
            }
            ClientMessage::Adopted { exporter, range } => {
                self.shared_memory.adopted(Import { importer: client, exporter, range });
            }
            ClientMessage::Closed { exporter, range } => {
                let adopter = self.shared_memory.close(Import { importer: client, exporter, range });
                self.ask_to_adopt(adopter);
                self.report_all_gpus(client);
            }
            _ => {}
        }
    }

    pub(super) fn send_open_result(&self, importer: ClientId, ticket: u32, outcome: Sharing) {
        self.send(importer, SchedulerMessage::Opened { ticket, outcome, bytes: 0, chunk: 0 });
    }

    /// Has importers adopt shared memory that no other client counts any more.
    pub(super) fn ask_to_adopt(&mut self, imports: impl IntoIterator<Item = Import>) {
        for Import { importer, exporter, range } in imports {
            self.report_all_gpus(importer);
            self.send(importer, SchedulerMessage::Adopt { exporter, range });
        }
    }

    fn report_all_gpus(&mut self, client: ClientId) {
        let gpus: Vec<GpuId> = self.clients.get(&client).map_or_else(Vec::new, |c| c.gpus.keys().copied().collect());
        for gpu in gpus {
            self.report(client, gpu);
        }
    }
}
