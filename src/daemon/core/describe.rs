//! The state as JSON for pages that refresh often: GPUs with the beginning of their queues, and one
//! page of the list of programs. An answer stays small with any number of programs, and shows only
//! what `ListGpus`, `ListClients`, `ListPressure` and `Explain` show.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use zbus::fdo;

use super::view::{ClientView, View};
use crate::bus;
use crate::bus::status::{self, json_fields};
use crate::identity::accountable;
use crate::scheduler::GpuId;

/// Maximum number of programs in an answer.
pub const MOST_PROGRAMS: u32 = 50;
/// Maximum number of holders, and of waiting programs, that are described for each GPU.
const HEAD: usize = 6;
/// Maximum number of a program's GPUs in a list of programs.
const MOST_GPUS: usize = 8;

/// The order of a list of programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Memory on the GPUs and in host memory, most first.
    #[default]
    Memory,
    /// Time with the lock, most first.
    Time,
    /// The present wait, longest first.
    Wait,
    Name,
}

/// The programs to describe.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Selection {
    /// Only programs of this GPU, by its UUID.
    pub gpu: Option<String>,
    /// Only programs whose name, process ID, tenant, unit, pod or container contains this text.
    pub find: String,
    pub order: Order,
    /// The number of programs to skip.
    pub first: u32,
    /// At most [`MOST_PROGRAMS`].
    pub count: u32,
    /// Only this process, with everything that is known of it.
    pub pid: Option<u32>,
}

impl Default for Selection {
    fn default() -> Self {
        let (gpu, find, order, first, pid) = Default::default();
        Self { gpu, find, order, first, count: MOST_PROGRAMS, pid }
    }
}

/// The caller of a description.
#[derive(Debug, Clone, Copy)]
pub struct Reader {
    /// `None` if the bus cannot identify the caller.
    pub uid: Option<u32>,
    pub sees_all: bool,
}

impl View {
    /// Describes the GPUs and the selected programs as a JSON object.
    ///
    /// # Errors
    /// `InvalidArgs` if no program has the selected process ID.
    pub fn describe(&self, selection: &Selection, reader: Reader) -> fdo::Result<String> {
        let clients = self.list_clients();
        let mut described = Map::new();
        described.insert("version".into(), env!("CARGO_PKG_VERSION").into());
        described.insert("problems".into(), json!(self.problems()));
        described.insert("total".into(), clients.len().into());
        described.insert("gpus".into(), self.describe_gpus(&clients, reader).into());
        match selection.pid {
            Some(pid) => {
                let meant: Vec<&ClientView> = clients.iter().filter(|client| client.shown.pid == pid).collect();
                let why = self.explain(pid)?;
                let full = |client: &&ClientView| describe_whole(client, reader);
                described.insert("why".into(), json!(why));
                described.insert("programs".into(), meant.iter().map(full).collect());
                described.insert("found".into(), meant.len().into());
            }
            None => {
                let mut found: Vec<&ClientView> = clients.iter().filter(|client| selection.matches(client)).collect();
                described.insert("found".into(), found.len().into());
                sort(&mut found, selection.order);
                let page = found.into_iter().skip(selection.first as usize).take(selection.count as usize);
                described.insert("programs".into(), page.map(|client| describe(client, reader)).collect());
            }
        }
        Ok(Value::Object(described).to_string())
    }

    fn describe_gpus(&self, clients: &[ClientView], reader: Reader) -> Vec<Value> {
        let by_id: HashMap<u64, &ClientView> = clients.iter().map(|client| (client.id.0, client)).collect();
        let pressure: HashMap<String, bus::Pressure> = self
            .list_pressure()
            .into_iter()
            .filter(|group| group.kind == "gpu")
            .map(|group| (group.name.clone(), group))
            .collect();
        let ids: BTreeMap<String, GpuId> = self.gpus.iter().map(|(id, gpu)| (gpu.label(*id), *id)).collect();
        let mut sums: HashMap<&str, (u64, u64)> = HashMap::new();
        for attachment in clients.iter().flat_map(|client| &client.shown.gpus) {
            let (pinned, in_file) = sums.entry(&attachment.uuid).or_default();
            *pinned += attachment.pinned;
            *in_file += attachment.in_file.unwrap_or(0);
        }
        let describe_gpu = |gpu: &bus::Gpu| {
            let mut shown = status::gpu_json(gpu);
            let one = |id: &u64| Some(describe(by_id.get(id)?, reader));
            let (pinned, in_file) = sums.get(gpu.uuid.as_str()).copied().unwrap_or_default();
            let mut queue: Vec<Value> = gpu.queue.iter().take(HEAD).filter_map(one).collect();
            for waiting in &mut queue {
                let (client, gpu) = (waiting["id"].as_u64(), ids.get(&gpu.uuid));
                let why = client.zip(gpu).and_then(|(client, gpu)| self.obstacle_of(client, *gpu));
                waiting["why"] = why.into();
            }
            shown["queue-length"] = gpu.queue.len().into();
            shown["holders-length"] = gpu.holders.len().into();
            shown["holders"] = gpu.holders.iter().take(HEAD).filter_map(one).collect();
            shown["queue"] = queue.into();
            shown["pinned"] = pinned.into();
            shown["in-file"] = in_file.into();
            let pressure = pressure.get(&gpu.uuid).map(
                |group| json_fields!(group; some_avg10, some_avg60, some_avg300, full_avg10, full_avg60, full_avg300),
            );
            shown["pressure"] = pressure.into();
            // Only the described programs' times are of use.
            for (key, ids) in [("turn-ends", &gpu.holders), ("expected-starts", &gpu.queue)] {
                if let Some(times) = shown.get_mut(key).and_then(Value::as_object_mut) {
                    let head: Vec<String> = ids.iter().take(HEAD).map(u64::to_string).collect();
                    times.retain(|id, _| head.contains(id));
                }
            }
            shown
        };
        self.list_gpus().iter().map(describe_gpu).collect()
    }
}

impl Selection {
    fn matches(&self, client: &ClientView) -> bool {
        let shown = &client.shown;
        let is_there = self.gpu.as_ref().is_none_or(|gpu| shown.gpus.iter().any(|usage| usage.uuid == *gpu));
        let wanted = self.find.to_lowercase();
        let texts = [
            &shown.name,
            &shown.tenant,
            &shown.unit,
            &shown.container,
            &shown.pod_name,
            &shown.pod_namespace,
            &shown.why,
        ];
        let is_found = || texts.iter().any(|text| text.to_lowercase().contains(&wanted));
        is_there && (wanted.is_empty() || is_found() || shown.pid.to_string().contains(&wanted))
    }
}

fn sort(clients: &mut [&ClientView], order: Order) {
    let memory =
        |client: &ClientView| client.shown.gpus.iter().map(|usage| usage.resident + usage.swapped).sum::<u64>();
    let time = |client: &ClientView| client.shown.gpus.iter().map(|usage| usage.lock_time).sum::<f64>();
    let wait = |client: &ClientView| {
        let waits = client.shown.gpus.iter().filter(|usage| ["waiting", "attaching"].contains(&&*usage.state));
        waits.map(|usage| usage.since).fold(-1.0, f64::max)
    };
    match order {
        Order::Memory => clients.sort_by_cached_key(|client| std::cmp::Reverse(memory(client))),
        Order::Time => clients.sort_by(|a, b| time(b).total_cmp(&time(a))),
        Order::Wait => clients.sort_by(|a, b| wait(b).total_cmp(&wait(a))),
        Order::Name => clients.sort_by(|a, b| a.shown.name.cmp(&b.shown.name)),
    }
}

/// A program as a line of a list.
fn describe(client: &ClientView, reader: Reader) -> Value {
    let shown = &client.shown;
    let gpus = shown.gpus.iter().take(MOST_GPUS).map(|usage| {
        json!({ "uuid": usage.uuid, "state": usage.state, "since": short(usage.since), "demand": usage.demand,
            "resident": usage.resident, "swapped": usage.swapped, "in-file": usage.in_file.unwrap_or(0),
            "lock-time": short(usage.lock_time) })
    });
    let mut json = json_fields!(
        shown; id, pid, uid, name, unit, container, tenant, pod_name, sleep, paused, stopped, moving,
    );
    json["own"] = is_own(client, reader).into();
    json["gpus"] = gpus.collect();
    json
}

/// A program with everything that `ListClients` shows the reader.
fn describe_whole(client: &ClientView, reader: Reader) -> Value {
    let may_see = reader.sees_all || reader.uid == Some(client.identity.uid);
    let mut whole = status::client_json(&client.present(may_see));
    whole["own"] = is_own(client, reader).into();
    whole
}

/// Whether the reader may pause and move the program without further authorization.
fn is_own(client: &ClientView, reader: Reader) -> bool {
    reader.uid == Some(0) || reader.uid.is_some_and(|uid| accountable(uid) == client.identity.accountable())
}

/// Rounds a time to hundredths of a second, which keeps the answer short.
fn short(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}
