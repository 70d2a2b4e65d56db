//! Memory that programs share (CUDA IPC): requests to open it, and the client whose report counts its bytes. No I/O.
//!
//! Descriptors and secrets only pass through the daemon. The registry records which client has which exported memory open.
//! Its bytes count with the exporter, among its pinned bytes. When the exporter frees the memory or ends, it stays on the GPU
//! for the clients that opened it, so one of them *adopts* it: from then on it is among that client's pinned bytes. Between
//! the exporter's last report of it and the adopter's first, the daemon adds it to the adopter's reports
//! ([`SharedMemoryRegistry::uncounted`]), so that it never counts as free.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_wire::Secret;
use nvshare_wire::client::Sharing;

use crate::scheduler::{ClientId, GpuId, Time};

/// Requests that one exporter can leave unanswered, for instance while it is stopped.
const MAX_PENDING: usize = 32;
/// After a restart of the daemon, exporters and importers reconnect in any order: an importer adopts memory if the exporter
/// has not reconnected within this time.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub struct SharedMemoryRegistry {
    /// The secrets under which clients export memory.
    exporters: BTreeMap<ClientId, Secret>,
    /// Requests that exporters have not answered, by the number sent to the exporter.
    requests: BTreeMap<u64, OpenRequest>,
    next_request: u64,
    imports: BTreeMap<Import, OpenMemory>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenRequest {
    /// The importer and its own number of the request; `None` if it is no longer interested.
    pub importer: Option<(ClientId, u32)>,
    exporter: ClientId,
    key: Secret,
    range: u32,
}

/// A range of an exporter's memory that a client has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    pub importer: ClientId,
    pub exporter: Secret,
    pub range: u32,
}

#[derive(Debug, Clone, Copy)]
struct OpenMemory {
    gpu: GpuId,
    bytes: u64,
    counted_by: CountedBy,
}

/// The client whose report has the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CountedBy {
    Exporter,
    /// None, since then: the exporter has not reconnected yet after a restart of the daemon.
    Missing(Time),
    /// None: the importer has been told to adopt it.
    Adopting,
    /// The importer, from its next report on.
    NextReport,
    Importer,
}

impl SharedMemoryRegistry {
    /// Requests are numbered from the current time on, so that answers to an earlier daemon's requests match none.
    pub fn new(now: Time) -> Self {
        Self { next_request: u64::try_from(now.as_nanos()).unwrap_or(0), ..Self::default() }
    }

    // ---- requests ------------------------------------------------------------------------------------------------

    /// A client exports memory under that secret. Returns the importers whose imports it counts from now on.
    pub fn announce(&mut self, client: ClientId, key: Secret) -> Vec<ClientId> {
        self.exporters.insert(client, key);
        let missing = |(import, open): &(&Import, &mut OpenMemory)| {
            import.exporter == key && matches!(open.counted_by, CountedBy::Missing(_))
        };
        let found = self.imports.iter_mut().filter(missing).map(|(import, open)| {
            open.counted_by = CountedBy::Exporter;
            import.importer
        });
        found.collect()
    }

    /// A client asks to open memory that a client which it `may` share with exports. Returns the exporter, and the number of
    /// the request.
    ///
    /// # Errors
    /// The answer to the importer, if there is no such exporter or it has too many requests pending.
    pub fn request(
        &mut self,
        importer: ClientId,
        ticket: u32,
        (key, range): (Secret, u32),
        may: impl Fn(ClientId) -> bool,
    ) -> Result<(ClientId, u64), Sharing> {
        for request in self.requests.values_mut() {
            request.importer = request.importer.filter(|(asker, _)| *asker != importer);
        }
        let named = self.exporters.iter().rev().filter(|(_, name)| **name == key);
        let exporter = named.map(|(client, _)| *client).find(|client| *client != importer && may(*client));
        let exporter = exporter.ok_or(Sharing::Unknown)?;
        if self.requests.values().filter(|q| q.exporter == exporter).count() >= MAX_PENDING {
            return Err(Sharing::Busy);
        }
        self.next_request += 1;
        let request = OpenRequest { importer: Some((importer, ticket)), exporter, key, range };
        self.requests.insert(self.next_request, request);
        Ok((exporter, self.next_request))
    }

    /// An exporter answers a request. `None` if there is no such request.
    pub fn answer(&mut self, exporter: ClientId, number: u64) -> Option<OpenRequest> {
        self.requests.get(&number).filter(|q| q.exporter == exporter)?;
        self.requests.remove(&number)
    }

    // ---- open memory ---------------------------------------------------------------------------------------------

    /// The importer has the memory open from now on.
    pub fn open(&mut self, request: &OpenRequest, gpu: GpuId, bytes: u64) {
        let Some((importer, _)) = request.importer else { return };
        let import = Import { importer, exporter: request.key, range: request.range };
        self.imports.entry(import).or_insert(OpenMemory { gpu, bytes, counted_by: CountedBy::Exporter });
    }

    /// A client of an earlier daemon says that it has memory open.
    pub fn restore(&mut self, import: Import, gpu: GpuId, bytes: u64, adopted: bool, now: Time) {
        let counted_by = match adopted {
            true => CountedBy::Importer,
            false if self.exporters.values().any(|key| *key == import.exporter) => CountedBy::Exporter,
            false => CountedBy::Missing(now),
        };
        self.imports.insert(import, OpenMemory { gpu, bytes, counted_by });
    }

    /// The exporter has freed the memory. Returns the importer that is to adopt it.
    pub fn withdraw(&mut self, client: ClientId, range: u32) -> Option<Import> {
        let key = *self.exporters.get(&client)?;
        self.orphan(key, range)
    }

    /// The importer has closed the memory, or withdrawn its request. Returns the importer that is to adopt it instead.
    pub fn close(&mut self, import: Import) -> Option<Import> {
        for request in self.requests.values_mut().filter(|q| (q.key, q.range) == (import.exporter, import.range)) {
            request.importer = request.importer.filter(|(asker, _)| *asker != import.importer);
        }
        let open = self.imports.remove(&import)?;
        (open.counted_by != CountedBy::Exporter).then(|| self.orphan(import.exporter, import.range)).flatten()
    }

    /// Chooses an importer for bytes that no client counts any more.
    fn orphan(&mut self, exporter: Secret, range: u32) -> Option<Import> {
        let same = |import: &&Import| (import.exporter, import.range) == (exporter, range);
        if self.imports.iter().any(|(import, open)| same(&import) && is_adopted(open.counted_by)) {
            return None;
        }
        let adopter = *self.imports.keys().find(same)?;
        self.imports.get_mut(&adopter)?.counted_by = CountedBy::Adopting;
        Some(adopter)
    }

    /// The importer has adopted the memory: its next report counts it.
    pub fn adopted(&mut self, import: Import) {
        if let Some(open) = self.imports.get_mut(&import).filter(|open| open.counted_by == CountedBy::Adopting) {
            open.counted_by = CountedBy::NextReport;
        }
    }

    /// A report of that client has arrived.
    pub fn reported(&mut self, client: ClientId, gpu: GpuId) {
        for (_, open) in self.of(client).filter(|(_, open)| open.gpu == gpu && open.counted_by == CountedBy::NextReport)
        {
            open.counted_by = CountedBy::Importer;
        }
    }

    /// Memory that importers must adopt because the exporter has not reconnected in time.
    pub fn overdue(&mut self, client: ClientId, now: Time) -> Vec<Import> {
        let missing = |by| matches!(by, CountedBy::Missing(since) if now >= since + RECONNECT_TIMEOUT);
        let late: Vec<Import> =
            self.of(client).filter(|(_, c)| missing(c.counted_by)).map(|(import, _)| *import).collect();
        late.into_iter().filter_map(|import| self.orphan(import.exporter, import.range)).collect()
    }

    /// Bytes on that GPU that count with this client although its own reports do not have them yet.
    pub fn uncounted(&self, client: ClientId, gpu: GpuId) -> u64 {
        let is_unreported = |by| matches!(by, CountedBy::Missing(_) | CountedBy::Adopting | CountedBy::NextReport);
        let bytes =
            self.imports.iter().filter(|(i, c)| i.importer == client && c.gpu == gpu && is_unreported(c.counted_by));
        bytes.map(|(_, open)| open.bytes).fold(0, u64::saturating_add)
    }

    /// Bytes on that GPU that count with this client although another program allocated them: NVML may show them for that one.
    pub fn adopted_by(&self, client: ClientId, gpu: GpuId) -> u64 {
        let counts = |by| is_adopted(by) || matches!(by, CountedBy::Missing(_));
        let bytes = self.imports.iter().filter(|(i, c)| i.importer == client && c.gpu == gpu && counts(c.counted_by));
        bytes.map(|(_, open)| open.bytes).fold(0, u64::saturating_add)
    }

    /// A client has disconnected. Returns the importers that are to adopt what it counted, and the requests that it will
    /// not answer.
    pub fn leave(&mut self, client: ClientId) -> (Vec<Import>, Vec<OpenRequest>) {
        let mut orphans: Vec<(Secret, u32)> = Vec::new();
        if let Some(key) = self.exporters.remove(&client)
            && !self.exporters.values().any(|other| *other == key)
        {
            orphans.extend(self.imports.keys().filter(|i| i.exporter == key).map(|i| (key, i.range)));
        }
        let own: Vec<(Import, CountedBy)> = self.of(client).map(|(import, open)| (*import, open.counted_by)).collect();
        for (import, by) in own {
            self.imports.remove(&import);
            if by != CountedBy::Exporter {
                orphans.push((import.exporter, import.range));
            }
        }
        let adopters = orphans.into_iter().filter_map(|(key, range)| self.orphan(key, range)).collect();
        let mut unanswered = Vec::new();
        self.requests.retain(|_, request| {
            if request.exporter == client {
                unanswered.push(*request);
            }
            request.importer = request.importer.filter(|(asker, _)| *asker != client);
            request.exporter != client
        });
        (adopters, unanswered)
    }

    fn of(&mut self, client: ClientId) -> impl Iterator<Item = (&Import, &mut OpenMemory)> {
        self.imports.iter_mut().filter(move |(import, _)| import.importer == client)
    }
}

fn is_adopted(by: CountedBy) -> bool {
    matches!(by, CountedBy::Adopting | CountedBy::NextReport | CountedBy::Importer)
}

#[cfg(test)]
mod tests {
    use nvshare_wire::Uuid;

    use super::*;

    const GPU: GpuId = GpuId(Uuid([7; 16]));
    const KEY: Secret = Secret([1; 16]);
    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);
    const C: ClientId = ClientId(3);
    const NOW: Time = Duration::from_secs(10);

    fn import(importer: ClientId) -> Import {
        Import { importer, exporter: KEY, range: 5 }
    }

    /// A exports, and each of those has it open.
    fn shared_with(importers: &[ClientId]) -> SharedMemoryRegistry {
        let mut registry = SharedMemoryRegistry::default();
        registry.announce(A, KEY);
        for importer in importers {
            let (exporter, number) = registry.request(*importer, 1, (KEY, 5), |_| true).expect("it exports");
            assert_eq!(exporter, A);
            let request = registry.answer(A, number).expect("it was asked");
            registry.open(&request, GPU, 100);
        }
        registry
    }

    #[test]
    fn only_who_may_is_passed_on_and_never_to_itself() {
        let mut registry = shared_with(&[]);
        assert_eq!(registry.request(B, 1, (KEY, 5), |_| false), Err(Sharing::Unknown));
        assert_eq!(registry.request(B, 1, (Secret([2; 16]), 5), |_| true), Err(Sharing::Unknown));
        assert_eq!(registry.request(A, 1, (KEY, 5), |_| true), Err(Sharing::Unknown));
        let (_, number) = registry.request(B, 1, (KEY, 5), |_| true).expect("it may");
        assert_eq!(registry.answer(C, number), None, "only the exporter answers");
        assert!(registry.answer(A, number).is_some());
        assert_eq!(registry.answer(A, number), None, "and once");
    }

    #[test]
    fn who_has_given_up_gets_no_answer() {
        let mut registry = shared_with(&[]);
        let (_, number) = registry.request(B, 1, (KEY, 5), |_| true).expect("it may");
        assert_eq!(registry.close(import(B)), None);
        assert_eq!(registry.answer(A, number).expect("it was asked").importer, None);
    }

    #[test]
    fn an_exporter_that_does_not_answer_is_not_asked_without_end() {
        let mut registry = shared_with(&[]);
        let first = registry.request(B, 0, (KEY, 5), |_| true).expect("it may").1;
        for ticket in 1..MAX_PENDING as u32 {
            registry.request(B, ticket, (KEY, 5), |_| true).expect("it may");
        }
        assert_eq!(registry.request(B, 99, (KEY, 5), |_| true), Err(Sharing::Busy));
        assert_eq!(registry.answer(A, first).expect("it was asked").importer, None, "B has asked something else since");
        registry.request(C, 1, (KEY, 5), |_| true).expect("there is room for one more");
        let (_, unanswered) = registry.leave(A);
        assert_eq!(unanswered.len(), MAX_PENDING);
        assert_eq!(unanswered.iter().filter(|q| q.importer.is_some()).count(), 1, "only C still waits");
    }

    #[test]
    fn bytes_are_counted_once_from_the_exporters_to_the_last_importers_end() {
        let mut registry = shared_with(&[B, C]);
        assert_eq!(registry.uncounted(B, GPU) + registry.uncounted(C, GPU), 0, "the exporter counts it");
        assert_eq!(registry.withdraw(A, 5), Some(import(B)));
        assert_eq!(registry.withdraw(A, 5), None, "it is adopted already");
        assert_eq!((registry.uncounted(B, GPU), registry.uncounted(C, GPU)), (100, 0));
        registry.reported(B, GPU);
        assert_eq!(registry.uncounted(B, GPU), 100, "that report did not count it yet");
        registry.adopted(import(B));
        assert_eq!(registry.uncounted(B, GPU), 100, "nor has any since");
        registry.reported(B, GPU);
        assert_eq!(
            (registry.uncounted(B, GPU), registry.adopted_by(B, GPU), registry.adopted_by(C, GPU)),
            (0, 100, 0),
            "now one does"
        );
        assert_eq!(registry.close(import(B)), Some(import(C)));
        assert_eq!(registry.uncounted(C, GPU), 100);
        assert_eq!(registry.leave(C).0, [], "nobody has it any more");
        assert!(registry.imports.is_empty());
    }

    #[test]
    fn an_exporters_death_orphans_what_is_open_and_an_importers_nothing_that_the_exporter_counts() {
        let mut registry = shared_with(&[B, C]);
        assert_eq!(registry.leave(B).0, []);
        assert_eq!(registry.leave(A).0, [import(C)]);
        assert_eq!(registry.uncounted(C, GPU), 100);
    }

    #[test]
    fn after_a_restart_the_order_of_return_does_not_matter() {
        let mut registry = SharedMemoryRegistry::default();
        registry.restore(import(B), GPU, 100, false, NOW);
        assert_eq!(registry.uncounted(B, GPU), 100, "nobody else counts it yet");
        assert_eq!(registry.overdue(B, NOW), []);
        registry.announce(A, KEY);
        assert_eq!(registry.uncounted(B, GPU), 0, "its exporter is back");
        let mut registry = SharedMemoryRegistry::default();
        registry.restore(import(B), GPU, 100, false, NOW);
        registry.restore(import(C), GPU, 100, true, NOW);
        assert_eq!(registry.overdue(B, NOW + RECONNECT_TIMEOUT), [], "C adopted it under the daemon before");
        let mut registry = SharedMemoryRegistry::default();
        registry.restore(import(B), GPU, 100, false, NOW);
        assert_eq!(registry.overdue(B, NOW + RECONNECT_TIMEOUT), [import(B)], "the exporter is gone for good");
    }

    #[test]
    fn a_connection_that_was_replaced_orphans_nothing() {
        let mut registry = shared_with(&[B]);
        registry.announce(C, KEY);
        assert_eq!(registry.leave(A).0, [], "C is the same process");
    }
}
