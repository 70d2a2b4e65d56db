//! `nvsharectl status`: the users, holders and waiters of each GPU, as a table or as JSON.

use std::fmt::Write;

use nvshare_wire::client::EngineReason;

use super::program_state::{self, Tone, seconds};
use super::table::{Align, Table, wrapped};
use super::why::{self, Waits};
use super::{CtlError, Target, beside, block_on};
use crate::bus::status::Status;
use crate::bus::{self, Client, Gpu, GpuUse, Room, SchedulerProxy, Unproven};
use crate::config::units;
use crate::identity::user_name;

/// The format of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    pub colour: bool,
    /// Maximum length of a line in characters. Longer lines are cut.
    pub width: Option<usize>,
}

impl Style {
    /// Returns the format for standard output. Colour is used only on a terminal and without
    /// `NO_COLOR`.
    pub fn of_stdout() -> Self {
        use std::io::IsTerminal;
        if !std::io::stdout().is_terminal() {
            return Self::default();
        }
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { colour: !plain, width: terminal_width() }
    }
}

fn terminal_width() -> Option<usize> {
    let columns = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?.ws_col;
    (columns > 0).then_some(columns.into())
}

/// Queries the scheduler.
pub fn ask(target: &Target) -> Result<Status, CtlError> {
    block_on(async { fetch(&target.connect().await?).await })
}

pub(super) async fn fetch(scheduler: &SchedulerProxy<'_>) -> Result<Status, CtlError> {
    Ok(Status {
        version: scheduler.version().await?,
        time_quantum: scheduler.time_quantum().await?,
        max_wait: scheduler.max_wait().await?,
        anti_thrash: scheduler.anti_thrash().await?,
        policy: scheduler.policy().await?,
        problems: scheduler.problems().await?,
        gpus: scheduler.list_gpus().await?,
        clients: scheduler.list_clients().await?,
    })
}

/// Formats the status as a table. `waits` contains the reasons why programs wait.
pub fn text(status: &Status, waits: &Waits, style: Style) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "nvshare {}: time quantum {}s, anti-thrash {}, policy {}",
        status.version, status.time_quantum, status.anti_thrash, status.policy
    );
    for problem in &status.problems {
        paragraph(&mut out, problem, "", RED, style);
    }
    if status.gpus.is_empty() {
        out.push_str("\nNo GPU is known yet. A GPU is listed as soon as a program uses it.\n");
    }
    for gpu in &status.gpus {
        out.push('\n');
        gpu_text(&mut out, gpu, &status.clients, waits, style);
    }
    let elsewhere: Vec<&Client> = status.clients.iter().filter(|client| client.gpus.is_empty()).collect();
    if !elsewhere.is_empty() {
        let _ = writeln!(out, "\nOn no GPU");
        let mut table = Table::new(&[("PID", Align::Right), ("USER", Align::Left), ("COMMAND", Align::Left)]);
        for client in elsewhere {
            table.row(vec![pid(client), user(client.uid), command(client)]);
        }
        write_table(&mut out, table, &[], style);
    }
    out
}

/// The columns that a table omits on narrow terminals, in the order of omission.
const DISPENSABLE: [&str; 7] = ["ENGINE", "FOR", "HELD", "DEMAND", "UNIT", "WAITED", "USER"];
/// The minimum width of the command column, in characters.
const LEAST_COMMAND: usize = 12;

fn unproven_sentence(Unproven { pid, uid, name }: &Unproven) -> String {
    let user = user(*uid);
    let process = if *pid == 0 { format!("{name} of {user}") } else { format!("{name} (process {pid}) of {user}") };
    format!("{process} runs as without nvshare, because it has not shown that it can open the GPU's device file.")
}

fn gpu_text(out: &mut String, gpu: &Gpu, clients: &[Client], waits: &Waits, style: Style) {
    let number = gpu.index.map_or(String::new(), |index| format!(" {index}"));
    let kind = if gpu.kind == "mig" { "MIG slice of GPU" } else { "GPU" };
    let heading = format!("{kind}{number}  {}  {}  {}", gpu.name, units::size(gpu.total), gpu.uuid);
    let _ = writeln!(out, "{}", paint(style, BOLD, &heading));
    let swapped = if gpu.swapped > 0 { format!(", {} swapped", units::size(gpu.swapped)) } else { String::new() };
    let (resident, capacity) = (units::size(gpu.resident), units::size(gpu.capacity));
    let overhead =
        gpu.overhead.map_or(String::new(), |bytes| format!("; {} for contexts and other programs", units::size(bytes)));
    let mut say = |text: &str| paragraph(out, text, "  ", "", style);
    say(&format!("memory   {resident} of {capacity} for programs{swapped}{overhead}"));
    say(&format!("demand   {}", units::size(gpu.demand)));
    if gpu.shortfall > 0 {
        let shortfall = units::size(gpu.shortfall);
        say(&format!(
            "A program needs {shortfall} beyond its demand in order to run, because the driver could not map memory \
             that is measured as free."
        ));
    }
    if gpu.gone {
        say("This GPU is gone: the driver no longer lists it, and CUDA calls on it fail.");
    } else if gpu.accounting == "reports" {
        say("NVML does not measure this GPU. The scheduler relies on the programs' own memory reports.");
    }
    if gpu.drained {
        say("drained: programs are moved off this GPU, and no program may start to use it. `nvsharectl undrain` ends \
            this.");
    }
    for Room { who, pid, uid, bytes, ready, ends_in } in gpu.rooms.iter().flatten() {
        let (bytes, user, ends) = (units::size(*bytes), user(*uid), seconds(*ends_in));
        let free = if *ready { "kept free" } else { "being freed" };
        say(&format!(
            "room     {bytes} are {free} for {who} (process {pid}) of {user}. The room ends in {ends} if it \
             is not renewed"
        ));
    }
    let in_rooms = gpu.rooms.iter().flatten().any(|_| true);
    if let Some(kept) = gpu.kept.filter(|kept| *kept > 0 && !in_rooms) {
        say(&format!(
            "{} are kept free as headroom for programs without nvshare, because their memory is growing.",
            units::size(kept)
        ));
    }
    gpu.unproven.iter().flatten().for_each(|unproven| say(&unproven_sentence(unproven)));
    beside::sentences(gpu, clients).for_each(|sentence| say(&sentence));
    let mut rows: Vec<(usize, &Client, &GpuUse)> = clients
        .iter()
        .flat_map(|client| client.gpus.iter().filter(|usage| usage.uuid == gpu.uuid).map(move |usage| (client, usage)))
        .map(|(client, usage)| {
            let queued = gpu.queue.iter().position(|id| *id == client.id);
            let place = match queued {
                _ if gpu.holders.contains(&client.id) => 0,
                Some(place) => 1 + place,
                None => usize::MAX,
            };
            (place, client, usage)
        })
        .collect();
    if rows.is_empty() {
        out.push_str("  no programs\n");
        return;
    }
    rows.sort_by_key(|(place, client, _)| (*place, client.id));
    let mut table = Table::new(&[
        ("PID", Align::Right),
        ("USER", Align::Left),
        ("STATE", Align::Left),
        ("FOR", Align::Right),
        ("DEMAND", Align::Right),
        ("ON GPU", Align::Right),
        ("SWAPPED", Align::Right),
        ("ENGINE", Align::Left),
        ("HELD", Align::Right),
        ("WAITED", Align::Right),
        ("UNIT", Align::Left),
        ("COMMAND", Align::Left),
    ]);
    let mut colours = Vec::new();
    for (_, client, usage) in rows {
        let (state, tone) = program_state::state(client, Some(usage), Some(gpu), true);
        colours.push(match tone {
            Tone::Runs => GREEN,
            Tone::Waits => YELLOW,
            Tone::Bad => RED,
            Tone::Plain => "",
        });
        let place = place_of(client);
        table.row(vec![
            pid(client),
            user(client.uid),
            state,
            seconds(usage.since),
            units::size(usage.demand),
            units::size(usage.resident),
            units::size(usage.swapped),
            usage.engine.clone(),
            seconds(usage.lock_time),
            seconds(usage.wait_time),
            if place.is_empty() { "-".into() } else { place },
            command(client),
        ]);
    }
    write_table(out, table, &colours, style);
    reasons_text(out, gpu, clients, waits, style);
    for sentence in sentences(gpu, clients) {
        paragraph(out, &sentence, "  ", "", style);
    }
}

/// Appends a line with the main reason of each waiting program. `nvsharectl why` prints all
/// reasons.
fn reasons_text(out: &mut String, gpu: &Gpu, clients: &[Client], waits: &Waits, style: Style) {
    let mut has_more = false;
    // A client's reasons concern all of its GPUs, so they are printed once, below the client's
    // first GPU.
    for client in clients.iter().filter(|client| client.gpus.first().is_some_and(|usage| usage.uuid == gpu.uuid)) {
        if let Some(reason) = waits.get(&client.id).and_then(|sentences| why::reason(sentences)) {
            let line = format!("  {}: {reason}", process(client));
            let _ = writeln!(out, "{}", cut(&line, style));
            has_more = true;
        }
    }
    if has_more {
        out.push_str("  `nvsharectl why PID` explains the wait.\n");
    }
}

/// Sentences about unusual states of the programs on a GPU.
fn sentences(gpu: &Gpu, clients: &[Client]) -> Vec<String> {
    let mut all = Vec::new();
    let here: Vec<(&Client, &GpuUse)> = clients
        .iter()
        .filter_map(|client| Some((client, client.gpus.iter().find(|usage| usage.uuid == gpu.uuid)?)))
        .collect();
    for (client, usage) in here.iter().filter(|(_, usage)| is_unusual(usage)) {
        all.push(format!("{} has engine {}: {}.", process(client), usage.engine, usage.engine_reason));
    }
    for (client, usage) in &here {
        if let Some(bytes) = usage.in_file {
            let bytes = units::size(bytes);
            all.push(format!("{bytes} of the swapped memory of {} are in a swap file.", process(client)));
        }
    }
    let limits = here.iter().filter_map(|(client, usage)| Some((*client, usage.memory_max?)));
    all.extend(groups(
        limits.map(|(client, max)| (client, format!("may use {} by rule {}", units::size(max), rule(client)))),
    ));
    for (client, usage) in &here {
        let who = process(client);
        if let Some(bytes) = usage.pending_limit {
            let bytes = units::size(bytes);
            all.push(format!(
                "{who} waits for memory: it requests {bytes} in total, and other programs must free memory first."
            ));
        }
        if let Some(bytes) = usage.unverified.filter(|_| gpu.accounting != "reports") {
            all.push(format!(
                "{who} reports {} of memory that NVML does not show. The scheduler does not count that memory.",
                units::size(bytes)
            ));
        }
        if usage.mapping_failures > 1 {
            let failures = usage.mapping_failures;
            all.push(format!(
                "The driver could not map the memory of {who} in {failures} turns in a row. Other programs' memory is \
                 being evicted."
            ));
        }
    }
    let shares = here.iter().filter(|(client, _)| !client.share.is_empty());
    all.extend(groups(shares.map(|(client, _)| (*client, format!("have {} by rule {}", client.share, rule(client))))));
    for (client, _) in &here {
        let who = process(client);
        if !client.environment.is_empty() {
            all.push(format!("The environment of {who} sets {}.", client.environment));
        }
        all.extend(client.environment_ignored.iter().map(|remark| format!("{who}: {remark}.")));
        all.extend(sleep_sentences(client));
    }
    // Prints each gang once.
    let first = |client: &Client| client.gang.first().is_some_and(|peer| client.id < *peer);
    for (client, _) in here.iter().filter(|(client, _)| first(client)) {
        let others = client.gang.iter().map(|id| match clients.iter().find(|other| other.id == *id) {
            Some(other) => number(other),
            None => format!("client {id}"),
        });
        all.push(format!("{} runs together with {}.", process(client), others.collect::<Vec<_>>().join(", ")));
    }
    for client in clients.iter().filter(|client| client.placed.contains(&gpu.uuid)) {
        let is_here = client.gpus.iter().any(|usage| usage.uuid == gpu.uuid);
        let still = if is_here { "" } else { ", but does not use it yet" };
        all.push(format!("{} was placed on this GPU{still}.", process(client)));
    }
    for (client, _) in here.iter().filter(|(_, usage)| usage.untracked_work) {
        all.push(format!(
            "{} uses this GPU through an API other than CUDA, so its memory stays on the GPU.",
            process(client)
        ));
    }
    for (client, usage) in here.iter().filter(|(_, usage)| !usage.eviction_blocked.is_empty()) {
        all.push(format!("The memory of {} stays on the GPU: {}.", number(client), usage.eviction_blocked));
    }
    all
}

/// What another program has done to a client's process.
fn foreign_checkpoint(sleep: &str) -> Option<&'static str> {
    match sleep {
        "locked" => Some("is locked by another program, and gets no turn until that program unlocks it."),
        "checkpointed" => Some(
            "is checkpointed by another program. Its room stays reserved, because that program runs without nvshare.",
        ),
        "lent" => Some("is checkpointed by another program. Other programs use its room until it is restored."),
        _ => None,
    }
}

fn sleep_sentences(client: &Client) -> Vec<String> {
    let (who, why) = (process(client), &client.sleep_obstacle);
    let mut all = Vec::new();
    if client.sleep == "lost" {
        all.push(format!("{who} was taken off the GPU, and the driver cannot restore it. Its CUDA calls fail."));
    } else if let Some(what) = foreign_checkpoint(&client.sleep) {
        all.push(format!("{who} {what}"));
    } else if !client.moving.is_empty() {
        all.push(format!("{who} is moving to {}.", client.moving));
    } else if client.sleep == "settling" && !why.is_empty() {
        all.push(format!("{who} may be asleep, and gets no turn until its state is known: {why}."));
    } else if !why.is_empty() {
        let held = if client.paused { " is paused, but" } else { "" };
        all.push(format!("{who}{held} cannot sleep: {why}."));
    }
    if let Some(took) = client.wake_time {
        let by = if client.woken_by == "resume" { "it was resumed" } else { "it called the driver" };
        all.push(format!("{who} last woke up because {by}. Waking took {}.", seconds(took)));
    }
    all
}

/// Formats the limits that rules set for groups of clients. Many groups may consist of one client,
/// for example if one rule limits each notebook of a class. Such groups share a line if their text
/// is the same.
fn groups<'a>(have: impl Iterator<Item = (&'a Client, String)>) -> Vec<String> {
    let mut shared: Vec<(String, Option<u64>, Vec<&Client>)> = Vec::new();
    for (client, what) in have {
        let is_same =
            |said: &String, group: &Option<u64>| *said == what && group.is_some() && *group == client.rule_group;
        match shared.iter_mut().find(|(said, group, _)| is_same(said, group)) {
            Some((.., clients)) => clients.push(client),
            None => shared.push((what, client.rule_group, vec![client])),
        }
    }
    // The flag is true if the clients share one group's limits.
    let mut lines: Vec<(String, bool, Vec<&Client>)> = Vec::new();
    for (what, _, clients) in shared {
        let is_one = clients.len() > 1;
        match lines.iter_mut().find(|(said, one, _)| !is_one && !*one && *said == what) {
            Some((.., others)) => others.extend(clients),
            None => lines.push((what, is_one, clients)),
        }
    }
    let line = |(what, is_one, clients): (String, bool, Vec<&Client>)| match *clients {
        [client] => format!("{} and its group {what}.", process(client)),
        _ => {
            let pids: Vec<String> = clients.iter().map(|client| pid(client)).collect();
            let (last, others) =
                pids.split_last().map_or((String::new(), &[][..]), |(last, others)| (last.clone(), others));
            let how = if is_one { "together" } else { "and their groups each" };
            format!("Processes {} and {last} {how} {what}.", others.join(", "))
        }
    };
    lines.into_iter().map(line).collect()
}

/// Appends text, wrapped at the width and indented. Continuation lines are indented by two more
/// characters.
fn paragraph(out: &mut String, text: &str, indent: &str, colour: &str, style: Style) {
    let width = style.width.map_or(usize::MAX, |width| width.saturating_sub(indent.len() + 2).max(20));
    for (number, line) in wrapped(text, width).iter().enumerate() {
        let deeper = if number > 0 { "  " } else { "" };
        let _ = writeln!(out, "{}", paint(style, colour, &format!("{indent}{deeper}{line}")));
    }
}

/// Cuts a line at the width.
fn cut(line: &str, style: Style) -> String {
    let width = style.width.unwrap_or(usize::MAX);
    match line.chars().count() > width {
        true => line.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
        false => line.to_owned(),
    }
}

/// A client's name at the beginning of a sentence.
fn process(client: &Client) -> String {
    if client.pid == 0 { format!("Client {}", client.id) } else { format!("Process {}", client.pid) }
}

/// A client's name within a sentence.
fn number(client: &Client) -> String {
    if client.pid == 0 { format!("client {}", client.id) } else { format!("process {}", client.pid) }
}

/// Returns a client's pod (its Kubernetes name), or else its container, or else its unit.
pub(super) fn place_of(client: &Client) -> String {
    match client {
        Client { pod_name: name, pod_namespace: namespace, .. } if !name.is_empty() => format!("{namespace}/{name}"),
        Client { container, .. } if !container.is_empty() => container.clone(),
        _ => client.unit.clone(),
    }
}

/// Returns the name and the origin of a client's rule.
fn rule(client: &Client) -> String {
    match &*client.rule {
        "" => client.rule_origin.clone(),
        name => format!("\"{name}\" ({})", client.rule_origin),
    }
}

/// Returns true if the client's engine is unusual, so that a sentence below the table explains it.
fn is_unusual(usage: &GpuUse) -> bool {
    let usual = ["", bus::engine_reason(EngineReason::Best)];
    !usual.contains(&usage.engine_reason.as_str())
}

const BOLD: &str = "1";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

fn paint(style: Style, colour: &str, text: &str) -> String {
    if style.colour && !colour.is_empty() { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

fn write_table(out: &mut String, mut table: Table, colours: &[&str], style: Style) {
    if let Some(width) = style.width {
        table.fit(width.saturating_sub(2), &DISPENSABLE, LEAST_COMMAND);
    }
    for (number, line) in table.lines().iter().enumerate() {
        let colour = number.checked_sub(1).and_then(|row| colours.get(row)).unwrap_or(&"");
        let _ = writeln!(out, "{}", paint(style, colour, &cut(&format!("  {line}"), style)));
    }
}

fn pid(client: &Client) -> String {
    if client.pid == 0 { "?".into() } else { client.pid.to_string() }
}

pub(super) fn command(client: &Client) -> String {
    match &client.command {
        // For a client of `nvsharectl lock`, shows the lock's holder and purpose.
        _ if !client.why.is_empty() => format!("{}: {}", client.name, client.why),
        Some(command) if !command.is_empty() => command.clone(),
        _ if client.name.is_empty() => "?".into(),
        _ => client.name.clone(),
    }
}

/// Returns the name of a user of this host, or the uid if the user has no name.
fn user(uid: u32) -> String {
    user_name(uid).unwrap_or_else(|| uid.to_string())
}

/// Returns a tenant's display name. For a user with a name on this host, this is the user's name.
pub(super) fn tenant(tenant: &str) -> String {
    let uid = tenant.strip_prefix("user ").and_then(|uid| uid.parse().ok());
    uid.and_then(user_name).unwrap_or_else(|| tenant.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(state: &str, since: f64, demand: u64) -> GpuUse {
        GpuUse {
            uuid: "GPU-1".into(),
            state: state.into(),
            since,
            engine: "swap".into(),
            engine_reason: "the default".into(),
            demand,
            resident: demand,
            lock_time: 61.0,
            ..GpuUse::default()
        }
    }

    fn client(id: u64, command: &str, usage: GpuUse) -> Client {
        let unit = "session-2.scope".into();
        Client {
            id,
            pid: 100 + id as u32,
            name: "python3".into(),
            command: Some(command.into()),
            unit,
            gpus: vec![usage],
            ..Client::default()
        }
    }

    #[test]
    fn the_holder_is_listed_before_the_queue() {
        let status = Status {
            version: "1.2.3".into(),
            time_quantum: 30,
            max_wait: 60,
            anti_thrash: "auto".into(),
            policy: "fcfs".into(),
            problems: Vec::new(),
            gpus: vec![Gpu {
                uuid: "GPU-1".into(),
                kind: "gpu".into(),
                name: "NVIDIA H200".into(),
                index: Some(0),
                total: 140 << 30,
                capacity: 138 << 30,
                demand: 30 << 30,
                resident: 20 << 30,
                holders: vec![2],
                queue: vec![3, 1],
                clients: 3,
                ..Gpu::default()
            }],
            clients: vec![
                client(1, "python3 a.py", usage("waiting", 1.0, 1 << 30)),
                client(2, "python3 b.py", usage("holding", 4.25, 10 << 30)),
                client(3, "python3 c.py", usage("waiting", 70.0, 1 << 30)),
            ],
        };
        let expected = "\
nvshare 1.2.3: time quantum 30s, anti-thrash auto, policy fcfs

GPU 0  NVIDIA H200  140 GiB  GPU-1
  memory   20 GiB of 138 GiB for programs
  demand   30 GiB
  PID  USER  STATE             FOR  DEMAND  ON GPU  SWAPPED  ENGINE        HELD  WAITED  UNIT             COMMAND
  102  root  runs             4.2s  10 GiB  10 GiB      0 B  swap    1min 01s    0.0s  session-2.scope  python3 b.py
  103  root  waits        1min 10s   1 GiB   1 GiB      0 B  swap    1min 01s    0.0s  session-2.scope  python3 c.py
  101  root  waits            1.0s   1 GiB   1 GiB      0 B  swap    1min 01s    0.0s  session-2.scope  python3 a.py
";
        assert!(!text(&status, &Waits::new(), Style::default()).contains("an API other"));
        let mut other = status.clone();
        other.clients[1].gpus[0].untracked_work = true;
        assert!(text(&other, &Waits::new(), Style::default()).ends_with(
            "  Process 102 uses this GPU through an API other than CUDA, so its memory stays on the GPU.\n"
        ));
        assert!(!text(&status, &Waits::new(), Style::default()).contains("engine swap"), "the usual needs no words");
        let mut asked = status.clone();
        let usage = &mut asked.clients[2].gpus[0];
        (usage.engine, usage.engine_reason) = ("none".into(), bus::engine_reason(EngineReason::Asked).into());
        assert!(
            text(&asked, &Waits::new(), Style::default())
                .ends_with("  Process 103 has engine none: NVSHARE_ENGINE asks for it.\n")
        );
        let mut stays = status.clone();
        stays.clients[0].gpus[0].eviction_blocked = "host memory is full".into();
        assert!(
            text(&stays, &Waits::new(), Style::default())
                .ends_with("  The memory of process 101 stays on the GPU: host memory is full.\n")
        );
        let squeeze =
            |text: &str| text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>();
        let shown = text(&status, &Waits::new(), Style::default());
        assert_eq!(squeeze(&shown), squeeze(expected));
        assert!(!shown.contains('\x1b'));
        let coloured = text(&status, &Waits::new(), Style { colour: true, width: Some(40) });
        assert!(coloured.contains("\x1b[32m"), "{coloured}");
        let lines =
            coloured.replace("\x1b[32m", "").replace("\x1b[33m", "").replace("\x1b[0m", "").replace("\x1b[1m", "");
        assert!(lines.lines().skip(1).all(|line| line.chars().count() <= 40), "{lines}");
    }

    #[test]
    fn sleep_and_its_obstacles_are_shown() {
        let shown = |change: fn(&mut Client)| {
            let mut client = client(7, "python3 a.py", usage("waiting", 1.0, 1 << 30));
            client.sleep = "awake".into();
            change(&mut client);
            let gpus = vec![Gpu { uuid: "GPU-1".into(), queue: vec![7], ..Gpu::default() }];
            text(&Status { gpus, clients: vec![client], ..Status::default() }, &Waits::new(), Style::default())
        };
        assert!(shown(|_| ()).contains(" waits "));
        assert!(shown(|client| client.sleep = "sleeping".into()).contains(" asleep "));
        assert!(shown(|client| (client.sleep, client.paused) = ("sleeping".into(), true)).contains(" paused "));
        let held = shown(|client| (client.sleep_obstacle, client.paused) = ("it is in a gang".into(), true));
        assert!(held.contains(" paused "), "{held}");
        assert!(held.ends_with("  Process 107 is paused, but cannot sleep: it is in a gang.\n"), "{held}");
        let woken = shown(|client| (client.woken_by, client.wake_time) = ("call".into(), Some(1.5)));
        assert!(
            woken.ends_with("  Process 107 last woke up because it called the driver. Waking took 1.5s.\n"),
            "{woken}"
        );
    }

    #[test]
    fn narrow_tables_omit_columns_but_no_information() {
        let mut clients = vec![
            client(1, "python3 train.py --epochs 90 --data /srv/images", usage("holding", 12.0, 10 << 30)),
            client(2, "python3 server.py", usage("waiting", 3.0, 7 << 30)),
        ];
        clients[0].environment_ignored = vec![
            "NVSHARE_WEIGHT=200 has no effect: the program already has weight 100 without a rule, and this variable can only lower the limit"
                .into(),
        ];
        let gpu = Gpu {
            uuid: "GPU-23126b4e-41f2-d4d3-4dd0-968a5c3b5fe6".into(),
            name: "NVIDIA H200".into(),
            index: Some(0),
            total: 140 << 30,
            capacity: 138 << 30,
            resident: 17 << 30,
            swapped: 3 << 30,
            overhead: Some(2 << 30),
            demand: 20 << 30,
            holders: vec![1],
            queue: vec![2],
            turn_ends: Some([(1, 3.25)].into()),
            expected_starts: Some([(2, 4.0)].into()),
            ..Gpu::default()
        };
        for client in &mut clients {
            client.gpus[0].uuid = gpu.uuid.clone();
        }
        let problems = vec!["the NVIDIA driver cannot be used: ".to_owned() + &"x".repeat(60)];
        let status = Status { problems, gpus: vec![gpu], clients, ..Status::default() };
        let waits = Waits::from([(
            2,
            vec!["It has waited.".into(), "python3 (process 101) holds GPU 0; its turn ends in about 3.2s.".into()],
        )]);
        let shown = |width: usize| text(&status, &waits, Style { colour: false, width: Some(width) });
        let narrow = shown(80);
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
        let one_line: String = narrow.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "101 root runs, 3.2s left",
            "102 root waits, about 4s",
            "Process 102: python3 (process 101) holds GPU 0; its turn ends in about 3.2s.",
            "and this variable can only lower the limit.",
        ] {
            assert!(one_line.contains(part), "{part}: {narrow}");
        }
        assert!(!narrow.contains("ENGINE") && narrow.contains("python3 serve"), "{narrow}");
        let wide = shown(200);
        for heading in DISPENSABLE {
            assert!(wide.contains(heading), "{heading}: {wide}");
        }
        assert!(wide.contains("--data /srv/images"), "{wide}");
    }

    #[test]
    fn clients_of_one_rule_share_a_line() {
        let shown = |shares: &[(&str, u64)]| {
            let clients = shares.iter().zip(1..).map(|((share, group), id)| {
                let one = client(id, "python3 a.py", usage("idle", 1.0, 1 << 30));
                let (rule, rule_origin) = ("notebooks".into(), "a.toml:1".into());
                Client { share: (*share).into(), rule, rule_origin, rule_group: Some(*group), ..one }
            });
            let gpus = vec![Gpu { uuid: "GPU-1".into(), ..Gpu::default() }];
            text(&Status { gpus, clients: clients.collect(), ..Status::default() }, &Waits::new(), Style::default())
        };
        let one = shown(&[("weight 200", 1)]);
        assert!(
            one.ends_with("  Process 101 and its group have weight 200 by rule \"notebooks\" (a.toml:1).\n"),
            "{one}"
        );
        let three = shown(&[("weight 200", 1), ("weight 300", 2), ("weight 200", 3), ("weight 200", 4)]);
        assert!(
            three.contains("  Processes 101, 103 and 104 and their groups each have weight 200 by rule"),
            "{three}"
        );
        assert!(three.contains("  Process 102 and its group have weight 300 by rule"), "{three}");
        let pods = shown(&[("weight 200", 1), ("weight 200", 2), ("weight 200", 1), ("weight 200", 3)]);
        assert!(pods.contains("  Processes 101 and 103 together have weight 200 by rule"), "{pods}");
        assert!(pods.contains("  Processes 102 and 104 and their groups each have weight 200 by rule"), "{pods}");
    }

    #[test]
    fn a_lock_is_named_by_its_owner_and_purpose_even_for_root() {
        let lock = Client {
            name: "Ann".into(),
            why: "thesis".into(),
            command: Some("nvsharectl lock --who Ann --why thesis -- sleep 6".into()),
            ..Client::default()
        };
        assert_eq!(command(&lock), "Ann: thesis");
    }

    #[test]
    fn reasons_for_waiting_are_shown() {
        let clients = vec![client(7, "python3 a.py", usage("waiting", 1.0, 1 << 30))];
        let gpus = vec![Gpu { uuid: "GPU-1".into(), queue: vec![7], ..Gpu::default() }];
        let status = Status { gpus, clients, ..Status::default() };
        let waits = Waits::from([(7, vec!["It has waited.".into(), "It is expected to run immediately.".into()])]);
        let shown = text(&status, &waits, Style::default());
        let expected = "\n  Process 107: It has waited.\n  `nvsharectl why PID` explains the wait.\n";
        assert!(shown.contains(expected), "{shown}");
    }
}
