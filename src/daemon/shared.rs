//! Memory that one program lets another use (CUDA IPC): who asks whom for it, and whose report counts its bytes. No I/O.
//!
//! Descriptors and secrets only pass through the daemon. What is kept is the *book*: who has which exported memory open.
//! Its bytes count with the exporter, whose pinned bytes they are. When the exporter frees it or ends, the GPU still has
//! it for those who opened it, so one of them *adopts* it: from then on it is among that one's pinned bytes. Between the
//! moment the exporter no longer counts it and the adopter's own report, the hub adds it to the adopter's
//! ([`Book::extra`]): it is never free for others.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_wire::Secret;
use nvshare_wire::client::Sharing;

use crate::scheduler::{ClientId, GpuId, Time};

/// How many questions one exporter can have unanswered: one that is stopped is not asked without end.
const MAX_UNANSWERED: usize = 32;
/// How long an importer's word for what it has open is kept before it is to adopt it: a new scheduler hears of importers
/// and exporters in any order.
const RETURN: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub struct Book {
    /// The names that clients export under.
    exporters: BTreeMap<ClientId, Secret>,
    /// What exporters were asked and have not answered, by the number they know the question by.
    questions: BTreeMap<u64, Question>,
    next_question: u64,
    imports: BTreeMap<Import, Counted>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// Who asked, and its own number for the question; `None` if it no longer wants to know.
    pub importer: Option<(ClientId, u32)>,
    exporter: ClientId,
    key: Secret,
    range: u32,
}

/// A range of one exporter that a client has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    pub importer: ClientId,
    pub exporter: Secret,
    pub range: u32,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    gpu: GpuId,
    bytes: u64,
    by: By,
}

/// Whose report has the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Exporter,
    /// Nobody's, since then: the exporter is not here. It may be on its way, after a restart of the daemon.
    Missing(Time),
    /// Nobody's: the importer has been told to adopt it.
    Nobody,
    /// The next one of the importer.
    NextReport,
    Importer,
}

impl Book {
    /// Questions are numbered from the time on, so that no answer to an earlier daemon's is taken for one to ours.
    pub fn new(now: Time) -> Self {
        Self { next_question: u64::try_from(now.as_nanos()).unwrap_or(0), ..Self::default() }
    }

    // ---- questions -----------------------------------------------------------------------------------------------

    /// A client exports under that name: whose imports it counts from now on.
    pub fn announce(&mut self, client: ClientId, key: Secret) -> Vec<ClientId> {
        self.exporters.insert(client, key);
        let missing = |(import, counted): &(&Import, &mut Counted)| {
            import.exporter == key && matches!(counted.by, By::Missing(_))
        };
        let found = self.imports.iter_mut().filter(missing).map(|(import, counted)| {
            counted.by = By::Exporter;
            import.importer
        });
        found.collect()
    }

    /// A client asks for memory: whom to pass that on to, under which number. `may`: whether it may open that client's.
    pub fn ask(
        &mut self,
        importer: ClientId,
        ticket: u32,
        (key, range): (Secret, u32),
        may: impl Fn(ClientId) -> bool,
    ) -> Result<(ClientId, u64), Sharing> {
        for question in self.questions.values_mut() {
            question.importer = question.importer.filter(|(asker, _)| *asker != importer);
        }
        let named = self.exporters.iter().rev().filter(|(_, name)| **name == key);
        let exporter = named.map(|(client, _)| *client).find(|client| *client != importer && may(*client));
        let exporter = exporter.ok_or(Sharing::Unknown)?;
        if self.questions.values().filter(|q| q.exporter == exporter).count() >= MAX_UNANSWERED {
            return Err(Sharing::Busy);
        }
        self.next_question += 1;
        let question = Question { importer: Some((importer, ticket)), exporter, key, range };
        self.questions.insert(self.next_question, question);
        Ok((exporter, self.next_question))
    }

    /// An exporter answers; `None` if it was not asked that.
    pub fn answer(&mut self, exporter: ClientId, number: u64) -> Option<Question> {
        self.questions.get(&number).filter(|q| q.exporter == exporter)?;
        self.questions.remove(&number)
    }

    // ---- the book ------------------------------------------------------------------------------------------------

    /// What was asked for is passed on: the importer has it open from now on.
    pub fn pass(&mut self, question: &Question, gpu: GpuId, bytes: u64) {
        let Some((importer, _)) = question.importer else { return };
        let import = Import { importer, exporter: question.key, range: question.range };
        self.imports.entry(import).or_insert(Counted { gpu, bytes, by: By::Exporter });
    }

    /// A client that was connected to an earlier daemon says what it has open.
    pub fn claim(&mut self, import: Import, gpu: GpuId, bytes: u64, adopted: bool, now: Time) {
        let by = match adopted {
            true => By::Importer,
            false if self.exporters.values().any(|key| *key == import.exporter) => By::Exporter,
            false => By::Missing(now),
        };
        self.imports.insert(import, Counted { gpu, bytes, by });
    }

    /// The exporter no longer has it: who is to adopt it.
    pub fn withdraw(&mut self, client: ClientId, range: u32) -> Option<Import> {
        let key = *self.exporters.get(&client)?;
        self.orphan(key, range)
    }

    /// The importer no longer has it open, nor wants it: who is to adopt it instead.
    pub fn close(&mut self, import: Import) -> Option<Import> {
        for question in self.questions.values_mut().filter(|q| (q.key, q.range) == (import.exporter, import.range)) {
            question.importer = question.importer.filter(|(asker, _)| *asker != import.importer);
        }
        let counted = self.imports.remove(&import)?;
        (counted.by != By::Exporter).then(|| self.orphan(import.exporter, import.range)).flatten()
    }

    /// Finds somebody for bytes that nobody counts any more.
    fn orphan(&mut self, exporter: Secret, range: u32) -> Option<Import> {
        let same = |import: &&Import| (import.exporter, import.range) == (exporter, range);
        if self.imports.iter().any(|(import, counted)| same(&import) && is_adopted(counted.by)) {
            return None;
        }
        let adopter = *self.imports.keys().find(same)?;
        self.imports.get_mut(&adopter)?.by = By::Nobody;
        Some(adopter)
    }

    /// The importer's next report counts it.
    pub fn adopted(&mut self, import: Import) {
        if let Some(counted) = self.imports.get_mut(&import).filter(|counted| counted.by == By::Nobody) {
            counted.by = By::NextReport;
        }
    }

    /// A report of that client arrives.
    pub fn reported(&mut self, client: ClientId, gpu: GpuId) {
        for (_, counted) in self.of(client).filter(|(_, counted)| counted.gpu == gpu && counted.by == By::NextReport) {
            counted.by = By::Importer;
        }
    }

    /// What that client has to adopt since exporters have not come back.
    pub fn overdue(&mut self, client: ClientId, now: Time) -> Vec<Import> {
        let missing = |by| matches!(by, By::Missing(since) if now >= since + RETURN);
        let late: Vec<Import> = self.of(client).filter(|(_, c)| missing(c.by)).map(|(import, _)| *import).collect();
        late.into_iter().filter_map(|import| self.orphan(import.exporter, import.range)).collect()
    }

    /// Bytes on that GPU which count with this client although its own reports leave them out.
    pub fn extra(&self, client: ClientId, gpu: GpuId) -> u64 {
        let uncounted = |by| matches!(by, By::Missing(_) | By::Nobody | By::NextReport);
        let bytes = self.imports.iter().filter(|(i, c)| i.importer == client && c.gpu == gpu && uncounted(c.by));
        bytes.map(|(_, counted)| counted.bytes).fold(0, u64::saturating_add)
    }

    /// Bytes on that GPU that other programs allocated and that count with this client: NVML may show them for theirs.
    pub fn adopted_by(&self, client: ClientId, gpu: GpuId) -> u64 {
        let counts = |by| is_adopted(by) || matches!(by, By::Missing(_));
        let bytes = self.imports.iter().filter(|(i, c)| i.importer == client && c.gpu == gpu && counts(c.by));
        bytes.map(|(_, counted)| counted.bytes).fold(0, u64::saturating_add)
    }

    /// A client is gone: who adopts what it counted, and which questions will never be answered.
    pub fn leave(&mut self, client: ClientId) -> (Vec<Import>, Vec<Question>) {
        let mut orphans: Vec<(Secret, u32)> = Vec::new();
        if let Some(key) = self.exporters.remove(&client)
            && !self.exporters.values().any(|other| *other == key)
        {
            orphans.extend(self.imports.keys().filter(|i| i.exporter == key).map(|i| (key, i.range)));
        }
        let own: Vec<(Import, By)> = self.of(client).map(|(import, counted)| (*import, counted.by)).collect();
        for (import, by) in own {
            self.imports.remove(&import);
            if by != By::Exporter {
                orphans.push((import.exporter, import.range));
            }
        }
        let adopters = orphans.into_iter().filter_map(|(key, range)| self.orphan(key, range)).collect();
        let mut unanswered = Vec::new();
        self.questions.retain(|_, question| {
            if question.exporter == client {
                unanswered.push(*question);
            }
            question.importer = question.importer.filter(|(asker, _)| *asker != client);
            question.exporter != client
        });
        (adopters, unanswered)
    }

    fn of(&mut self, client: ClientId) -> impl Iterator<Item = (&Import, &mut Counted)> {
        self.imports.iter_mut().filter(move |(import, _)| import.importer == client)
    }
}

fn is_adopted(by: By) -> bool {
    matches!(by, By::Nobody | By::NextReport | By::Importer)
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
    fn shared_with(importers: &[ClientId]) -> Book {
        let mut book = Book::default();
        book.announce(A, KEY);
        for importer in importers {
            let (exporter, number) = book.ask(*importer, 1, (KEY, 5), |_| true).expect("it exports");
            assert_eq!(exporter, A);
            let question = book.answer(A, number).expect("it was asked");
            book.pass(&question, GPU, 100);
        }
        book
    }

    #[test]
    fn only_who_may_is_passed_on_and_never_to_itself() {
        let mut book = shared_with(&[]);
        assert_eq!(book.ask(B, 1, (KEY, 5), |_| false), Err(Sharing::Unknown));
        assert_eq!(book.ask(B, 1, (Secret([2; 16]), 5), |_| true), Err(Sharing::Unknown));
        assert_eq!(book.ask(A, 1, (KEY, 5), |_| true), Err(Sharing::Unknown));
        let (_, number) = book.ask(B, 1, (KEY, 5), |_| true).expect("it may");
        assert_eq!(book.answer(C, number), None, "only the exporter answers");
        assert!(book.answer(A, number).is_some());
        assert_eq!(book.answer(A, number), None, "and once");
    }

    #[test]
    fn who_has_given_up_gets_no_answer() {
        let mut book = shared_with(&[]);
        let (_, number) = book.ask(B, 1, (KEY, 5), |_| true).expect("it may");
        assert_eq!(book.close(import(B)), None);
        assert_eq!(book.answer(A, number).expect("it was asked").importer, None);
    }

    #[test]
    fn an_exporter_that_does_not_answer_is_not_asked_without_end() {
        let mut book = shared_with(&[]);
        let first = book.ask(B, 0, (KEY, 5), |_| true).expect("it may").1;
        for ticket in 1..MAX_UNANSWERED as u32 {
            book.ask(B, ticket, (KEY, 5), |_| true).expect("it may");
        }
        assert_eq!(book.ask(B, 99, (KEY, 5), |_| true), Err(Sharing::Busy));
        assert_eq!(book.answer(A, first).expect("it was asked").importer, None, "B has asked something else since");
        book.ask(C, 1, (KEY, 5), |_| true).expect("there is room for one more");
        let (_, unanswered) = book.leave(A);
        assert_eq!(unanswered.len(), MAX_UNANSWERED);
        assert_eq!(unanswered.iter().filter(|q| q.importer.is_some()).count(), 1, "only C still waits");
    }

    #[test]
    fn bytes_are_counted_once_from_the_exporters_to_the_last_importers_end() {
        let mut book = shared_with(&[B, C]);
        assert_eq!(book.extra(B, GPU) + book.extra(C, GPU), 0, "the exporter counts it");
        assert_eq!(book.withdraw(A, 5), Some(import(B)));
        assert_eq!(book.withdraw(A, 5), None, "it is adopted already");
        assert_eq!((book.extra(B, GPU), book.extra(C, GPU)), (100, 0));
        book.reported(B, GPU);
        assert_eq!(book.extra(B, GPU), 100, "that report did not count it yet");
        book.adopted(import(B));
        assert_eq!(book.extra(B, GPU), 100, "nor has any since");
        book.reported(B, GPU);
        assert_eq!((book.extra(B, GPU), book.adopted_by(B, GPU), book.adopted_by(C, GPU)), (0, 100, 0), "now one does");
        assert_eq!(book.close(import(B)), Some(import(C)));
        assert_eq!(book.extra(C, GPU), 100);
        assert_eq!(book.leave(C).0, [], "nobody has it any more");
        assert!(book.imports.is_empty());
    }

    #[test]
    fn an_exporters_death_orphans_what_is_open_and_an_importers_nothing_that_the_exporter_counts() {
        let mut book = shared_with(&[B, C]);
        assert_eq!(book.leave(B).0, []);
        assert_eq!(book.leave(A).0, [import(C)]);
        assert_eq!(book.extra(C, GPU), 100);
    }

    #[test]
    fn after_a_restart_the_order_of_return_does_not_matter() {
        let mut book = Book::default();
        book.claim(import(B), GPU, 100, false, NOW);
        assert_eq!(book.extra(B, GPU), 100, "nobody else counts it yet");
        assert_eq!(book.overdue(B, NOW), []);
        book.announce(A, KEY);
        assert_eq!(book.extra(B, GPU), 0, "its exporter is back");
        let mut book = Book::default();
        book.claim(import(B), GPU, 100, false, NOW);
        book.claim(import(C), GPU, 100, true, NOW);
        assert_eq!(book.overdue(B, NOW + RETURN), [], "C adopted it under the daemon before");
        let mut book = Book::default();
        book.claim(import(B), GPU, 100, false, NOW);
        assert_eq!(book.overdue(B, NOW + RETURN), [import(B)], "the exporter is gone for good");
    }

    #[test]
    fn a_connection_that_was_replaced_orphans_nothing() {
        let mut book = shared_with(&[B]);
        book.announce(C, KEY);
        assert_eq!(book.leave(A).0, [], "C is the same process");
    }
}
