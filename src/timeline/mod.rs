//! Timelines: pictures of the holders, waiting clients and moved memory of each GPU over time.
//!
//! - `recording`: creates timelines from the flight recorder.
//! - `svg` and `text`: draw timelines.
//! - `axis`: computes the times below a timeline.
//! - `json`: writes and reads timelines.

mod axis;
pub mod json;
mod recording;
pub mod svg;
pub mod text;

pub use recording::{from_moments, from_recording};

use std::collections::BTreeMap;
use std::time::Duration;

/// A program's activity on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// The program waits for the lock.
    Waits,
    /// The program holds the lock.
    Holds,
    /// The program's memory is evicted to the host.
    Leaves,
    /// The program's memory is restored from the host.
    Returns,
}

/// A period of an activity. `from` and `to` are times of the timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub activity: Activity,
    pub from: Duration,
    pub to: Duration,
    /// The moved bytes, or 0 if no memory moved.
    pub bytes: u64,
}

impl Span {
    /// Returns true if the span is visible, because it has a duration or memory moved in it.
    fn is_seen(&self) -> bool {
        self.to > self.from || self.bytes > 0
    }
}

/// One program on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lane {
    pub label: String,
    /// The spans, ordered by their ends.
    pub spans: Vec<Span>,
}

impl Lane {
    /// Joins spans of the same activity that are at most `gap` apart.
    fn join(&mut self, gap: Duration) {
        self.spans.sort_by_key(|span| (span.activity, span.from));
        self.spans.dedup_by(|next, before| {
            let is_near = next.activity == before.activity && next.from <= before.to.saturating_add(gap);
            if is_near {
                before.to = before.to.max(next.to);
                before.bytes = before.bytes.saturating_add(next.bytes);
            }
            is_near
        });
        self.spans.sort_by_key(|span| span.to);
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The host whose clock gives the times, counted from 1970. `None`: times count from the
    /// beginning of the timeline.
    pub host: Option<String>,
    /// The first and the last moment.
    pub span: Option<(Duration, Duration)>,
    /// The lanes, by the GPU's UUID and the client's number.
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

    /// Adds the lanes of another timeline, which may cover a different period. `name` returns the
    /// new name of each GPU of the other timeline.
    pub fn append(&mut self, other: Self, name: impl Fn(&str) -> String) {
        let (first, last) = other.span.unwrap_or_default();
        self.reach(first);
        self.reach(last);
        self.lanes.extend(other.lanes.into_iter().map(|(gpu, lanes)| (name(&gpu), lanes)));
    }

    /// Moves the timeline's beginning to the first span.
    pub fn cut_blank_beginning(&mut self) {
        let spans = self.lanes.values().flat_map(BTreeMap::values).flat_map(|lane| &lane.spans);
        if let (Some((begin, _)), Some(first)) = (&mut self.span, spans.map(|span| span.from).min()) {
            *begin = first.max(*begin);
        }
    }

    /// Keeps only the last `last` of the timeline. Earlier beginnings of spans are cut.
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

    /// Keeps the `lanes` busiest lanes of each GPU, and joins spans that are closer than a pixel, until
    /// at most `spans` spans are left. `pixels`: the width of the picture.
    pub fn thin(&mut self, lanes: usize, spans: usize, pixels: u32) {
        for all in self.lanes.values_mut() {
            let busy: Vec<u64> = busiest(all.iter(), lanes, |(_, lane)| lane).iter().map(|(id, _)| **id).collect();
            all.retain(|client, _| busy.contains(client));
        }
        let (first, last) = self.span.unwrap_or_default();
        let mut gap = last.saturating_sub(first) / pixels.max(1);
        loop {
            let all = || self.lanes.values().flat_map(BTreeMap::values);
            if all().map(|lane| lane.spans.len()).sum::<usize>() <= spans || gap > last.saturating_sub(first) {
                return;
            }
            self.lanes.values_mut().flat_map(BTreeMap::values_mut).for_each(|lane| lane.join(gap));
            gap = (gap * 2).max(Duration::from_millis(1));
        }
    }

    /// Keeps only the GPU `name`, which is a UUID or a prefix of a UUID, with or without `GPU-` or
    /// `MIG-`. Returns false if the GPU does not exist.
    pub fn keep_gpu(&mut self, name: &str) -> bool {
        let plain = |name: &str| name.trim_start_matches("GPU-").trim_start_matches("MIG-").to_ascii_lowercase();
        let wanted = plain(name);
        self.lanes.retain(|gpu, _| !wanted.is_empty() && plain(gpu).starts_with(&wanted));
        !self.lanes.is_empty()
    }
}

/// Returns the `most` items whose lanes' programs held the GPU or moved memory longest, in their
/// original order.
fn busiest<T>(items: impl Iterator<Item = T>, most: usize, lane: impl Fn(&T) -> &Lane) -> Vec<T> {
    let mut all: Vec<(usize, T)> = items.enumerate().collect();
    if all.len() > most {
        let busy = |lane: &Lane| lane.spans.iter().map(|span| span.to.saturating_sub(span.from)).sum::<Duration>();
        all.sort_by_key(|(_, item)| std::cmp::Reverse(busy(lane(item))));
        all.truncate(most);
        all.sort_by_key(|(place, _)| *place);
    }
    all.into_iter().map(|(_, item)| item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn thinning_joins_spans_and_keeps_the_busiest_lanes() {
        let mut timeline = Timeline { span: Some((at(0), at(1000))), ..Timeline::default() };
        for client in 1..=3 {
            let spans = (0..100).map(|turn| Span {
                activity: if turn % 2 == 0 { Activity::Holds } else { Activity::Leaves },
                from: at(turn * 10),
                to: at(turn * 10 + client),
                bytes: turn % 2,
            });
            timeline.lane("0af9", client, || "x".into()).spans.extend(spans);
        }
        let mut all = timeline.clone();
        all.thin(3, 300, 100);
        assert_eq!(all, timeline, "nothing is joined that has room");
        timeline.thin(2, 4, 100);
        let lanes = &timeline.lanes["0af9"];
        assert_eq!(lanes.keys().copied().collect::<Vec<_>>(), [2, 3]);
        let moved = Span { activity: Activity::Leaves, from: at(10), to: at(992), bytes: 50 };
        let held = Span { activity: Activity::Holds, from: at(0), to: at(982), bytes: 0 };
        assert_eq!(lanes[&2].spans, [held, moved]);
    }

    #[test]
    fn trimming_keeps_the_last_seconds_of_one_gpu() {
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
