//! The event trace (`--trace FILE`): one JSON object a line for every move of a lock or of memory, for
//! timelines and tests. Not a log: it has a fixed form and no words for people.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::scheduler::{ClientId, GpuId, Time};

#[derive(Debug)]
pub struct Trace(File);

impl Trace {
    pub fn create(path: &Path) -> io::Result<Self> {
        File::create(path).map(Self)
    }

    pub fn write(&mut self, now: Time, client: ClientId, pid: i32, gpu: Option<GpuId>, what: &str, bytes: Option<u64>) {
        self.put(now, json!({ "client": client.0, "pid": pid, "what": what }), gpu, bytes);
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
