//! Creates a timeline from a recording of the flight recorder.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Activity, Span, Timeline};
use crate::recorder::bundle::Header;
use crate::recorder::replay::{Moment, Replay, What};
use crate::scheduler::Time;

/// Creates the timeline of a replayed recording. Times are from the clock of the recorded host.
/// Clients without a label in `labels` are labelled with their number.
pub fn from_recording(replay: &Replay, labels: &BTreeMap<u64, String>, header: &Header) -> Timeline {
    from_moments(replay.span, replay.moments.iter().chain(&replay.unfinished), labels, header)
}

/// Like [`from_recording`], from moments of the recording.
pub fn from_moments<'a>(
    span: Option<(Time, Time)>,
    moments: impl Iterator<Item = &'a Moment>,
    labels: &BTreeMap<u64, String>,
    header: &Header,
) -> Timeline {
    let epoch = header.epoch();
    let span = span.map(|(first, last)| (epoch + first, epoch + last));
    let mut timeline = Timeline { host: Some(header.host.clone()), span, ..Timeline::default() };
    for Moment { at, client, gpu, what, .. } in moments {
        let at = epoch + *at;
        let span = |activity, took: Duration| Span { activity, from: at.saturating_sub(took), to: at, bytes: 0 };
        let spans = match what {
            What::Granted(waited) => [Some(span(Activity::Waits, *waited)), None],
            What::Released(_, held) => [Some(span(Activity::Holds, *held)), None],
            What::MemoryLeft(bytes, took) => [Some(Span { bytes: *bytes, ..span(Activity::Leaves, *took) }), None],
            What::MemoryReturned(bytes, took) => [Some(Span { bytes: *bytes, ..span(Activity::Returns, *took) }), None],
            What::Left { waited, held } => {
                [waited.map(|waited| span(Activity::Waits, waited)), held.map(|held| span(Activity::Holds, held))]
            }
            What::Revoked | What::Evicted(_) | What::Denied(_) => [None, None],
        };
        let label = || labels.get(&client.0).cloned().unwrap_or_else(|| format!("client {}", client.0));
        timeline.lane(&gpu.0.to_string(), client.0, label).spans.extend(spans.into_iter().flatten());
    }
    timeline
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::{Entry, replay};
    use crate::scheduler::{AntiThrash, ClientId, Command, Event, GpuId, GpuSet, Machine, MemoryReport, Time};

    #[test]
    fn memory_leaves_and_returns_over_its_real_time() {
        let (client, gpu) = (ClientId(1), GpuId(nvshare_wire::Uuid([1; 16])));
        let gpus = GpuSet::from([gpu]);
        let memory = |mapped, swapped| Event::Memory {
            client,
            gpu,
            report: MemoryReport { mapped, swapped, ..MemoryReport::default() },
        };
        let allowance = |bytes| vec![Command::Allowance { client, gpu, seq: 1, bytes }];
        let grant = vec![Command::Grant { client, gpus: gpus.clone() }];
        let entries = [
            (0, Event::Requested { client, gpus: gpus.clone() }, allowance(100)),
            (1000, memory(100, 0), grant.clone()),
            (5000, Event::Tick, allowance(20)),
            (5400, memory(60, 40), vec![]),
            (5900, memory(20, 70), vec![]),
            (8000, Event::Tick, allowance(100)),
            (8100, Event::Tick, grant),
            (8500, memory(90, 0), vec![]),
        ];
        let entries = (1..).zip(entries).map(|(number, (ms, event, commands))| {
            Ok::<_, ()>(Entry { number, at: Time::from_millis(ms), event, commands })
        });
        let replay =
            replay::replay(Machine::new(scheduler_sim::settings(AntiThrash::Auto, Duration::from_secs(1))), entries)
                .expect("entries");
        let header = Header {
            format: 1,
            version: String::new(),
            protocol: (1, 1),
            host: "lab3".into(),
            kernel: String::new(),
            driver: None,
            nvml: None,
            made: 500_000_000,
            now_ns: 400_000_000_000,
            command_lines: false,
        };
        let timeline = from_recording(&replay, &BTreeMap::new(), &header);
        assert_eq!(
            (timeline.host.as_deref(), timeline.span),
            (Some("lab3"), Some((Duration::from_secs(100), Duration::from_millis(108_500))))
        );
        let lane = timeline.lanes.values().next().and_then(|lanes| lanes.get(&1)).expect("the program");
        let moves = lane.spans.iter().filter(|span| span.bytes > 0);
        let moves: Vec<_> =
            moves.map(|span| (span.activity, span.from.as_millis(), span.to.as_millis(), span.bytes)).collect();
        assert_eq!(moves, [(Activity::Leaves, 105_000, 105_900, 80), (Activity::Returns, 108_100, 108_500, 70)]);
    }
}
