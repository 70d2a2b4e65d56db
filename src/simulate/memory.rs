//! A program's memory on one GPU: limit, allowance, resident bytes, and copies over the GPU's link. Memory is evicted
//! and brought back as the library does it (`preload/src/memory/`).

use std::collections::VecDeque;
use std::time::Duration;

use crate::scheduler::{MemoryReport, Time};

/// Bytes copied and reported at once. The library's own chunks are at most a quarter of this, which makes a hand-over
/// some milliseconds shorter, and for a hundred programs on a GPU changes the time at which the last one ends by less
/// than 3 percent.
const CHUNK: u64 = 256 << 20;

/// The way between a GPU and the host: each direction carries one chunk after the other.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Bytes a second.
    rate: u64,
    out_free: Time,
    in_free: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Out,
    In,
}

impl Link {
    pub fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), out_free: Time::ZERO, in_free: Time::ZERO }
    }

    /// When a copy is done that is wanted now.
    fn copy(&mut self, now: Time, way: Way, bytes: u64) -> Time {
        let free = match way {
            Way::Out => &mut self.out_free,
            Way::In => &mut self.in_free,
        };
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate);
        *free = now.max(*free) + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        *free
    }
}

#[derive(Debug, Default)]
pub struct Place {
    /// Bytes that it allocates, as soon as its limit allows.
    size: u64,
    demand: u64,
    limit: u64,
    limit_seq: u32,
    allowance: u64,
    ack: u32,
    /// Allowances that are not carried out.
    pending: VecDeque<(u32, u64)>,
    /// On the GPU, counting what is on its way there; and of what was there, in the host.
    mapped: u64,
    swapped: u64,
    copying: Option<(Way, u64)>,
    pub attached: bool,
    pub wishes: bool,
}

impl Place {
    pub fn new(size: u64) -> Self {
        Self { size, ..Self::default() }
    }

    pub fn report(&self) -> MemoryReport {
        MemoryReport {
            ack: self.ack,
            demand: self.demand,
            mapped: self.mapped,
            swapped: self.swapped,
            pinned: 0,
            limit_ack: self.limit_seq,
        }
    }

    pub fn limited(&mut self, bytes: u64, seq: u32) {
        (self.limit, self.limit_seq) = (bytes, seq);
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn is_allocated(&self) -> bool {
        self.demand == self.size
    }

    /// Allocates its memory. False if its limit does not allow that.
    pub fn allocate(&mut self) -> bool {
        if self.limit < self.size {
            return false;
        }
        (self.demand, self.wishes) = (self.size, false);
        true
    }

    /// Handles a new allowance. True if no memory has to leave first, which is reported.
    pub fn allow(&mut self, seq: u32, bytes: u64) -> bool {
        self.allowance = bytes;
        self.pending.push_back((seq, bytes));
        self.settle();
        self.ack == seq
    }

    /// Acknowledges what is carried out by now. Where the newest is, the others no longer matter.
    fn settle(&mut self) {
        let mapped = self.mapped;
        if self.pending.back().is_some_and(|(_, bytes)| mapped <= *bytes) {
            self.pending.drain(..self.pending.len() - 1);
        }
        while let Some((seq, _)) = self.pending.front().copied().filter(|(_, bytes)| mapped <= *bytes) {
            self.ack = seq;
            self.pending.pop_front();
        }
    }

    /// True if its program can run: all memory that it needs is resident.
    pub fn is_complete(&self) -> bool {
        self.copying.is_none() && self.mapped >= self.demand.min(self.allowance) && self.mapped <= self.allowance
    }

    /// Begins the next step. With `stays`, its program holds the lock and no memory leaves. Memory that has no
    /// contents yet needs no copy.
    pub fn step(&mut self, now: Time, stays: bool, link: &mut Link) -> Step {
        if self.copying.is_some() {
            return Step::Nothing;
        }
        if self.mapped > self.allowance {
            if stays {
                return Step::Nothing;
            }
            return self.copy(now, Way::Out, self.mapped - self.allowance, link);
        }
        let lacking = self.demand.min(self.allowance).saturating_sub(self.mapped);
        let fresh = self.demand.saturating_sub(self.mapped).saturating_sub(self.swapped);
        if lacking > fresh {
            return self.copy(now, Way::In, lacking - fresh, link);
        }
        if lacking > 0 {
            self.mapped += lacking;
            return Step::Reports;
        }
        Step::Nothing
    }

    fn copy(&mut self, now: Time, way: Way, bytes: u64, link: &mut Link) -> Step {
        let bytes = bytes.min(CHUNK);
        if way == Way::In {
            self.mapped += bytes;
            self.swapped -= bytes;
        }
        self.copying = Some((way, bytes));
        Step::Copies(link.copy(now, way, bytes), way, bytes)
    }

    /// Handles the end of a copy. True if that is reported: incoming memory counts from its allowance on, so only its
    /// end is.
    pub fn copied(&mut self) -> bool {
        if let Some((Way::Out, bytes)) = self.copying.take() {
            self.mapped -= bytes;
            self.swapped += bytes;
            self.settle();
            return true;
        }
        self.is_complete()
    }
}

/// The next step of a program's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// None: the memory is where it should be, or on its way.
    Nothing,
    /// A report: the memory is where it should be now.
    Reports,
    /// A copy of that many bytes, until then.
    Copies(Time, Way, u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Does all that can be done; when that is done, and how much went which way.
    fn run(place: &mut Place, mut now: Time, link: &mut Link) -> (Time, u64, u64) {
        let (mut out, mut back) = (0, 0);
        loop {
            match place.step(now, false, link) {
                Step::Nothing => return (now, out, back),
                Step::Reports => {}
                Step::Copies(at, way, bytes) => {
                    *(if way == Way::Out { &mut out } else { &mut back }) += bytes;
                    now = at;
                    place.copied();
                }
            }
        }
    }

    #[test]
    fn memory_comes_without_a_copy_first_and_leaves_and_returns_with_one() {
        let (mut place, mut link) = (Place::new(3 * GIB), Link::new(GIB));
        place.limited(4 * GIB, 1);
        assert!(place.allocate() && place.is_allocated());
        assert!(place.allow(1, 2 * GIB));
        assert_eq!(run(&mut place, Time::ZERO, &mut link), (Time::ZERO, 0, 0));
        assert!(place.is_complete(), "it has what it may");
        assert!(place.allow(2, 3 * GIB));
        run(&mut place, Time::ZERO, &mut link);
        assert!(!place.allow(3, 2 * GIB) && !place.allow(4, GIB));
        assert_eq!(place.step(Time::ZERO, true, &mut link), Step::Nothing, "its program has the lock");
        assert_eq!(run(&mut place, Time::ZERO, &mut link), (Duration::from_secs(2), 2 * GIB, 0));
        let MemoryReport { ack, mapped, swapped, demand, .. } = place.report();
        assert_eq!((ack, mapped, swapped, demand), (4, GIB, 2 * GIB, 3 * GIB));
        assert!(place.allow(5, 3 * GIB) && !place.is_complete());
        assert_eq!(run(&mut place, Time::ZERO, &mut link), (Duration::from_secs(2), 0, 2 * GIB));
        assert!(place.is_complete());
    }

    #[test]
    fn a_link_carries_each_way_one_after_the_other() {
        let mut link = Link::new(GIB);
        let s = Duration::from_secs;
        assert_eq!(link.copy(s(0), Way::Out, GIB), s(1));
        assert_eq!(link.copy(s(0), Way::Out, GIB), s(2));
        assert_eq!(link.copy(s(0), Way::In, GIB), s(1));
        assert_eq!(link.copy(s(5), Way::In, GIB), s(6));
    }
}
