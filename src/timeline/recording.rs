//! Timelines of a recording of the flight recorder. It says how much memory a program was asked to evict, but not when it had left.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Activity, Span, Timeline};
use crate::recorder::replay::{Moment, Replay, What};

/// The timeline of a replayed recording; `labels` has a text for each client that is known by more than its number.
pub fn from_recording(replay: &Replay, labels: &BTreeMap<u64, String>) -> Timeline {
    let mut timeline = Timeline { span: replay.span, ..Timeline::default() };
    for Moment { at, client, gpu, what, .. } in replay.moments.iter().chain(&replay.unfinished) {
        let span = |activity, took: Duration| Span { activity, from: at.saturating_sub(took), to: *at, bytes: 0 };
        let spans = match what {
            What::Granted(waited) => [Some(span(Activity::Waits, *waited)), None],
            What::Released(_, held) => [Some(span(Activity::Holds, *held)), None],
            What::Evicted(bytes) => [Some(Span { bytes: *bytes, ..span(Activity::Leaves, Duration::ZERO) }), None],
            What::Left { waited, held } => {
                [waited.map(|waited| span(Activity::Waits, waited)), held.map(|held| span(Activity::Holds, held))]
            }
            What::Revoked | What::Denied(_) => [None, None],
        };
        let label = || labels.get(&client.0).cloned().unwrap_or_else(|| format!("client {}", client.0));
        timeline.lane(&gpu.0.to_string(), client.0, label).spans.extend(spans.into_iter().flatten());
    }
    timeline
}
