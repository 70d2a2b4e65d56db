//! Memory that one program lets another use: questions and answers between the two.

use std::os::fd::OwnedFd;
use std::time::Duration;

use nvshare_wire::client::Sharing;
use nvshare_wire::{ClientMessage, MAX_DESCRIPTORS, SchedulerMessage};

use super::Hub;
use crate::daemon::shared::Import;
use crate::scheduler::{ClientId, GpuId, Time};

/// Programs that ran under an earlier scheduler are back within this time, even if they lost two in a row: such a one waits
/// 2 s before it tries again.
const LATE_RETURN: Duration = Duration::from_secs(3);

impl Hub {
    pub(super) fn share(
        &mut self,
        client: ClientId,
        message: ClientMessage,
        gpu: Option<GpuId>,
        descriptors: &[OwnedFd],
        now: Time,
    ) {
        match message {
            ClientMessage::Exporter { key } => {
                let importers = self.shared.announce(client, key);
                importers.into_iter().for_each(|importer| self.report_all(importer));
            }
            ClientMessage::Open { ticket, exporter, secret, range, allocation, first } => {
                let clients = &self.clients;
                let may = |other| {
                    let [a, b] = [client, other].map(|id| clients.get(&id).map(|c| &*c.identity));
                    a.zip(b).is_some_and(|(a, b)| a.may_share_with(b))
                };
                match self.shared.ask(client, ticket, (exporter, range), may) {
                    Ok((exporter, ticket)) => {
                        self.send(exporter, SchedulerMessage::Export { ticket, secret, range, allocation, first });
                    }
                    // It may be on its way back from an earlier daemon.
                    Err(Sharing::Unknown) if now < self.started + LATE_RETURN => {
                        self.answer(client, ticket, Sharing::Busy);
                    }
                    Err(outcome) => self.answer(client, ticket, outcome),
                }
            }
            ClientMessage::Exported { ticket, outcome, slot: _, bytes, chunk } => {
                let Some(question) = self.shared.answer(client, ticket) else { return };
                let Some((importer, ticket)) = question.importer else { return };
                let (Sharing::Done, Some(gpu), 1..=MAX_DESCRIPTORS) = (outcome, gpu, descriptors.len()) else {
                    let outcome = if outcome == Sharing::Done { Sharing::Failed } else { outcome };
                    return self.answer(importer, ticket, outcome);
                };
                let Some(connection) = self.clients.get(&importer).map(|entry| entry.connection.clone()) else {
                    return;
                };
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                // First, so that what it has open is never uncounted.
                self.shared.pass(&question, gpu, bytes.min(total));
                if connection
                    .send_with(SchedulerMessage::Opened { ticket, outcome, bytes, chunk }, descriptors)
                    .is_err()
                {
                    self.answer(importer, ticket, Sharing::Failed);
                }
            }
            ClientMessage::Withdrawn { range } => {
                let adopter = self.shared.withdraw(client, range);
                self.have_adopted(adopter);
            }
            ClientMessage::Imported { slot: _, exporter, range, bytes, adopted } => {
                let Some(gpu) = gpu else { return };
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                let import = Import { importer: client, exporter, range };
                self.shared.claim(import, gpu, bytes.min(total), adopted != 0, now);
                self.report(client, gpu);
            }
            ClientMessage::Adopted { exporter, range } => {
                self.shared.adopted(Import { importer: client, exporter, range });
            }
            ClientMessage::Closed { exporter, range } => {
                let adopter = self.shared.close(Import { importer: client, exporter, range });
                self.have_adopted(adopter);
                self.report_all(client);
            }
            _ => {}
        }
    }

    pub(super) fn answer(&self, importer: ClientId, ticket: u32, outcome: Sharing) {
        self.send(importer, SchedulerMessage::Opened { ticket, outcome, bytes: 0, chunk: 0 });
    }

    /// Has importers count what nobody else counts any more.
    pub(super) fn have_adopted(&mut self, imports: impl IntoIterator<Item = Import>) {
        for Import { importer, exporter, range } in imports {
            self.report_all(importer);
            self.send(importer, SchedulerMessage::Adopt { exporter, range });
        }
    }

    fn report_all(&mut self, client: ClientId) {
        let gpus: Vec<GpuId> = self.clients.get(&client).map_or_else(Vec::new, |c| c.uses.keys().copied().collect());
        for gpu in gpus {
            self.report(client, gpu);
        }
    }
}
