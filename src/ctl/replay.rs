//! `nvsharectl simulate --replay`: the contents of a debug bundle, as tables or as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::CtlError;
use super::table::{Align, Table};
use crate::config::units;
use crate::recorder::bundle::{self, Bundle, Header, Process, nanos};
use crate::recorder::replay::{self, Difference, Moment, Replay, Tally, What};
use crate::scheduler::{Command, GpuId, ReleaseReason, Time};

/// The output, and the exit code, which is 1 if the commands differ from the recorded commands.
#[derive(Debug)]
pub struct Output {
    pub text: String,
    pub exit_code: u8,
}

/// A replayed bundle.
struct Replayed {
    header: Header,
    /// The GPUs, in the format of `nvsharectl status --json`.
    status: Value,
    clients: BTreeMap<u64, Process>,
    /// The line of the first entry that differs.
    line: Option<usize>,
    replay: Replay,
}

/// Replays the bundle in that file.
pub fn replay(file: &Path, json: bool) -> Result<Output, CtlError> {
    let shown = file.display();
    let opened = File::open(file).map_err(|e| CtlError::Failed(format!("cannot open {shown}: {e}")))?;
    let failed = |e: bundle::ReadError| CtlError::Failed(format!("{shown}, {e}"));
    let Bundle { header, status, checkpoint, mut entries } = bundle::read(BufReader::new(opened)).map_err(failed)?;
    let replay = replay::replay(checkpoint, &mut entries).map_err(failed)?;
    let replayed = Replayed {
        header,
        status,
        line: replay.difference.as_ref().map(|difference| entries.line(difference.at)),
        clients: entries.clients,
        replay,
    };
    let exit_code = u8::from(replayed.replay.difference.is_some());
    let text = if json { format!("{:#}\n", replayed.json()) } else { replayed.text() };
    Ok(Output { text, exit_code })
}

impl Replayed {
    fn text(&self) -> String {
        let mut parts = vec![self.heading(), self.clients()];
        if !self.replay.moments.is_empty() {
            parts.push(self.timeline());
        }
        join(parts)
    }

    fn heading(&self) -> Vec<String> {
        let Header { version, kernel, driver, .. } = &self.header;
        let driver = driver.as_ref().map_or_else(|| "not known".to_owned(), Clone::clone);
        let took = self.replay.span.map_or(Duration::ZERO, |(first, last)| last.saturating_sub(first));
        let mut lines = vec![
            format!("nvshare {version}, driver {driver}, Linux {kernel}"),
            format!("{} events in {}", self.replay.entries, units::duration(took)),
        ];
        match &self.replay.difference {
            None => lines.push("The scheduler's decisions match the recording.".into()),
            Some(Difference { number, event, command, recorded, replayed, .. }) => {
                let shown = |command: &Option<Command>| command.as_ref().map_or_else(|| "none".to_owned(), notation);
                lines.push(format!(
                    "The scheduler's decisions differ from the recording from entry {number} on (line {}):",
                    self.line.unwrap_or_default()
                ));
                lines.push(format!("  event      {}", notation(event)));
                lines.push(format!("  command    number {}", command + 1));
                lines.push(format!("  recorded   {}", shown(recorded)));
                lines.push(format!("  replayed   {}", shown(replayed)));
                let own = env!("CARGO_PKG_VERSION");
                if version != own {
                    lines.push(format!("The bundle is from version {version}, but this nvsharectl is version {own}."));
                }
            }
        }
        lines
    }

    fn clients(&self) -> Vec<String> {
        let right =
            ["WAITED", "LONGEST", "HELD", "GRANTS", "REVOKES", "RELEASES", "EVICTIONS", "EVICTED", "FAILED", "REFUSED"];
        let left = [("CLIENT", Align::Right), ("PID", Align::Right), ("UNIT", Align::Left), ("GPU", Align::Left)];
        let columns: Vec<(&str, Align)> = left.into_iter().chain(right.map(|name| (name, Align::Right))).collect();
        let mut table = Table::new(&columns);
        let gpus = self.gpu_names();
        for ((client, gpu), tally) in &self.replay.clients {
            let Tally { waited, longest_wait, held, grants, revokes, releases, failed_mappings, .. } = *tally;
            let Tally { evictions, evicted, denials, .. } = *tally;
            let (pid, unit) = self.process(client.0);
            let mut row = vec![client.0.to_string(), pid, unit, name_of(&gpus, *gpu)];
            row.extend([waited, longest_wait, held].map(units::fine_duration));
            row.extend([grants, revokes, releases, evictions].map(|count| count.to_string()));
            row.push(units::size(evicted));
            row.extend([failed_mappings, denials].map(|count| count.to_string()));
            table.row(row);
        }
        table.lines()
    }

    fn timeline(&self) -> Vec<String> {
        let right = [("ENTRY", Align::Right), ("TIME", Align::Right), ("CLIENT", Align::Right)];
        let mut table = Table::new(&[right[0], right[1], right[2], ("GPU", Align::Left), ("WHAT", Align::Left)]);
        let gpus = self.gpu_names();
        let begin = self.replay.span.map_or(Time::ZERO, |(first, _)| first);
        for Moment { entry, at, client, gpu, what } in &self.replay.moments {
            let time = format!("{:.6} s", at.saturating_sub(begin).as_secs_f64());
            table.row(vec![entry.to_string(), time, client.0.to_string(), name_of(&gpus, *gpu), in_words(what)]);
        }
        table.lines()
    }

    /// The PID and the unit of a client.
    fn process(&self, client: u64) -> (String, String) {
        let Some(Process { pid, unit, .. }) = self.clients.get(&client) else { return ("-".into(), "-".into()) };
        let pid = if *pid > 0 { pid.to_string() } else { "?".into() };
        (pid, if unit.is_empty() { "-".into() } else { unit.clone() })
    }

    /// Returns the indices of GPUs, if they are known and unique.
    fn gpu_names(&self) -> BTreeMap<GpuId, String> {
        let gpus = self.status["gpus"].as_array().into_iter().flatten();
        let numbered: Vec<(String, String)> = gpus
            .filter_map(|gpu| Some((gpu["uuid"].as_str()?.to_owned(), gpu["index"].as_u64()?.to_string())))
            .collect();
        let all: BTreeSet<GpuId> = self.replay.clients.keys().map(|(_, gpu)| *gpu).collect();
        let name = |gpu: GpuId| {
            let uuid = gpu.0.to_string();
            let (_, number) = numbered.iter().find(|(name, _)| name.ends_with(&uuid))?;
            let is_one = numbered.iter().filter(|(_, other)| other == number).count() == 1;
            is_one.then(|| (gpu, number.clone()))
        };
        all.into_iter().filter_map(name).collect()
    }

    fn json(&self) -> Value {
        let begin = self.replay.span.map_or(Time::ZERO, |(first, _)| first);
        let took = self.replay.span.map_or(Duration::ZERO, |(first, last)| last.saturating_sub(first));
        let difference = self.replay.difference.as_ref().map(|difference| {
            let Difference { number, event, command, recorded, replayed, .. } = difference;
            json!({
                "entry": number, "line": self.line, "event": event, "command": command + 1,
                "recorded": recorded, "replayed": replayed,
            })
        });
        let clients = self.replay.clients.iter().map(|((client, gpu), tally)| {
            json!({
                "client": client, "gpu": gpu,
                "wait-time": tally.waited.as_secs_f64(), "longest-wait": tally.longest_wait.as_secs_f64(),
                "lock-time": tally.held.as_secs_f64(), "grants": tally.grants, "revokes": tally.revokes,
                "releases": tally.releases, "evictions": tally.evictions, "evicted": tally.evicted,
                "failed-mappings": tally.failed_mappings, "denials": tally.denials,
            })
        });
        let timeline = self.replay.moments.iter().map(|Moment { entry, at, client, gpu, what }| {
            let mut moment = json!({
                "entry": entry, "at-ns": nanos(*at), "seconds": at.saturating_sub(begin).as_secs_f64(),
                "client": client, "gpu": gpu,
            });
            let (name, key, value) = match what {
                What::Granted(waited) => ("granted", "waited", json!(waited.as_secs_f64())),
                What::Revoked => ("revoked", "", Value::Null),
                What::Released(reason, held) => {
                    moment["reason"] = json!(reason);
                    ("released", "held", json!(held.as_secs_f64()))
                }
                What::Evicted(bytes) => ("evicted", "bytes", json!(bytes)),
                What::MemoryLeft(bytes, took) | What::MemoryReturned(bytes, took) => {
                    moment["seconds-taken"] = json!(took.as_secs_f64());
                    let name = if matches!(what, What::MemoryLeft(..)) { "memory-left" } else { "memory-returned" };
                    (name, "bytes", json!(bytes))
                }
                What::Denied(bytes) => ("denied", "bytes", json!(bytes)),
                What::Left { waited, held } => {
                    moment["waited"] = json!(waited.map(|waited| waited.as_secs_f64()));
                    ("left", "held", json!(held.map(|held| held.as_secs_f64())))
                }
            };
            moment["what"] = name.into();
            if !key.is_empty() {
                moment[key] = value;
            }
            moment
        });
        json!({
            "version": self.header.version,
            "kernel": self.header.kernel,
            "driver": self.header.driver,
            "entries": self.replay.entries,
            "seconds": took.as_secs_f64(),
            "same": self.replay.difference.is_none(),
            "difference": difference,
            "clients": clients.collect::<Vec<_>>(),
            "timeline": timeline.collect::<Vec<_>>(),
        })
    }
}

/// Joins paragraphs with blank lines.
fn join(paragraphs: Vec<Vec<String>>) -> String {
    paragraphs.into_iter().map(|lines| lines.join("\n") + "\n").collect::<Vec<_>>().join("\n")
}

fn name_of(names: &BTreeMap<GpuId, String>, gpu: GpuId) -> String {
    names.get(&gpu).cloned().unwrap_or_else(|| gpu.0.to_string())
}

fn in_words(what: &What) -> String {
    match what {
        What::Granted(waited) => format!("granted after {}", units::fine_duration(*waited)),
        What::Revoked => "revoked".into(),
        What::Released(reason, held) => {
            let why = match reason {
                ReleaseReason::Idle => "idle",
                ReleaseReason::Revoked => "revoked",
                ReleaseReason::NoMemory => "mapping its memory failed",
                ReleaseReason::Gone => "its context was destroyed",
            };
            format!("released after {} ({why})", units::fine_duration(*held))
        }
        What::Evicted(bytes) => format!("asked to evict {}", units::size(*bytes)),
        What::MemoryLeft(bytes, took) => {
            format!("{} evicted within {}", units::size(*bytes), units::fine_duration(*took))
        }
        What::MemoryReturned(bytes, took) => {
            format!("{} restored within {}", units::size(*bytes), units::fine_duration(*took))
        }
        What::Denied(bytes) => format!("refused a limit of {}", units::size(*bytes)),
        What::Left { held: Some(held), .. } => {
            format!("disconnected after holding the lock for {}", units::fine_duration(*held))
        }
        What::Left { waited: Some(waited), .. } => {
            format!("disconnected after waiting for {}", units::fine_duration(*waited))
        }
        What::Left { .. } => "left".into(),
    }
}

/// Formats a value in the notation of the bundle.
fn notation(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::ClientId;

    #[test]
    fn gpus_that_share_a_number_are_named_by_their_uuids() {
        let gpu = |n: u8| GpuId(nvshare_wire::Uuid([n; 16]));
        let clients = [1, 2, 3].map(|n| ((ClientId(1), gpu(n)), Tally::default())).into();
        let status = json!({ "gpus": [
            { "uuid": format!("GPU-{}", gpu(1).0), "index": 0 },
            { "uuid": format!("MIG-{}", gpu(2).0), "index": 1 },
            { "uuid": format!("MIG-{}", gpu(3).0), "index": 1 },
        ] });
        let header = Header {
            format: 1,
            version: String::new(),
            protocol: (1, 1),
            host: String::new(),
            kernel: String::new(),
            driver: None,
            nvml: None,
            made: 0,
            now_ns: 0,
            command_lines: false,
        };
        let replay = Replay {
            entries: 0,
            span: None,
            difference: None,
            moments: Vec::new(),
            unfinished: Vec::new(),
            clients,
            tenants: BTreeMap::new(),
        };
        let replayed = Replayed { header, status, clients: BTreeMap::new(), line: None, replay };
        assert_eq!(replayed.gpu_names(), BTreeMap::from([(gpu(1), "0".to_owned())]));
    }
}
