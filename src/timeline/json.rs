//! Timelines as JSON, which the scheduler sends to `nvsharectl` over D-Bus.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Activity, Lane, Span, Timeline};

/// The version of the format, incremented by each change that older programs cannot read.
const FORMAT: u32 = 1;

/// Times are in seconds. With a `host`, times count from 1970 on the host's clock. Otherwise, times
/// count from the beginning of the timeline.
#[derive(Debug, Serialize, Deserialize)]
struct Document {
    format: u32,
    host: Option<String>,
    begins: f64,
    ends: f64,
    gpus: Vec<Gpu>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Gpu {
    /// The UUID without `GPU-` or `MIG-`.
    uuid: String,
    name: String,
    lanes: Vec<Lanes>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Lanes {
    name: String,
    spans: Vec<(Activity, f64, f64, u64)>,
}

/// Writes the timeline, with the known names of GPUs.
///
/// # Errors
/// The timeline cannot be written as JSON, for example for lack of memory.
pub fn write(timeline: &Timeline, names: &BTreeMap<String, String>) -> Result<Vec<u8>, String> {
    let (begins, ends) = timeline.span.unwrap_or_default();
    let span = |span: &Span| (span.activity, span.from.as_secs_f64(), span.to.as_secs_f64(), span.bytes);
    let lane = |lane: &Lane| Lanes { name: lane.label.clone(), spans: lane.spans.iter().map(span).collect() };
    let gpus = timeline.lanes.iter().map(|(uuid, lanes)| Gpu {
        uuid: uuid.clone(),
        name: names.get(uuid).cloned().unwrap_or_default(),
        lanes: lanes.values().map(lane).collect(),
    });
    let (begins, ends) = (begins.as_secs_f64(), ends.as_secs_f64());
    let document = Document { format: FORMAT, host: timeline.host.clone(), begins, ends, gpus: gpus.collect() };
    serde_json::to_vec(&document).map_err(|e| e.to_string())
}

/// Reads the output of [`write`]. Lanes are numbered from 1.
///
/// # Errors
/// Returns a sentence about the mistake.
pub fn read(text: &[u8]) -> Result<(Timeline, BTreeMap<String, String>), String> {
    let document: Document = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    if document.format != FORMAT {
        return Err(format!("its format is {}, but this nvsharectl reads format {FORMAT}", document.format));
    }
    let time =
        |seconds: f64| Duration::try_from_secs_f64(seconds).map_err(|_| format!("{seconds} is not a valid time"));
    let span = Some((time(document.begins)?, time(document.ends)?));
    let mut timeline = Timeline { host: document.host, span, lanes: BTreeMap::new() };
    let mut names = BTreeMap::new();
    for gpu in document.gpus {
        let mut lanes = BTreeMap::new();
        for (number, lane) in (1u64..).zip(gpu.lanes) {
            let span = |(activity, from, to, bytes): (Activity, f64, f64, u64)| {
                Ok::<_, String>(Span { activity, from: time(from)?, to: time(to)?, bytes })
            };
            let spans = lane.spans.into_iter().map(span).collect::<Result<_, _>>()?;
            lanes.insert(number, Lane { label: lane.name, spans });
        }
        if !gpu.name.is_empty() {
            names.insert(gpu.uuid.clone(), gpu.name);
        }
        timeline.lanes.insert(gpu.uuid, lanes);
    }
    Ok((timeline, names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_round_trips() {
        let second = Duration::from_secs;
        let host = Some("lab3".to_owned());
        let mut timeline = Timeline { host, span: Some((second(5), second(9))), ..Timeline::default() };
        for (client, activity) in [(1, Activity::Holds), (2, Activity::Waits)] {
            let span = Span { activity, from: second(6), to: second(7), bytes: client };
            timeline.lane("0af9", client, || format!("program {client}")).spans.push(span);
        }
        let names = BTreeMap::from([("0af9".to_owned(), "GPU 0  NVIDIA H200".to_owned())]);
        let text = write(&timeline, &names).expect("JSON");
        assert_eq!(read(&text), Ok((timeline, names)));
        assert!(read(b"{}").is_err());
        let newer = String::from_utf8(text).expect("UTF-8").replace("\"format\":1", "\"format\":2");
        assert!(read(newer.as_bytes()).is_err_and(|why| why.contains("format is 2")));
    }
}
