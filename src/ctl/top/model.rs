//! The model of `nvsharectl top`, computed from the scheduler's answers. The model consists of a
//! panel for each GPU, and a tree of slices, of units or containers, and of processes. `screen`
//! draws the model. Control characters are removed from names, because programs choose their names.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::bus::status::Status;
use crate::bus::{Client, Gpu, Pressure};
use crate::config::units;
use crate::ctl::program_state::{Tone, about, seconds, state};
use crate::ctl::status;
use crate::identity::printable;

/// The period over which the column HAD is computed.
const WINDOW: Duration = Duration::from_secs(60);
/// The number of waiting programs that are listed by name.
const NAMED: usize = 3;

/// Identifies a program on a GPU by the client's id and the GPU's UUID. The UUID is empty for a
/// program without a GPU.
pub type Key = (u64, String);

/// The scheduler's answers at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub status: Status,
    pub pressure: Vec<Pressure>,
    pub at: Instant,
}

/// Kinds of memory, in the order of the bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Holder,
    Others,
    Pinned,
    Contexts,
    /// Memory of programs without nvshare. This memory includes contexts if the contexts are not
    /// known separately.
    Outside,
    Free,
}

#[derive(Debug, Clone, Default)]
pub struct Panel {
    pub title: String,
    /// The GPU's number, or a short name of a MIG slice.
    pub number: String,
    pub total: u64,
    pub memory: Vec<(Kind, u64)>,
    pub has_contexts: bool,
    pub pressure: Option<(f64, f64)>,
    pub holders: String,
    pub queue: Vec<String>,
    /// Bytes per second that are moved to and from the GPU.
    pub rates: Option<(f64, f64)>,
    pub link: Option<u64>,
    pub notes: Vec<String>,
}

impl Panel {
    pub fn bytes(&self, kind: Kind) -> u64 {
        self.memory.iter().filter(|(of, _)| *of == kind).map(|(_, bytes)| bytes).sum()
    }

    /// Describes the queue: the next programs by name, and the number of further programs.
    pub fn queue_in_words(&self) -> String {
        let mut words = self.queue.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
        if self.queue.len() > NAMED {
            words += &format!(" and {} more", self.queue.len() - NAMED);
        }
        if words.is_empty() { "none".into() } else { words }
    }
}

/// Amounts that are summed up from processes to units and slices.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Amounts {
    pub resident: u64,
    pub swapped: u64,
    /// Share of the GPU's time that rules assign, in thousandths.
    pub due: Option<u32>,
    /// Fraction of the GPU's time that the program used.
    pub had: Option<f64>,
    /// Waiting time in seconds.
    pub waited: f64,
}

impl Amounts {
    fn add(&mut self, more: &Self) {
        self.resident = self.resident.saturating_add(more.resident);
        self.swapped = self.swapped.saturating_add(more.swapped);
        self.due = self.due.map_or(more.due, |due| Some(due + more.due.unwrap_or(0)));
        self.had = self.had.map_or(more.had, |had| Some(had + more.had.unwrap_or(0.0)));
        self.waited += more.waited;
    }
}

/// A line of the tree.
#[derive(Debug, Clone, Default)]
pub struct Row {
    pub depth: usize,
    pub label: String,
    pub state: String,
    pub tone: Tone,
    /// The number of the GPU.
    pub gpu: String,
    pub amounts: Amounts,
    /// The program that keys act on. Only lines of processes have a program.
    pub program: Option<Program>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub key: Key,
    pub pid: u32,
    pub name: String,
    pub is_paused: bool,
}

/// The order of processes, units and slices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sort {
    #[default]
    Memory,
    Had,
    Waited,
    Name,
}

impl Sort {
    pub fn next(self) -> Self {
        match self {
            Self::Memory => Self::Had,
            Self::Had => Self::Waited,
            Self::Waited => Self::Name,
            Self::Name => Self::Memory,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Had => "time had",
            Self::Waited => "waits",
            Self::Name => "name",
        }
    }

    fn order(self, one: &(&str, Amounts), other: &(&str, Amounts)) -> Ordering {
        let (own, its) = (&one.1, &other.1);
        let by_amount = match self {
            Self::Memory => (its.resident, its.swapped).cmp(&(own.resident, own.swapped)),
            Self::Had => its.had.unwrap_or(0.0).total_cmp(&own.had.unwrap_or(0.0)),
            Self::Waited => its.waited.total_cmp(&own.waited),
            Self::Name => Ordering::Equal,
        };
        by_amount.then_with(|| one.0.cmp(other.0))
    }
}

/// Earlier counters, which are needed to compute rates.
#[derive(Debug, Default)]
pub struct History {
    /// Seconds of GPU time of each program. Programs that hold a GPU together split the time, so
    /// the sum never exceeds the elapsed time.
    held: HashMap<Key, VecDeque<(Instant, f64)>>,
    /// The time of the last snapshot, and the seconds for which each program had held its GPU at
    /// that time.
    last: Option<(Instant, HashMap<Key, f64>)>,
    moved: HashMap<String, (Instant, [u64; 2])>,
    rates: HashMap<String, (f64, f64)>,
}

impl History {
    pub fn add(&mut self, snapshot: &Snapshot) {
        let at = snapshot.at;
        let mut held = std::mem::take(&mut self.held);
        let uses =
            snapshot.status.clients.iter().flat_map(|client| client.gpus.iter().map(move |usage| (client, usage)));
        let lock_times: HashMap<Key, f64> =
            uses.map(|(client, usage)| ((client.id, usage.uuid.clone()), usage.lock_time)).collect();
        let (then, before) = self.last.replace((at, lock_times.clone())).unwrap_or((at, HashMap::new()));
        let passed = at.saturating_duration_since(then).as_secs_f64();
        let more = |key: &Key, now: f64| (now - before.get(key).copied().unwrap_or(now)).max(0.0);
        let mut of_gpu: HashMap<&str, f64> = HashMap::new();
        for (key, now) in &lock_times {
            *of_gpu.entry(&key.1).or_default() += more(key, *now);
        }
        for client in &snapshot.status.clients {
            for usage in &client.gpus {
                let key = (client.id, usage.uuid.clone());
                let mut samples = held.remove(&key).unwrap_or_default();
                let all = of_gpu.get(usage.uuid.as_str()).copied().unwrap_or(0.0);
                let part = if all > passed { passed / all } else { 1.0 };
                let had = samples.back().map_or(0.0, |(_, had)| *had);
                samples.push_back((at, had + more(&key, usage.lock_time) * part));
                // One sample that is at least as old as the window is kept.
                while samples.get(1).is_some_and(|(then, _)| at.saturating_duration_since(*then) >= WINDOW) {
                    samples.pop_front();
                }
                self.held.insert(key, samples);
            }
        }
        self.rates.clear();
        let mut moved = std::mem::take(&mut self.moved);
        for gpu in &snapshot.status.gpus {
            let (Some(into), Some(out)) = (gpu.swapped_in_bytes, gpu.swapped_out_bytes) else { continue };
            if let Some((then, [before_in, before_out])) = moved.remove(&gpu.uuid) {
                let seconds = at.saturating_duration_since(then).as_secs_f64().max(1e-3);
                let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
                self.rates.insert(gpu.uuid.clone(), (rate(into, before_in), rate(out, before_out)));
            }
            self.moved.insert(gpu.uuid.clone(), (at, [into, out]));
        }
    }

    /// Returns the fraction of a GPU's time that a program used, over the known part of the window.
    fn had(&self, key: &Key) -> Option<f64> {
        let samples = self.held.get(key)?;
        let ((first, before), (last, after)) = (samples.front()?, samples.back()?);
        let seconds = last.saturating_duration_since(*first).as_secs_f64();
        (seconds > 0.0).then(|| ((after - before) / seconds).clamp(0.0, 1.0))
    }
}

/// A short size such as `2.5G`.
pub fn short_size(bytes: u64) -> String {
    let text = units::size(bytes);
    text.replace(' ', "").replace("iB", "")
}

pub fn panels(snapshot: &Snapshot, history: &History) -> Vec<Panel> {
    snapshot.status.gpus.iter().map(|gpu| panel(gpu, snapshot, history)).collect()
}

/// The number of a GPU, or a short name of a MIG slice.
fn number(gpu: &Gpu) -> String {
    match gpu.index {
        Some(index) if gpu.kind != "mig" => index.to_string(),
        _ => gpu.uuid.split_once('-').map_or(&*gpu.uuid, |(_, rest)| rest).chars().take(4).collect(),
    }
}

fn panel(gpu: &Gpu, snapshot: &Snapshot, history: &History) -> Panel {
    let clients: BTreeMap<u64, &Client> = snapshot.status.clients.iter().map(|client| (client.id, client)).collect();
    let here =
        || clients.values().filter_map(|client| Some((client.id, client.gpus.iter().find(|u| u.uuid == gpu.uuid)?)));
    let movable = |is_holder: bool| {
        let all = here().filter(|(id, _)| gpu.holders.contains(id) == is_holder);
        all.map(|(_, usage)| usage.resident.saturating_sub(usage.pinned)).fold(0, u64::saturating_add)
    };
    let pinned = here().map(|(_, usage)| usage.pinned).fold(0, u64::saturating_add);
    let overhead = gpu.overhead.unwrap_or(0);
    let contexts = gpu.contexts.unwrap_or(0).min(overhead);
    let mut memory = vec![
        (Kind::Holder, movable(true)),
        (Kind::Others, movable(false)),
        (Kind::Pinned, pinned),
        (Kind::Contexts, contexts),
        (Kind::Outside, overhead - contexts),
    ];
    let used = memory.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    memory.push((Kind::Free, gpu.total.saturating_sub(used)));
    let who = |id: &u64| match clients.get(id) {
        Some(client) if client.pid > 0 => format!("{} ({})", printable(&client.name), client.pid),
        Some(client) => printable(&client.name),
        None => format!("client {id}"),
    };
    let holders = gpu.holders.iter().map(|id| match gpu.turn_ends.as_ref().and_then(|ends| ends.get(id)) {
        Some(left) if *left > 0.0 => format!("{}, {} left", who(id), seconds(*left)),
        Some(_) => format!("{}, to release it", who(id)),
        None => who(id),
    });
    let queue = gpu.queue.iter().map(|id| match gpu.expected_starts.as_ref().and_then(|starts| starts.get(id)) {
        Some(start) => format!("{} {}", who(id), about(*start)),
        None => who(id),
    });
    let holders = holders.collect::<Vec<_>>().join(", ");
    let pressure = snapshot.pressure.iter().find(|group| group.kind == "gpu" && group.name == gpu.uuid);
    let notes = [
        (gpu.gone, "This GPU is gone. CUDA calls on it fail."),
        (gpu.drained, "Drained: programs are moved off it, and no program may start to use it."),
    ];
    let rooms = gpu.rooms.iter().flatten().map(|room| {
        let (bytes, who) = (units::size(room.bytes), printable(&room.who));
        format!(
            "{bytes} are kept free for {who} ({}). The room ends in {} if it is not renewed.",
            room.pid,
            seconds(room.ends_in)
        )
    });
    let number = number(gpu);
    let kind = if gpu.kind == "mig" { "MIG" } else { "GPU" };
    Panel {
        title: format!("{kind} {number}  {}  {}", printable(&gpu.name), units::size(gpu.total)),
        number,
        total: gpu.total,
        memory,
        has_contexts: gpu.contexts.is_some(),
        pressure: pressure.map(|group| (group.some_avg10, group.full_avg10)),
        holders: if holders.is_empty() { "none".into() } else { holders },
        queue: queue.collect(),
        rates: history.rates.get(&gpu.uuid).copied(),
        link: gpu.link_rate,
        notes: notes.iter().filter(|(is_so, _)| *is_so).map(|(_, text)| (*text).to_owned()).chain(rooms).collect(),
    }
}

#[derive(Default)]
struct Node<'a> {
    amounts: Amounts,
    children: BTreeMap<String, Node<'a>>,
    rows: Vec<(Row, &'a Client)>,
}

/// The tree's lines, from the top.
pub fn rows(snapshot: &Snapshot, history: &History, sort: Sort) -> Vec<Row> {
    let gpus: HashMap<&str, &Gpu> = snapshot.status.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu)).collect();
    let mut slices: BTreeMap<String, Node<'_>> = BTreeMap::new();
    for client in &snapshot.status.clients {
        let uses = client.gpus.iter().map(Some).chain(client.gpus.is_empty().then_some(None));
        for usage in uses {
            let gpu = usage.and_then(|usage| gpus.get(usage.uuid.as_str()).copied());
            let key = (client.id, usage.map_or_else(String::new, |usage| usage.uuid.clone()));
            let amounts = Amounts {
                resident: usage.map_or(0, |usage| usage.resident),
                swapped: usage.map_or(0, |usage| usage.swapped),
                due: usage.and_then(|usage| usage.share_due),
                had: history.had(&key),
                waited: usage.map_or(0.0, |usage| usage.wait_time),
            };
            // The rates are unknown in the first snapshot.
            let rates = history.rates.get(&key.1);
            let (state, tone) = state(client, usage, gpu, rates.is_none_or(|(into, _)| *into > 0.0));
            let pid = if client.pid > 0 { client.pid.to_string() } else { "?".into() };
            let row = Row {
                depth: 2,
                label: format!("{pid} {}", printable(&status::command(client))),
                state,
                tone,
                gpu: gpu.map_or_else(String::new, number),
                amounts,
                program: Some(Program {
                    key,
                    pid: client.pid,
                    name: printable(&client.name),
                    is_paused: client.paused,
                }),
            };
            let or_none = |name: String| if name.is_empty() { "-".to_owned() } else { printable(&name) };
            let slice = slices.entry(or_none(client.slice.clone())).or_default();
            slice.amounts.add(&amounts);
            let unit = slice.children.entry(or_none(status::place_of(client))).or_default();
            unit.amounts.add(&amounts);
            unit.rows.push((row, client));
        }
    }
    let mut lines = Vec::new();
    for (name, slice) in sorted(&slices, sort) {
        lines.push(Row { label: name.clone(), amounts: slice.amounts, ..Row::default() });
        for (name, unit) in sorted(&slice.children, sort) {
            lines.push(Row { depth: 1, label: name.clone(), amounts: unit.amounts, ..Row::default() });
            let mut rows: Vec<&(Row, &Client)> = unit.rows.iter().collect();
            rows.sort_by(|(one, a), (other, b)| {
                sort.order(&(&a.name, one.amounts), &(&b.name, other.amounts)).then(a.id.cmp(&b.id))
            });
            lines.extend(rows.into_iter().map(|(row, _)| row.clone()));
        }
    }
    lines
}

fn sorted<'a, 'n>(nodes: &'a BTreeMap<String, Node<'n>>, sort: Sort) -> Vec<(&'a String, &'a Node<'n>)> {
    let mut nodes: Vec<_> = nodes.iter().collect();
    nodes.sort_by(|(one, a), (other, b)| sort.order(&(one, a.amounts), &(other, b.amounts)));
    nodes
}
