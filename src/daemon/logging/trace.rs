//! The event trace (`--trace FILE`): one JSON object a line for every move of a lock or of memory, and what moves over
//! the link, for timelines and tests. Not a log: it has a fixed form and no words for people.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::scheduler::thrash::Sample;
use crate::scheduler::{ClientId, GpuId, Time, Traffic};

#[derive(Debug)]
pub struct Trace(File);

impl Trace {
    pub fn create(path: &Path) -> io::Result<Self> {
        File::create(path).map(Self)
    }

    pub fn write(&mut self, now: Time, client: ClientId, pid: i32, gpu: Option<GpuId>, what: &str, bytes: Option<u64>) {
        self.put(now, json!({ "client": client.0, "pid": pid, "what": what }), gpu, bytes);
    }

    /// Writes a measurement of traffic, and the figures that it is compared with; `null` if it is not available. It
    /// belongs to no client.
    pub fn traffic(&mut self, now: Time, gpu: GpuId, sample: &Sample) {
        let Traffic { to_gpu, from_gpu, faults } = sample.traffic;
        let Sample { demand, capacity, link, is_ordered, .. } = *sample;
        let line = json!({
            "client": 0, "pid": 0, "what": "traffic", "to_gpu": to_gpu, "from_gpu": from_gpu, "faults": faults,
            "demand": demand, "capacity": capacity, "link": link, "ordered": is_ordered,
        });
        self.put(now, line, Some(gpu), None);
    }

    /// The time is `CLOCK_MONOTONIC`, so that it can be laid beside what programs measured themselves.
    fn put(&mut self, now: Time, mut line: Value, gpu: Option<GpuId>, bytes: Option<u64>) {
        if let Value::Object(fields) = &mut line {
            fields.insert("ms".into(), (now.as_micros() as f64 / 1000.0).into());
            if let Some(gpu) = gpu {
                fields.insert("gpu".into(), gpu.0.to_string().into());
            }
            if let Some(bytes) = bytes {
                fields.insert("bytes".into(), bytes.into());
            }
        }
        // One write for each line, so that a reader who follows the file sees whole lines. A full disk must not stop
        // the daemon.
        let _ = self.0.write_all(format!("{line}\n").as_bytes());
    }
}
