//! Timelines of a scheduler's trace.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead};
use std::time::Duration;

use serde::Deserialize;

use super::{Activity, Span, Timeline};

/// Moves that follow each other within this time are shown as one.
const PAUSE: Duration = Duration::from_millis(50);

/// Why a trace cannot be read.
#[derive(Debug)]
pub enum TraceError {
    Unreadable(io::Error),
    /// That line is none of a trace.
    Malformed(usize, serde_json::Error),
    Empty,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(e) => write!(f, "cannot be read: {e}"),
            Self::Malformed(line, e) => {
                write!(f, "line {line} is not a line of a trace, which `nvshare-scheduler --trace` writes: {e}")
            }
            Self::Empty => f.write_str("has no events"),
        }
    }
}

impl std::error::Error for TraceError {}

#[derive(Deserialize)]
struct Event {
    ms: f64,
    client: u64,
    pid: i32,
    what: String,
    #[serde(default)]
    gpu: Option<String>,
    #[serde(default)]
    bytes: u64,
}

/// What is under way for a client on a GPU.
#[derive(Debug, Default)]
struct Open {
    waits: Option<Duration>,
    holds: Option<Duration>,
    /// From when to when, and how much; from the eviction's request on.
    leaves: Option<(Duration, Duration, u64)>,
    returns: Option<(Duration, Duration, u64)>,
    /// Bytes in host memory.
    away: u64,
}

/// Reads a trace. Its last line may be cut off, as the scheduler may still be writing.
///
/// # Errors
/// It cannot be read, another line is not one of a trace, or there is none.
pub fn from_trace(trace: impl BufRead) -> Result<Timeline, TraceError> {
    let (mut timeline, mut open, mut malformed) = (Timeline::default(), BTreeMap::new(), None);
    for (number, line) in trace.lines().enumerate() {
        let line = line.map_err(TraceError::Unreadable)?;
        if let Some((number, error)) = malformed.take() {
            return Err(TraceError::Malformed(number, error));
        }
        match serde_json::from_str::<Event>(&line) {
            Ok(event) => happened(&mut timeline, &mut open, &event),
            Err(error) => malformed = Some((number + 1, error)),
        }
    }
    let Some((_, end)) = timeline.span else {
        return Err(malformed.map_or(TraceError::Empty, |(number, error)| TraceError::Malformed(number, error)));
    };
    for ((client, gpu), mut open) in open {
        open.end(&mut timeline, &gpu, client, end);
    }
    Ok(timeline)
}

type AllOpen = BTreeMap<(u64, String), Open>;

fn happened(timeline: &mut Timeline, all: &mut AllOpen, event: &Event) {
    let now = Duration::try_from_secs_f64(event.ms / 1e3).unwrap_or_default();
    timeline.reach(now);
    let Event { client, pid, bytes, .. } = *event;
    if event.what == "disconnect" {
        let gpus: Vec<String> = all.keys().filter(|(of, _)| *of == client).map(|(_, gpu)| gpu.clone()).collect();
        for gpu in gpus {
            if let Some(mut open) = all.remove(&(client, gpu.clone())) {
                open.end(timeline, &gpu, client, now);
            }
        }
        return;
    }
    let Some(gpu) = event.gpu.as_deref().filter(|_| client != 0) else { return };
    let open = all.entry((client, gpu.to_owned())).or_default();
    timeline.lane(gpu, client, || format!("client {client} (PID {pid})"));
    let mut add = |span: Option<Span>| timeline.lane(gpu, client, String::new).spans.extend(span);
    match event.what.as_str() {
        "request" => open.waits = open.waits.or(Some(now)),
        "cancel" => open.waits = None,
        "grant" => {
            add(open.waits.take().map(|since| span(Activity::Waits, since, now)));
            open.holds = Some(now);
        }
        "release" => add(open.holds.take().map(|since| span(Activity::Holds, since, now))),
        "evict" => {
            add(moved(Activity::Returns, open.returns.take()));
            if open.leaves.is_none_or(|(_, to, moved)| moved > 0 && to + PAUSE < now) {
                add(moved(Activity::Leaves, open.leaves.replace((now, now, 0))));
            }
        }
        // What a program frees on its own account goes nowhere.
        "freed" => {
            if let Some((_, to, left)) = &mut open.leaves {
                (*to, *left) = (now, *left + bytes);
                open.away += bytes;
            }
        }
        "mapped" => {
            add(moved(Activity::Leaves, open.leaves.take()));
            let back = bytes.min(open.away);
            if back > 0 {
                open.away -= back;
                match &mut open.returns {
                    Some((_, to, came)) if *to + PAUSE >= now => (*to, *came) = (now, *came + back),
                    _ => add(moved(Activity::Returns, open.returns.replace((now, now, back)))),
                }
            }
        }
        _ => {}
    }
}

fn span(activity: Activity, from: Duration, to: Duration) -> Span {
    Span { activity, from, to, bytes: 0 }
}

fn moved(activity: Activity, moved: Option<(Duration, Duration, u64)>) -> Option<Span> {
    moved.filter(|(_, _, bytes)| *bytes > 0).map(|(from, to, bytes)| Span { activity, from, to, bytes })
}

impl Open {
    /// The client is gone from this GPU, or the trace ends.
    fn end(&mut self, timeline: &mut Timeline, gpu: &str, client: u64, now: Duration) {
        let spans = [
            self.waits.take().map(|since| span(Activity::Waits, since, now)),
            self.holds.take().map(|since| span(Activity::Holds, since, now)),
            moved(Activity::Leaves, self.leaves.take()),
            moved(Activity::Returns, self.returns.take()),
        ];
        timeline.lane(gpu, client, || format!("client {client}")).spans.extend(spans.into_iter().flatten());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const GPU: &str = "0af9a32c-de71-684f-006a-5a23f6738ca2";

    fn line(ms: f64, client: u64, what: &str, bytes: u64) -> String {
        json!({ "ms": ms, "client": client, "pid": 100 + client, "gpu": GPU, "what": what, "bytes": bytes }).to_string()
    }

    fn read(lines: &[String]) -> Result<Timeline, TraceError> {
        from_trace(lines.join("\n").as_bytes())
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_hand_over_is_read() {
        let timeline = read(&[
            line(0.0, 1, "attach", 0),
            line(0.0, 1, "request", 0),
            line(0.0, 1, "grant", 0),
            line(100.0, 2, "request", 0),
            line(1000.0, 1, "release", 0),
            line(1000.0, 1, "evict", 300),
            line(1000.0, 1, "request", 0),
            line(1200.0, 1, "freed", 100),
            line(1500.0, 1, "freed", 200),
            line(1500.0, 2, "grant", 0),
            line(2500.0, 2, "release", 0),
            line(2500.0, 1, "grant", 0),
            line(2510.0, 1, "mapped", 100),
            line(2520.0, 1, "mapped", 200),
            line(2530.0, 1, "mapped", 50), // new memory
            json!({ "ms": 3000.0, "client": 1, "pid": 101, "what": "disconnect" }).to_string(),
        ])
        .expect("a trace");
        let lanes = &timeline.lanes[GPU];
        assert_eq!((lanes[&1].label.as_str(), timeline.span), ("client 1 (PID 101)", Some((at(0), at(3000)))));
        let spans =
            |client| lanes[&client].spans.iter().map(|s| (s.activity, s.from, s.to, s.bytes)).collect::<Vec<_>>();
        assert_eq!(
            spans(1),
            [
                (Activity::Waits, at(0), at(0), 0),
                (Activity::Holds, at(0), at(1000), 0),
                (Activity::Waits, at(1000), at(2500), 0),
                (Activity::Leaves, at(1000), at(1500), 300),
                (Activity::Holds, at(2500), at(3000), 0),
                (Activity::Returns, at(2510), at(2520), 300),
            ]
        );
        assert_eq!(spans(2), [(Activity::Waits, at(100), at(1500), 0), (Activity::Holds, at(1500), at(2500), 0)]);
    }

    #[test]
    fn memory_that_a_program_frees_has_not_moved() {
        let timeline = read(&[line(0.0, 1, "mapped", 100), line(1.0, 1, "freed", 100)]).expect("a trace");
        assert_eq!(timeline.lanes[GPU][&1].spans, []);
    }

    #[test]
    fn a_last_line_may_be_cut_off_and_no_other() {
        let (good, bad) = (line(0.0, 1, "request", 0), "{\"ms\":1,".to_owned());
        assert!(read(&[good.clone(), bad.clone()]).is_ok());
        assert!(matches!(read(&[good.clone(), bad.clone(), good]), Err(TraceError::Malformed(2, _))));
        assert!(matches!(read(&[bad]), Err(TraceError::Malformed(1, _))));
        assert!(matches!(read(&[]), Err(TraceError::Empty)));
    }
}
