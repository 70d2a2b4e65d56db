//! The registry of memory that programs share (CUDA IPC): pending requests to open the memory, and
//! the client whose report includes the bytes. The registry does no I/O.
//!
//! The daemon passes descriptors and secrets on without storing them. The registry records which
//! exported memory each client has open.
//!
//! The bytes of exported memory count among the exporter's pinned bytes. When the exporter frees the
//! memory or ends, the memory stays on the GPU for the clients that opened it. One of these clients
//! then *adopts* the memory: its bytes count among the adopter's pinned bytes.
//!
//! Between the exporter's last report that includes the memory and the adopter's first, the daemon adds
//! the bytes to the adopter's reports ([`SharedMemoryRegistry::uncounted`]). Otherwise, the memory
//! would count as free for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use nvshare_wire::Secret;
use nvshare_wire::client::Sharing;

use crate::daemon::tenants::Share;
use crate::scheduler::{ClientId, GpuId, Time};

/// Maximum number of unanswered requests to one exporter. A stopped exporter answers none.
const MAX_PENDING: usize = 32;
/// After a restart of the daemon, exporters and importers reconnect in any order. If the exporter has
/// not reconnected within this time, an importer adopts the memory.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The first and the last range of an exporter.
const ANY_RANGE: (u32, u32) = (0, u32::MAX);

/// A range of an exporter's memory: the exporter's secret, and its number for the range.
type Range = (Secret, u32);

/// Records exports, requests and imports. The time for a change is logarithmic in the number of
/// entries. The time for a report, and for the end of a client, is also linear in the number of ranges
/// that the client itself has open (`What::Imports`).
#[derive(Debug, Default)]
pub struct SharedMemoryRegistry {
    exporters: Exporters,
    requests: Requests,
    imports: Imports,
}

/// The secrets under which clients export memory.
#[derive(Debug, Default)]
struct Exporters {
    secrets: BTreeMap<ClientId, Secret>,
    clients: BTreeSet<(Secret, ClientId)>,
}

impl Exporters {
    fn insert(&mut self, client: ClientId, key: Secret) {
        self.remove(client);
        self.secrets.insert(client, key);
        self.clients.insert((key, client));
    }

    /// Removes a client. Returns its secret.
    fn remove(&mut self, client: ClientId) -> Option<Secret> {
        let key = self.secrets.remove(&client)?;
        self.clients.remove(&(key, client));
        Some(key)
    }

    /// The clients that export memory under a secret.
    fn of(&self, key: Secret) -> impl DoubleEndedIterator<Item = ClientId> {
        self.clients.range((key, ClientId(0))..=(key, ClientId(u64::MAX))).map(|(_, client)| *client)
    }
}

/// Requests that exporters have not answered.
#[derive(Debug, Default)]
struct Requests {
    /// Requests by the exporter, and the number sent to it.
    all: BTreeMap<(ClientId, u64), OpenRequest>,
    /// The newest request of each importer. The importer awaits only this answer.
    of_importer: BTreeMap<ClientId, (ClientId, u64)>,
    last: u64,
}

impl Requests {
    fn insert(&mut self, importer: ClientId, exporter: ClientId, request: OpenRequest) -> u64 {
        self.last += 1;
        self.of_importer.insert(importer, (exporter, self.last));
        self.all.insert((exporter, self.last), request);
        self.last
    }

    fn remove(&mut self, exporter: ClientId, number: u64) -> Option<OpenRequest> {
        let request = self.all.remove(&(exporter, number))?;
        if let Some((importer, _)) = request.importer {
            self.of_importer.remove(&importer);
        }
        Some(request)
    }

    /// The requests to an exporter, by their numbers.
    fn of_exporter(&self, exporter: ClientId) -> impl Iterator<Item = (u64, &OpenRequest)> {
        let all = self.all.range((exporter, 0)..=(exporter, u64::MAX));
        all.map(|((_, number), request)| (*number, request))
    }

    /// Marks an importer's request as abandoned if the request satisfies `is_meant`.
    fn give_up(&mut self, importer: ClientId, is_meant: impl Fn(&OpenRequest) -> bool) {
        let Some(key) = self.of_importer.get(&importer) else { return };
        if let Some(request) = self.all.get_mut(key).filter(|request| is_meant(request)) {
            request.importer = None;
            self.of_importer.remove(&importer);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenRequest {
    /// The importer, and the importer's number for the request. `None` if the importer has withdrawn the
    /// request.
    pub importer: Option<(ClientId, u32)>,
    pub key: Secret,
    pub range: u32,
}

/// One client's use of an open range of an exporter's memory. The order of the fields is the order
/// of imports, so that a client's imports follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    pub importer: ClientId,
    pub exporter: Secret,
    pub range: u32,
}

impl Import {
    /// From the first possible import of a client to the last.
    fn all_of(importer: ClientId) -> RangeInclusive<Self> {
        let import = |byte, range| Self { importer, exporter: Secret([byte; 16]), range };
        import(0, 0)..=import(u8::MAX, u32::MAX)
    }

    fn range(&self) -> Range {
        (self.exporter, self.range)
    }
}

#[derive(Debug)]
struct OpenMemory {
    gpu: GpuId,
    bytes: u64,
    counted_by: CountedBy,
    /// The import's share of the importer's budget.
    _share: Share,
}

/// The client whose report includes the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CountedBy {
    /// The exporter, or an importer that has adopted the memory.
    Another,
    /// No client, since this time: after a restart of the daemon, the exporter has not reconnected.
    Missing(Time),
    /// No client: the importer was asked to adopt the memory, and has not answered.
    Adopting,
    /// The importer, but only from its next report on.
    NextReport,
    Importer,
}

/// The memory that clients have open.
#[derive(Debug, Default)]
struct Imports {
    all: BTreeMap<Import, OpenMemory>,
    importers: BTreeSet<(Range, ClientId)>,
    /// The imports that [`CountedBy::Missing`] applies to. Each message of a client looks for them.
    missing: BTreeSet<Import>,
}

impl Imports {
    fn insert(&mut self, import: Import, memory: OpenMemory) {
        self.note(import, memory.counted_by);
        self.all.insert(import, memory);
        self.importers.insert((import.range(), import.importer));
    }

    /// Removes an import. Returns the client that counted its bytes.
    fn remove(&mut self, import: Import) -> Option<CountedBy> {
        self.importers.remove(&(import.range(), import.importer));
        self.missing.remove(&import);
        self.all.remove(&import).map(|memory| memory.counted_by)
    }

    fn get(&self, import: Import) -> Option<&OpenMemory> {
        self.all.get(&import)
    }

    /// Keeps `missing` up to date.
    fn note(&mut self, import: Import, counted_by: CountedBy) {
        if is_missing(counted_by) {
            self.missing.insert(import)
        } else {
            self.missing.remove(&import)
        };
    }

    /// Changes the client that counts an import's bytes, if `is_meant` is true of the present one. Returns whether
    /// it has changed.
    fn change(&mut self, import: Import, is_meant: impl Fn(CountedBy) -> bool, now: CountedBy) -> bool {
        let Some(memory) = self.all.get_mut(&import).filter(|memory| is_meant(memory.counted_by)) else { return false };
        memory.counted_by = now;
        self.note(import, now);
        true
    }

    /// The memory that one client has open.
    fn of_importer(&self, importer: ClientId) -> impl Iterator<Item = (Import, &OpenMemory)> {
        self.all.range(Import::all_of(importer)).map(|(import, memory)| (*import, memory))
    }

    /// The imports of one client whose exporters are missing.
    fn missing_of(&self, importer: ClientId) -> impl Iterator<Item = Import> {
        self.missing.range(Import::all_of(importer)).copied()
    }

    /// The imports of ranges of one exporter. `ranges`: the first and the last of these ranges.
    fn of_exporter(&self, exporter: Secret, ranges: (u32, u32)) -> impl Iterator<Item = Import> {
        let (first, last) = (((exporter, ranges.0), ClientId(0)), ((exporter, ranges.1), ClientId(u64::MAX)));
        let all = self.importers.range(first..=last);
        all.map(|((exporter, range), importer)| Import { importer: *importer, exporter: *exporter, range: *range })
    }

    /// Chooses an importer to adopt bytes that no client counts any more. `None` if the range already has
    /// an adopter, or no client has it open. A range has at most one adopter, unless several clients of an
    /// earlier daemon report that they adopted it.
    fn orphan(&mut self, (exporter, range): Range) -> Option<Import> {
        let importers: Vec<Import> = self.of_exporter(exporter, (range, range)).collect();
        let is_adopted = importers.iter().any(|import| self.get(*import).is_some_and(|it| is_adopted(it.counted_by)));
        let import = importers.into_iter().next().filter(|_| !is_adopted)?;
        self.change(import, |_| true, CountedBy::Adopting);
        Some(import)
    }
}

impl SharedMemoryRegistry {
    /// Request numbers start at the current time. Answers to an earlier daemon's requests then match no
    /// request.
    pub fn new(now: Time) -> Self {
        let last = u64::try_from(now.as_nanos()).unwrap_or(0);
        Self { requests: Requests { last, ..Requests::default() }, ..Self::default() }
    }

    // ---- requests ------------------------------------------------------------------------------------------------

    /// Records that a client exports memory under this secret. If the exporter of imports under
    /// this secret was missing, the client counts these imports from now on. Returns the importers
    /// of these imports.
    pub fn announce(&mut self, client: ClientId, key: Secret) -> Vec<ClientId> {
        self.exporters.insert(client, key);
        let imports: Vec<Import> = self.imports.of_exporter(key, ANY_RANGE).collect();
        let found = imports.into_iter().filter(|import| self.imports.change(*import, is_missing, CountedBy::Another));
        let importers: BTreeSet<ClientId> = found.map(|import| import.importer).collect();
        importers.into_iter().collect()
    }

    /// Records a client's request to open an exporter's memory. `may(exporter)` is true if the client may
    /// share memory with the exporter. Returns the exporter and the number of the request.
    ///
    /// # Errors
    /// Returns the answer for the importer if the exporter is unknown or has too many pending
    /// requests.
    pub fn request(
        &mut self,
        importer: ClientId,
        ticket: u32,
        (key, range): Range,
        may: impl Fn(ClientId) -> bool,
    ) -> Result<(ClientId, u64), Sharing> {
        self.requests.give_up(importer, |_| true);
        let mut named = self.exporters.of(key).rev();
        let exporter = named.find(|client| *client != importer && may(*client)).ok_or(Sharing::Unknown)?;
        if self.requests.of_exporter(exporter).count() >= MAX_PENDING {
            return Err(Sharing::Busy);
        }
        let request = OpenRequest { importer: Some((importer, ticket)), key, range };
        Ok((exporter, self.requests.insert(importer, exporter, request)))
    }

    /// The exporters of a range that no client has open or requests.
    pub fn exporters_of_unused(&self, (key, range): Range) -> Vec<ClientId> {
        let is_meant = |(_, request): (u64, &OpenRequest)| (request.key, request.range) == (key, range);
        let is_requested = || self.exporters.of(key).flat_map(|client| self.requests.of_exporter(client)).any(is_meant);
        let is_unused = self.imports.of_exporter(key, (range, range)).next().is_none() && !is_requested();
        self.exporters.of(key).filter(|_| is_unused).collect()
    }

    /// The client's secret, if no other client exports memory under it.
    pub fn sole_secret(&self, client: ClientId) -> Option<Secret> {
        let key = *self.exporters.secrets.get(&client)?;
        (self.exporters.of(key).count() == 1).then_some(key)
    }

    /// The ranges that a client has open.
    pub fn opened_by(&self, importer: ClientId) -> Vec<(Secret, u32)> {
        self.imports.of_importer(importer).map(|(import, _)| import.range()).collect()
    }

    /// Handles an exporter's answer to a request. Returns the request, or `None` if the number is
    /// unknown.
    pub fn answer(&mut self, exporter: ClientId, number: u64) -> Option<OpenRequest> {
        self.requests.remove(exporter, number)
    }

    // ---- open memory ---------------------------------------------------------------------------------------------

    /// Records that the importer of this request has the memory open from now on.
    pub fn open(&mut self, request: &OpenRequest, gpu: GpuId, bytes: u64, share: Share) {
        let Some((importer, _)) = request.importer else { return };
        let import = Import { importer, exporter: request.key, range: request.range };
        if self.imports.get(import).is_none() {
            let memory = OpenMemory { gpu, bytes, counted_by: CountedBy::Another, _share: share };
            self.imports.insert(import, memory);
        }
    }

    /// Handles a client's report about memory that it opened under an earlier daemon.
    pub fn restore(&mut self, import: Import, gpu: GpuId, bytes: u64, adopted: bool, now: Time, share: Share) {
        let counted_by = match adopted {
            true => CountedBy::Importer,
            false if self.exporters.of(import.exporter).next().is_some() => CountedBy::Another,
            false => CountedBy::Missing(now),
        };
        self.imports.insert(import, OpenMemory { gpu, bytes, counted_by, _share: share });
    }

    /// Handles an exporter's report that it freed a range. Returns the importer that must adopt the range.
    pub fn withdraw(&mut self, client: ClientId, range: u32) -> Option<Import> {
        let key = *self.exporters.secrets.get(&client)?;
        self.imports.orphan((key, range))
    }

    /// Handles an importer's report that it closed the memory or withdrew its request. If that importer
    /// counted the memory, returns the importer that must adopt the memory next.
    pub fn close(&mut self, import: Import) -> Option<Import> {
        self.requests.give_up(import.importer, |request| (request.key, request.range) == import.range());
        let counted_by = self.imports.remove(import)?;
        (counted_by != CountedBy::Another).then(|| self.imports.orphan(import.range())).flatten()
    }

    /// True if the importer was asked to adopt the memory and has not answered.
    pub fn is_adopting(&mut self, import: Import) -> bool {
        self.imports.get(import).is_some_and(|open| open.counted_by == CountedBy::Adopting)
    }

    /// Handles the importer's answer that it has adopted the memory. The importer's next report includes
    /// the memory.
    pub fn adopted(&mut self, import: Import) {
        self.imports.change(import, |by| by == CountedBy::Adopting, CountedBy::NextReport);
    }

    /// Handles a client's report. The client's own reports now include the memory that it adopted before.
    pub fn reported(&mut self, client: ClientId, gpu: GpuId) {
        let on_gpu = self.imports.of_importer(client).filter(|(_, memory)| memory.gpu == gpu);
        for import in on_gpu.map(|(import, _)| import).collect::<Vec<_>>() {
            self.imports.change(import, |by| by == CountedBy::NextReport, CountedBy::Importer);
        }
    }

    /// Chooses adopters for the client's imports whose exporters have not reconnected in time. Returns the
    /// imports to adopt. If a range has an adopter already, the adopter counts the bytes.
    pub fn overdue(&mut self, client: ClientId, now: Time) -> Vec<Import> {
        let is_late = |import: &Import| {
            let since = self.imports.get(*import).map(|memory| memory.counted_by);
            matches!(since, Some(CountedBy::Missing(since)) if now >= since + RECONNECT_TIMEOUT)
        };
        let late: Vec<Import> = self.imports.missing_of(client).filter(is_late).collect();
        let adopters = late.into_iter().map(|import| {
            let adopter = self.imports.orphan(import.range());
            self.imports.change(import, is_missing, CountedBy::Another);
            adopter
        });
        adopters.flatten().collect()
    }

    /// Bytes on the GPU that count for this client, but that its own reports do not include yet.
    pub fn uncounted(&self, client: ClientId, gpu: GpuId) -> u64 {
        self.sum(client, gpu, is_unreported)
    }

    /// Bytes on the GPU that count for this client, but that another program allocated. NVML may list them
    /// under that program.
    pub fn adopted_by(&self, client: ClientId, gpu: GpuId) -> u64 {
        self.sum(client, gpu, |by| by != CountedBy::Another)
    }

    fn sum(&self, client: ClientId, gpu: GpuId, is_meant: impl Fn(CountedBy) -> bool) -> u64 {
        let meant = |(_, memory): &(Import, &OpenMemory)| memory.gpu == gpu && is_meant(memory.counted_by);
        self.imports.of_importer(client).filter(meant).fold(0, |sum, (_, memory)| sum.saturating_add(memory.bytes))
    }

    /// Handles the end of a client. Returns the importers that must adopt the client's counted
    /// memory, and the requests that the client has not answered.
    pub fn leave(&mut self, client: ClientId) -> (Vec<Import>, Vec<OpenRequest>) {
        let mut orphans: BTreeSet<Range> = BTreeSet::new();
        if let Some(key) = self.exporters.remove(client)
            && self.exporters.of(key).next().is_none()
        {
            orphans.extend(self.imports.of_exporter(key, ANY_RANGE).map(|import| import.range()));
        }
        for range in self.opened_by(client) {
            let (exporter, number) = range;
            let counted_by = self.imports.remove(Import { importer: client, exporter, range: number });
            if counted_by.is_some_and(|by| by != CountedBy::Another) {
                orphans.insert(range);
            }
        }
        let adopters = orphans.into_iter().filter_map(|range| self.imports.orphan(range)).collect();
        self.requests.give_up(client, |_| true);
        let numbers: Vec<u64> = self.requests.of_exporter(client).map(|(number, _)| number).collect();
        let unanswered = numbers.into_iter().filter_map(|number| self.requests.remove(client, number)).collect();
        (adopters, unanswered)
    }
}

fn is_missing(by: CountedBy) -> bool {
    matches!(by, CountedBy::Missing(_))
}

fn is_adopted(by: CountedBy) -> bool {
    matches!(by, CountedBy::Adopting | CountedBy::NextReport | CountedBy::Importer)
}

fn is_unreported(by: CountedBy) -> bool {
    matches!(by, CountedBy::Missing(_) | CountedBy::Adopting | CountedBy::NextReport)
}

#[cfg(test)]
mod tests {
    use nvshare_wire::Uuid;

    use super::*;
    use crate::daemon::tenants::{Budgets, What};
    use crate::identity::Tenant;

    const GPU: GpuId = GpuId(Uuid([7; 16]));
    const KEY: Secret = Secret([1; 16]);
    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);
    const C: ClientId = ClientId(3);
    const NOW: Time = Duration::from_secs(10);

    fn share() -> Share {
        Budgets::new(1).of(&Tenant::User(1)).hold(What::Imports, 1)
    }

    fn import(importer: ClientId) -> Import {
        Import { importer, exporter: KEY, range: 5 }
    }

    /// A registry in which `A` exports memory and each of these importers has opened it.
    fn shared_with(importers: &[ClientId]) -> SharedMemoryRegistry {
        let mut registry = SharedMemoryRegistry::default();
        registry.announce(A, KEY);
        for importer in importers {
            let (exporter, number) = registry.request(*importer, 1, (KEY, 5), |_| true).expect("it exports");
            assert_eq!(exporter, A);
            let request = registry.answer(A, number).expect("it was asked");
            registry.open(&request, GPU, 100, share());
        }
        registry
    }

    #[test]
    fn only_permitted_requests_reach_the_exporter() {
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
    fn a_cancelled_request_gets_no_answer() {
        let mut registry = shared_with(&[]);
        let (_, number) = registry.request(B, 1, (KEY, 5), |_| true).expect("it may");
        assert_eq!(registry.close(import(B)), None);
        assert_eq!(registry.answer(A, number).expect("it was asked").importer, None);
    }

    #[test]
    fn requests_to_a_silent_exporter_are_bounded() {
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
    fn shared_bytes_are_counted_once_until_the_last_importer_closes_them() {
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
        assert!(registry.imports.all.is_empty() && registry.imports.importers.is_empty());
    }

    #[test]
    fn only_an_exporters_exit_orphans_open_imports() {
        let mut registry = shared_with(&[B, C]);
        assert_eq!(registry.leave(B).0, []);
        assert_eq!(registry.leave(A).0, [import(C)]);
        assert_eq!(registry.uncounted(C, GPU), 100);
    }

    #[test]
    fn imports_are_counted_once_in_any_order_of_reconnection() {
        let mut registry = SharedMemoryRegistry::default();
        registry.restore(import(B), GPU, 100, false, NOW, share());
        assert_eq!(registry.uncounted(B, GPU), 100, "nobody else counts it yet");
        assert_eq!(registry.overdue(B, NOW), []);
        registry.announce(A, KEY);
        assert_eq!(registry.uncounted(B, GPU), 0, "its exporter is back");
        let mut registry = SharedMemoryRegistry::default();
        registry.restore(import(B), GPU, 100, false, NOW, share());
        registry.restore(import(C), GPU, 100, true, NOW, share());
        assert_eq!(registry.overdue(B, NOW + RECONNECT_TIMEOUT), [], "C adopted it under the daemon before");
        assert_eq!((registry.uncounted(B, GPU), registry.adopted_by(C, GPU)), (0, 100), "and counts it");
        assert_eq!(registry.close(import(C)), Some(import(B)), "until it closes it");
        let mut registry = SharedMemoryRegistry::default();
        registry.restore(import(B), GPU, 100, false, NOW, share());
        assert_eq!(registry.overdue(B, NOW + RECONNECT_TIMEOUT), [import(B)], "the exporter is gone for good");
    }

    #[test]
    fn a_replaced_connection_of_the_exporter_orphans_nothing() {
        let mut registry = shared_with(&[B]);
        registry.announce(C, KEY);
        assert_eq!(registry.leave(A).0, [], "C is the same process");
    }

    #[test]
    fn the_indexes_of_imports_match() {
        let mut dice = 1u32;
        let mut next = |n: u32| {
            dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (dice >> 8) % n
        };
        let mut registry = SharedMemoryRegistry::default();
        for step in 0..20_000u64 {
            let client = ClientId(1 + u64::from(next(4)));
            let import = Import { importer: client, exporter: Secret([next(3) as u8; 16]), range: next(4) };
            let now = NOW + Duration::from_millis(step);
            match next(9) {
                0 => drop(registry.announce(client, import.exporter)),
                1 => registry.restore(import, GPU, u64::from(next(9)), next(2) == 0, now, share()),
                2 => drop(registry.close(import)),
                3 => registry.adopted(import),
                4 => registry.reported(client, GPU),
                5 => drop(registry.overdue(client, now)),
                6 => drop(registry.withdraw(client, import.range)),
                7 if next(10) == 0 => drop(registry.leave(client)),
                _ => {
                    if let Ok((exporter, number)) = registry.request(client, 1, import.range(), |_| true)
                        && let Some(request) = registry.answer(exporter, number)
                    {
                        registry.open(&request, GPU, 5, share());
                    }
                }
            }
            let imports = &registry.imports;
            let open: BTreeSet<(Range, ClientId)> =
                imports.all.keys().map(|import| (import.range(), import.importer)).collect();
            assert_eq!(imports.importers, open, "step {step}");
            let missing = imports.all.iter().filter(|(_, memory)| is_missing(memory.counted_by));
            assert_eq!(imports.missing, missing.map(|(key, _)| *key).collect(), "step {step}");
        }
    }
}
