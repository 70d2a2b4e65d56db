//! Timelines: who held a GPU when, who waited for it, and when memory moved, as a picture.
//!
//! - `recording`: from what the flight recorder has.
//! - `svg` and `text`: draw it; `axis`: the times below. `json`: writes and reads it.

mod axis;
pub mod json;
mod recording;
pub mod svg;
pub mod text;

pub use recording::from_recording;

use std::collections::BTreeMap;
use std::time::Duration;

/// What a program did on a GPU for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// It waited for the lock.
    Waits,
    /// It held the lock.
    Holds,
    /// Its memory went to the host.
    Leaves,
    /// Its memory came from the host.
    Returns,
}

/// From when to when, in the timeline's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub activity: Activity,
    pub from: Duration,
    pub to: Duration,
    /// What moved; 0 where nothing did.
    pub bytes: u64,
}

impl Span {
    /// A span that took no time and moved nothing is not: a grant without a wait, for instance.
    fn is_seen(&self) -> bool {
        self.to > self.from || self.bytes > 0
    }
}

/// One program on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lane {
    pub label: String,
    /// In the order of their ends.
    pub spans: Vec<Span>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The host whose clock the times are of, since 1970. `None`: they are since the beginning.
    pub host: Option<String>,
    /// The first moment and the last.
    pub span: Option<(Duration, Duration)>,
    /// By the GPU's UUID, and the number of the client.
    pub lanes: BTreeMap<String, BTreeMap<u64, Lane>>,
}

impl Timeline {
    fn reach(&mut self, at: Duration) {
        let (first, last) = self.span.unwrap_or((at, at));
        self.span = Some((first.min(at), last.max(at)));
    }

    pub(crate) fn lane(&mut self, gpu: &str, client: u64, label: impl FnOnce() -> String) -> &mut Lane {
        let lanes = self.lanes.entry(gpu.to_owned()).or_default();
        lanes.entry(client).or_insert_with(|| Lane { label: label(), spans: Vec::new() })
    }

    /// Adds the lanes of another timeline, which may be of another time: its GPUs are to be named by `name` of their names.
    pub fn append(&mut self, other: Self, name: impl Fn(&str) -> String) {
        let (first, last) = other.span.unwrap_or_default();
        self.reach(first);
        self.reach(last);
        self.lanes.extend(other.lanes.into_iter().map(|(gpu, lanes)| (name(&gpu), lanes)));
    }

    /// Begins with the first span.
    pub fn cut_blank_beginning(&mut self) {
        let spans = self.lanes.values().flat_map(BTreeMap::values).flat_map(|lane| &lane.spans);
        if let (Some((begin, _)), Some(first)) = (&mut self.span, spans.map(|span| span.from).min()) {
            *begin = first.max(*begin);
        }
    }

    /// Leaves only what happened within `last` before the end. A span that began earlier is cut.
    pub fn keep_last(&mut self, last: Duration) {
        let Some((first, end)) = self.span else { return };
        let begin = end.saturating_sub(last).max(first);
        self.span = Some((begin, end));
        for lane in self.lanes.values_mut().flat_map(BTreeMap::values_mut) {
            lane.spans.retain(|span| span.to >= begin);
            lane.spans.iter_mut().for_each(|span| span.from = span.from.max(begin));
        }
        self.lanes.values_mut().for_each(|lanes| lanes.retain(|_, lane| !lane.spans.is_empty()));
    }

    /// Leaves only this GPU, named by its UUID with or without the prefix, or by the beginning of one. `false` if there is none.
    pub fn keep_gpu(&mut self, name: &str) -> bool {
        let plain = |name: &str| name.trim_start_matches("GPU-").trim_start_matches("MIG-").to_ascii_lowercase();
        let wanted = plain(name);
        self.lanes.retain(|gpu, _| !wanted.is_empty() && plain(gpu).starts_with(&wanted));
        !self.lanes.is_empty()
    }
}

/// The lanes of the programs that held or moved for the longest time, in their own order.
fn busiest<'a>(lanes: impl Iterator<Item = &'a Lane>, most: usize) -> Vec<&'a Lane> {
    let mut all: Vec<(usize, &Lane)> = lanes.enumerate().collect();
    if all.len() > most {
        let busy = |lane: &Lane| lane.spans.iter().map(|span| span.to.saturating_sub(span.from)).sum::<Duration>();
        all.sort_by_key(|(_, lane)| std::cmp::Reverse(busy(lane)));
        all.truncate(most);
        all.sort_by_key(|(place, _)| *place);
    }
    all.into_iter().map(|(_, lane)| lane).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_last_seconds_of_one_gpu_are_left() {
        let mut timeline = Timeline::default();
        let holds = |from, to| Span { activity: Activity::Holds, from: at(from), to: at(to), bytes: 0 };
        for (gpu, spans) in [("0af9", [holds(0, 1000), holds(4000, 9000)]), ("1af9", [holds(0, 10), holds(20, 30)])] {
            timeline.lane(gpu, 1, || "x".into()).spans.extend(spans);
        }
        timeline.reach(at(0));
        timeline.reach(at(10_000));
        timeline.lanes.get_mut("0af9").and_then(|lanes| lanes.get_mut(&1)).expect("a lane").spans[0].from = at(700);
        timeline.lanes.get_mut("1af9").expect("a GPU").clear();
        timeline.cut_blank_beginning();
        assert_eq!(timeline.span, Some((at(700), at(10_000))));
        timeline.keep_last(at(5000));
        assert_eq!(timeline.span, Some((at(5000), at(10_000))));
        assert_eq!(timeline.lanes["0af9"][&1].spans, [holds(5000, 9000)]);
        assert!(timeline.lanes["1af9"].is_empty());
        assert!(timeline.keep_gpu("GPU-0A"));
        assert_eq!(timeline.lanes.len(), 1);
        assert!(!timeline.keep_gpu("GPU-2"));
    }
}
