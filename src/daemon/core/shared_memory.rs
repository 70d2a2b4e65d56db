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

/// A range of an exporter's memory: the exporter's secret, and its number for the range.
type Range = (Secret, u32);

/// Records exports, requests and imports. The time for a change is logarithmic in the number of
/// entries, and linear in the number of ranges that the client itself has open.
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
    clients: BTreeMap<Secret, BTreeSet<ClientId>>,
}

impl Exporters {
    fn insert(&mut self, client: ClientId, key: Secret) {
        self.remove(client);
        self.secrets.insert(client, key);
        self.clients.entry(key).or_default().insert(client);
    }

    /// Removes a client. Returns its secret.
    fn remove(&mut self, client: ClientId) -> Option<Secret> {
        let key = self.secrets.remove(&client)?;
        if let Some(clients) = self.clients.get_mut(&key) {
            clients.remove(&client);
            if clients.is_empty() {
                self.clients.remove(&key);
            }
        }
        Some(key)
    }
}

/// Requests that exporters have not answered.
#[derive(Debug, Default)]
struct Requests {
    /// Requests by the number sent to the exporter.
    all: BTreeMap<u64, OpenRequest>,
    of_exporter: BTreeMap<ClientId, BTreeSet<u64>>,
    /// The newest request of each importer. The importer awaits only this answer.
    of_importer: BTreeMap<ClientId, u64>,
    last: u64,
}

impl Requests {
    fn insert(&mut self, importer: ClientId, request: OpenRequest) -> u64 {
        self.last += 1;
        self.of_exporter.entry(request.exporter).or_default().insert(self.last);
        self.of_importer.insert(importer, self.last);
        self.all.insert(self.last, request);
        self.last
    }

    fn remove(&mut self, number: u64) -> Option<OpenRequest> {
        let request = self.all.remove(&number)?;
        if let Some(numbers) = self.of_exporter.get_mut(&request.exporter) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.of_exporter.remove(&request.exporter);
            }
        }
        if let Some((importer, _)) = request.importer {
            self.of_importer.remove(&importer);
        }
        Some(request)
    }

    /// Marks an importer's request as abandoned if the request satisfies `is_meant`.
    fn give_up(&mut self, importer: ClientId, is_meant: impl Fn(&OpenRequest) -> bool) {
        let Some(number) = self.of_importer.get(&importer) else { return };
        if let Some(request) = self.all.get_mut(number).filter(|request| is_meant(request)) {
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
    exporter: ClientId,
    pub key: Secret,
    pub range: u32,
}

/// One client's use of an open range of an exporter's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    pub importer: ClientId,
    pub exporter: Secret,
    pub range: u32,
}

impl Import {
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
    Exporter,
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
    /// The importers of each range.
    ranges: BTreeMap<Range, BTreeMap<ClientId, OpenMemory>>,
    /// The importers that have adopted a range, or were asked to adopt it. A range has at most one,
    /// unless several clients of an earlier daemon report that they adopted the range.
    adopters: BTreeMap<Range, BTreeSet<ClientId>>,
    of_importer: BTreeMap<ClientId, OfImporter>,
    /// Number of imports whose exporter is missing.
    missing: usize,
}

/// The memory that one client has open.
#[derive(Debug, Default)]
struct OfImporter {
    ranges: BTreeSet<Range>,
    sums: BTreeMap<GpuId, Sums>,
    /// Ranges that the client's next report about a GPU will include for the first time.
    next_report: BTreeMap<GpuId, BTreeSet<Range>>,
    /// When the longest-missing exporter went missing; `None` if all exporters are connected.
    missing_since: Option<Time>,
}

/// Bytes on one GPU.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    /// Bytes that count for the client, but that its own reports do not include yet.
    uncounted: u128,
    /// Bytes that count for the client, but that another program allocated.
    adopted: u128,
}

impl Imports {
    fn insert(&mut self, import: Import, memory: OpenMemory) {
        self.remove(import);
        let (gpu, by, bytes) = (memory.gpu, memory.counted_by, memory.bytes);
        self.ranges.entry(import.range()).or_default().insert(import.importer, memory);
        self.of_importer.entry(import.importer).or_default().ranges.insert(import.range());
        self.count(import, gpu, bytes, by, true);
    }

    /// Removes an import. Returns the client that counted its bytes.
    fn remove(&mut self, import: Import) -> Option<CountedBy> {
        let importers = self.ranges.get_mut(&import.range())?;
        let OpenMemory { gpu, bytes, counted_by, .. } = importers.remove(&import.importer)?;
        if importers.is_empty() {
            self.ranges.remove(&import.range());
        }
        self.count(import, gpu, bytes, counted_by, false);
        if let Some(own) = self.of_importer.get_mut(&import.importer) {
            own.ranges.remove(&import.range());
            if own.ranges.is_empty() {
                self.of_importer.remove(&import.importer);
            }
        }
        Some(counted_by)
    }

    fn get(&mut self, import: Import) -> Option<&mut OpenMemory> {
        self.ranges.get_mut(&import.range())?.get_mut(&import.importer)
    }

    fn set(&mut self, import: Import, now: CountedBy) {
        let Some(memory) = self.get(import) else { return };
        let (gpu, bytes, before) = (memory.gpu, memory.bytes, std::mem::replace(&mut memory.counted_by, now));
        self.count(import, gpu, bytes, before, false);
        self.count(import, gpu, bytes, now, true);
    }

    /// Updates the sums of an import's importer and the adopters of its range: adds the import (`add`), or
    /// removes it.
    fn count(&mut self, import: Import, gpu: GpuId, bytes: u64, by: CountedBy, add: bool) {
        let own = self.of_importer.entry(import.importer).or_default();
        let sums = own.sums.entry(gpu).or_default();
        let change = |sum: &mut u128| *sum = if add { *sum + u128::from(bytes) } else { *sum - u128::from(bytes) };
        if by != CountedBy::Exporter {
            change(&mut sums.adopted);
        }
        if is_unreported(by) {
            change(&mut sums.uncounted);
        }
        match by {
            CountedBy::Missing(since) if add => {
                own.missing_since.get_or_insert(since);
                self.missing += 1;
            }
            CountedBy::Missing(_) => self.missing -= 1,
            CountedBy::NextReport if add => drop(own.next_report.entry(gpu).or_default().insert(import.range())),
            CountedBy::NextReport => drop(own.next_report.get_mut(&gpu).map(|next| next.remove(&import.range()))),
            _ => {}
        }
        if is_adopted(by) {
            let adopters = self.adopters.entry(import.range()).or_default();
            if add {
                adopters.insert(import.importer);
            } else {
                adopters.remove(&import.importer);
            }
            if adopters.is_empty() {
                self.adopters.remove(&import.range());
            }
        }
    }

    /// Chooses an importer to adopt bytes that no client counts any more. `None` if the range already has
    /// an adopter, or no client has it open.
    fn orphan(&mut self, (exporter, range): Range) -> Option<Import> {
        if self.adopters.contains_key(&(exporter, range)) {
            return None;
        }
        let importer = *self.ranges.get(&(exporter, range))?.keys().next()?;
        let import = Import { importer, exporter, range };
        self.set(import, CountedBy::Adopting);
        Some(import)
    }

    /// The ranges of an exporter that clients have open.
    fn of_exporter(&self, key: Secret) -> Vec<Range> {
        self.ranges.range((key, 0)..=(key, u32::MAX)).map(|(range, _)| *range).collect()
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
        if self.imports.missing == 0 {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (exporter, range) in self.imports.of_exporter(key) {
            let importers = self.imports.ranges.get(&(exporter, range)).into_iter().flatten();
            let missing = importers.filter(|(_, open)| matches!(open.counted_by, CountedBy::Missing(_)));
            found.extend(missing.map(|(importer, _)| Import { importer: *importer, exporter, range }));
        }
        found.iter().for_each(|import| self.imports.set(*import, CountedBy::Exporter));
        let importers: BTreeSet<ClientId> = found.into_iter().map(|import| import.importer).collect();
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
        let named = self.exporters.clients.get(&key).into_iter().flatten().rev();
        let exporter = named.copied().find(|client| *client != importer && may(*client)).ok_or(Sharing::Unknown)?;
        if self.requests.of_exporter.get(&exporter).map_or(0, BTreeSet::len) >= MAX_PENDING {
            return Err(Sharing::Busy);
        }
        let request = OpenRequest { importer: Some((importer, ticket)), exporter, key, range };
        Ok((exporter, self.requests.insert(importer, request)))
    }

    /// The exporters of a range that no client has open or requests.
    pub fn exporters_of_unused(&self, (key, range): Range) -> Vec<ClientId> {
        let is_meant =
            |number| self.requests.all.get(number).is_some_and(|request| (request.key, request.range) == (key, range));
        let exporters = || self.exporters.clients.get(&key).into_iter().flatten();
        let is_requested =
            || exporters().filter_map(|client| self.requests.of_exporter.get(client)).flatten().any(is_meant);
        let is_unused = !self.imports.ranges.contains_key(&(key, range)) && !is_requested();
        exporters().copied().filter(|_| is_unused).collect()
    }

    /// The client's secret, if no other client exports memory under it.
    pub fn sole_secret(&self, client: ClientId) -> Option<Secret> {
        let key = self.exporters.secrets.get(&client)?;
        self.exporters.clients.get(key).filter(|clients| clients.len() == 1).map(|_| *key)
    }

    /// The ranges that a client has open.
    pub fn opened_by(&self, importer: ClientId) -> Vec<(Secret, u32)> {
        let own = self.imports.of_importer.get(&importer);
        own.into_iter().flat_map(|own| &own.ranges).copied().collect()
    }

    /// Handles an exporter's answer to a request. Returns the request, or `None` if the number is
    /// unknown.
    pub fn answer(&mut self, exporter: ClientId, number: u64) -> Option<OpenRequest> {
        self.requests.all.get(&number).filter(|request| request.exporter == exporter)?;
        self.requests.remove(number)
    }

    // ---- open memory ---------------------------------------------------------------------------------------------

    /// Records that the importer of this request has the memory open from now on.
    pub fn open(&mut self, request: &OpenRequest, gpu: GpuId, bytes: u64, share: Share) {
        let Some((importer, _)) = request.importer else { return };
        let import = Import { importer, exporter: request.key, range: request.range };
        if self.imports.get(import).is_none() {
            let memory = OpenMemory { gpu, bytes, counted_by: CountedBy::Exporter, _share: share };
            self.imports.insert(import, memory);
        }
    }

    /// Handles a client's report about memory that it opened under an earlier daemon.
    pub fn restore(&mut self, import: Import, gpu: GpuId, bytes: u64, adopted: bool, now: Time, share: Share) {
        let counted_by = match adopted {
            true => CountedBy::Importer,
            false if self.exporters.clients.contains_key(&import.exporter) => CountedBy::Exporter,
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
        (counted_by != CountedBy::Exporter).then(|| self.imports.orphan(import.range())).flatten()
    }

    /// True if the importer was asked to adopt the memory and has not answered.
    pub fn is_adopting(&mut self, import: Import) -> bool {
        self.imports.get(import).is_some_and(|open| open.counted_by == CountedBy::Adopting)
    }

    /// Handles the importer's answer that it has adopted the memory. The importer's next report includes
    /// the memory.
    pub fn adopted(&mut self, import: Import) {
        if self.is_adopting(import) {
            self.imports.set(import, CountedBy::NextReport);
        }
    }

    /// Handles a client's report. The client's own reports now include the memory that it adopted before.
    pub fn reported(&mut self, client: ClientId, gpu: GpuId) {
        let next = self.imports.of_importer.get_mut(&client).and_then(|own| own.next_report.remove(&gpu));
        for (exporter, range) in next.into_iter().flatten() {
            let import = Import { importer: client, exporter, range };
            if self.imports.get(import).is_some_and(|open| open.counted_by == CountedBy::NextReport) {
                self.imports.set(import, CountedBy::Importer);
            }
        }
    }

    /// Chooses adopters for the client's imports whose exporters have not reconnected in time. Returns the
    /// imports to adopt.
    pub fn overdue(&mut self, client: ClientId, now: Time) -> Vec<Import> {
        let Some(own) = self.imports.of_importer.get_mut(&client) else { return Vec::new() };
        if own.missing_since.is_none_or(|since| now < since + RECONNECT_TIMEOUT) {
            return Vec::new();
        }
        own.missing_since = None;
        let (mut late, mut earliest) = (Vec::new(), None);
        for (exporter, range) in own.ranges.clone() {
            let import = Import { importer: client, exporter, range };
            match self.imports.get(import).map(|open| open.counted_by) {
                Some(CountedBy::Missing(since)) if now >= since + RECONNECT_TIMEOUT => late.push(import.range()),
                Some(CountedBy::Missing(since)) => earliest = earliest.into_iter().chain([since]).min(),
                _ => {}
            }
        }
        if let Some(own) = self.imports.of_importer.get_mut(&client) {
            own.missing_since = earliest;
        }
        late.into_iter().filter_map(|range| self.imports.orphan(range)).collect()
    }

    /// Bytes on the GPU that count for this client, but that its own reports do not include yet.
    pub fn uncounted(&self, client: ClientId, gpu: GpuId) -> u64 {
        saturated(self.sums(client, gpu).uncounted)
    }

    /// Bytes on the GPU that count for this client, but that another program allocated. NVML may list them
    /// under that program.
    pub fn adopted_by(&self, client: ClientId, gpu: GpuId) -> u64 {
        saturated(self.sums(client, gpu).adopted)
    }

    fn sums(&self, client: ClientId, gpu: GpuId) -> Sums {
        self.imports.of_importer.get(&client).and_then(|own| own.sums.get(&gpu)).copied().unwrap_or_default()
    }

    /// Handles the end of a client. Returns the importers that must adopt the client's counted
    /// memory, and the requests that the client has not answered.
    pub fn leave(&mut self, client: ClientId) -> (Vec<Import>, Vec<OpenRequest>) {
        let mut orphans: Vec<Range> = Vec::new();
        if let Some(key) = self.exporters.remove(client)
            && !self.exporters.clients.contains_key(&key)
        {
            orphans = self.imports.of_exporter(key);
        }
        let own = self.imports.of_importer.get(&client).map(|own| own.ranges.clone()).unwrap_or_default();
        for (exporter, range) in own {
            let counted_by = self.imports.remove(Import { importer: client, exporter, range });
            if counted_by.is_some_and(|by| by != CountedBy::Exporter) {
                orphans.push((exporter, range));
            }
        }
        let adopters = orphans.into_iter().filter_map(|range| self.imports.orphan(range)).collect();
        self.requests.give_up(client, |_| true);
        let numbers = self.requests.of_exporter.get(&client).cloned().unwrap_or_default();
        let unanswered = numbers.into_iter().filter_map(|number| self.requests.remove(number)).collect();
        (adopters, unanswered)
    }
}

fn is_adopted(by: CountedBy) -> bool {
    matches!(by, CountedBy::Adopting | CountedBy::NextReport | CountedBy::Importer)
}

fn is_unreported(by: CountedBy) -> bool {
    matches!(by, CountedBy::Missing(_) | CountedBy::Adopting | CountedBy::NextReport)
}

fn saturated(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
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
        assert!(registry.imports.ranges.is_empty() && registry.imports.of_importer.is_empty());
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
    fn per_client_totals_match_the_imports() {
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
            let open = || {
                let ranges = registry.imports.ranges.iter();
                ranges.flat_map(|(range, all)| all.iter().map(move |(importer, open)| (*range, *importer, open)))
            };
            for client in (1..=4).map(ClientId) {
                let own = || open().filter(|(_, importer, _)| *importer == client).map(|(_, _, open)| open);
                let sum = |is: fn(CountedBy) -> bool| {
                    own().filter(|open| is(open.counted_by)).map(|open| open.bytes).sum::<u64>()
                };
                assert_eq!(registry.uncounted(client, GPU), sum(is_unreported), "step {step}");
                assert_eq!(registry.adopted_by(client, GPU), sum(|by| by != CountedBy::Exporter), "step {step}");
            }
            let missing = open().filter(|(.., open)| matches!(open.counted_by, CountedBy::Missing(_))).count();
            assert_eq!(registry.imports.missing, missing, "step {step}");
            let mut adopters: BTreeMap<Range, BTreeSet<ClientId>> = BTreeMap::new();
            for (range, importer, _) in open().filter(|(.., open)| is_adopted(open.counted_by)) {
                adopters.entry(range).or_default().insert(importer);
            }
            assert_eq!(registry.imports.adopters, adopters, "step {step}");
        }
    }
}
