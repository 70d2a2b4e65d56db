//! Queries of the model's mappings and reservations.

use super::*;

impl Model {
    pub(super) fn used(&self) -> u64 {
        self.memory.iter().flatten().filter(|m| !m.imported).map(|m| m.len).sum()
    }

    /// A random memory object that exists.
    pub(super) fn any_memory(&mut self) -> Option<usize> {
        let all: Vec<usize> = (0..self.memory.len()).filter(|i| self.memory[*i].is_some()).collect();
        all.get(self.random.below(all.len() as u64) as usize).copied()
    }

    pub(super) fn any_mapping(&mut self) -> Option<usize> {
        let n = self.mappings.len() as u64;
        (n > 0).then(|| self.random.below(n) as usize)
    }

    pub(super) fn of(&self, mapping: &Mapping) -> &Memory {
        self.memory[mapping.memory].as_ref().expect("a mapping keeps its memory")
    }

    pub(super) fn overlapping(&self, at: u64, len: u64) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.mappings.len())
            .filter(|i| {
                let m = &self.mappings[*i];
                m.at < at + len && at < m.at + self.of(m).len
            })
            .collect();
        all.sort_by_key(|i| self.mappings[*i].at);
        all
    }

    /// Whether the range consists of whole mappings without holes.
    pub(super) fn makes_up(&self, at: u64, len: u64) -> bool {
        let all = self.overlapping(at, len);
        let end = all.iter().try_fold(at, |next, i| {
            let m = &self.mappings[*i];
            (m.at == next).then(|| m.at + self.of(m).len)
        });
        !all.is_empty() && end == Some(at + len)
    }

    /// Whether no mapping lies only partly in the range.
    pub(super) fn cuts_none(&self, at: u64, len: u64) -> bool {
        self.overlapping(at, len).iter().all(|i| {
            let m = &self.mappings[*i];
            at <= m.at && m.at + self.of(m).len <= at + len
        })
    }

    /// The reservation that contains an address.
    pub(super) fn reservation(&self, at: u64) -> (u64, u64) {
        let found = self.reservations.iter().find(|(start, size)| *start <= at && at < start + size);
        *found.expect("what is mapped is reserved")
    }

    pub(super) fn is_reserved(&self, at: u64, len: u64) -> bool {
        self.reservations.iter().any(|(start, size)| *start <= at && at + len <= start + size)
    }
}
