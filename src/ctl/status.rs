//! `nvsharectl status`: who uses which GPU, who holds it and who waits, as a table for people or as JSON.

use std::fmt::Write;
use std::time::Duration;

use nvshare_wire::client::EngineReason;

use super::table::{Align, Table};
use super::why::Waits;
use super::{CtlError, Target, block_on};
use crate::bus::status::Status;
use crate::bus::{self, Client, Gpu, GpuUse, Room, SchedulerProxy};
use crate::config::units;

/// The format of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    pub colour: bool,
    /// Lines are cut at this many characters.
    pub width: Option<usize>,
}

impl Style {
    /// The format for standard output: colour on a terminal only, and not if `NO_COLOR` is set.
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

/// Asks the scheduler.
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

/// For people. `waits`: what programs wait for.
pub fn text(status: &Status, waits: &Waits, style: Style) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "nvshare {}: time quantum {}s, anti-thrash {}, policy {}",
        status.version, status.time_quantum, status.anti_thrash, status.policy
    );
    for problem in &status.problems {
        let _ = writeln!(out, "{}", paint(style, RED, problem));
    }
    if status.gpus.is_empty() {
        out.push_str("\nNo GPU is known yet: one appears when a program uses it.\n");
    }
    for gpu in &status.gpus {
        out.push('\n');
        gpu_text(&mut out, gpu, &status.clients, waits, style);
    }
    let elsewhere: Vec<&Client> = status.clients.iter().filter(|client| client.gpus.is_empty()).collect();
    if !elsewhere.is_empty() {
        let _ = writeln!(out, "\nOn no GPU");
        let mut table = Table::new(&[
            ("CLIENT", Align::Right),
            ("PID", Align::Right),
            ("USER", Align::Left),
            ("COMMAND", Align::Left),
        ]);
        for client in elsewhere {
            table.row(vec![client.id.to_string(), pid(client), user(client.uid), command(client)]);
        }
        write_table(&mut out, &table, &[], style);
    }
    out
}

fn gpu_text(out: &mut String, gpu: &Gpu, clients: &[Client], waits: &Waits, style: Style) {
    let number = gpu.index.map_or(String::new(), |index| format!(" {index}"));
    let kind = if gpu.kind == "mig" { "MIG slice of GPU" } else { "GPU" };
    let heading = format!("{kind}{number}  {}  {}", gpu.name, gpu.uuid);
    let _ = writeln!(out, "{}", paint(style, BOLD, &heading));
    let mut parts = vec![format!("{} resident", units::size(gpu.resident))];
    if gpu.swapped > 0 {
        parts.push(format!("{} swapped", units::size(gpu.swapped)));
    }
    if let Some(overhead) = gpu.overhead {
        parts.push(format!("{} contexts and others", units::size(overhead)));
    }
    let (capacity, total) = (units::size(gpu.capacity), units::size(gpu.total));
    let _ = writeln!(out, "  memory   {capacity} of {total} for programs: {}", parts.join(", "));
    let _ = writeln!(out, "  demand   {}", units::size(gpu.demand));
    if gpu.shortfall > 0 {
        let _ = writeln!(
            out,
            "  a program needs {} more than it uses, since it could not map memory that is measured as free",
            units::size(gpu.shortfall)
        );
    }
    if gpu.gone {
        out.push_str("  this GPU is gone: the driver no longer lists it, and programs that use it get errors\n");
    } else if gpu.accounting == "reports" {
        out.push_str("  NVML does not measure this GPU: programs are believed what memory they report\n");
    }
    if gpu.drained {
        out.push_str("  drained: programs leave this GPU, and none gets there (to end it: nvsharectl undrain)\n");
    }
    for room in gpu.rooms.iter().flatten() {
        let Room { who, pid, uid, bytes, ready, ends_in } = room;
        let ends = units::duration(Duration::try_from_secs_f64(*ends_in).unwrap_or_default());
        let (bytes, user, free) =
            (units::size(*bytes), user(*uid), if *ready { "" } else { " as soon as they are free" });
        let _ =
            writeln!(out, "  room     {bytes} are kept free{free} for {who} (process {pid}) of {user}, for {ends} yet");
    }
    let in_rooms = gpu.rooms.iter().flatten().any(|_| true);
    if let Some(kept) = gpu.kept.filter(|kept| *kept > 0 && !in_rooms) {
        let _ = writeln!(out, "  {} are kept free ahead of other programs that grow", units::size(kept));
    }
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
        ("CLIENT", Align::Right),
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
    for (place, client, usage) in rows {
        let state = match (usage.state.as_str(), place) {
            _ if client.paused && client.sleep == "sleeping" => "paused".to_owned(),
            _ if client.sleep != "awake" && !client.sleep.is_empty() => client.sleep.clone(),
            (state, _) if client.paused => format!("{state}, paused"),
            ("waiting", 1..usize::MAX) => format!("waiting #{place}"),
            (state, _) if client.stopped => format!("{state}, stopped"),
            (state, _) => state.to_owned(),
        };
        colours.push(match usage.state.as_str() {
            "holding" | "revoking" => GREEN,
            "waiting" | "attaching" => YELLOW,
            "stuck" | "undrainable" | "suspended" => RED,
            _ => "",
        });
        let seconds = |seconds: f64| units::duration(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        let place = place_of(client);
        table.row(vec![
            client.id.to_string(),
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
    write_table(out, &table, &colours, style);
    // The sentences are about all of its GPUs.
    for client in clients.iter().filter(|client| client.gpus.first().is_some_and(|usage| usage.uuid == gpu.uuid)) {
        if let Some(sentences) = waits.get(&client.id) {
            let _ = writeln!(out, "  Client {}: {}", client.id, sentences.join(" "));
        }
    }
    for client in clients {
        for usage in client.gpus.iter().filter(|u| u.uuid == gpu.uuid && is_unusual(u)) {
            let (id, engine, why) = (client.id, &usage.engine, &usage.engine_reason);
            let _ = writeln!(out, "  Client {id} has engine {engine}: {why}.");
        }
    }
    for client in clients {
        for bytes in client.gpus.iter().filter(|u| u.uuid == gpu.uuid).filter_map(|usage| usage.in_file) {
            let (id, bytes) = (client.id, units::size(bytes));
            let _ = writeln!(out, "  Client {id} has {bytes} of its swapped memory in a file on a disk.");
        }
    }
    let limits = clients.iter().flat_map(|client| {
        let here = client.gpus.iter().filter(|usage| usage.uuid == gpu.uuid);
        here.filter_map(|usage| usage.memory_max)
            .map(move |max| (client.id, format!("may have {} by rule {}", units::size(max), rule(client))))
    });
    groups_text(out, limits);
    for client in clients {
        for bytes in client.gpus.iter().filter(|u| u.uuid == gpu.uuid).filter_map(|usage| usage.pending_limit) {
            let (id, bytes) = (client.id, units::size(bytes));
            let _ = writeln!(out, "  Client {id} waits for memory: for {bytes} in all, when others have freed enough.");
        }
    }
    for client in clients {
        for usage in client.gpus.iter().filter(|u| u.uuid == gpu.uuid) {
            if let Some(bytes) = usage.unverified.filter(|_| gpu.accounting != "reports") {
                let (id, bytes) = (client.id, units::size(bytes));
                let _ = writeln!(out, "  Client {id} reports {bytes} that NVML does not show: they do not count.");
            }
            if usage.mapping_failures > 1 {
                let (id, failures) = (client.id, usage.mapping_failures);
                let _ = writeln!(
                    out,
                    "  Client {id} has had the GPU {failures} times in a row without room for its memory: \
                     other memory is evicted for it."
                );
            }
        }
    }
    let here = |client: &&Client| client.gpus.iter().any(|usage| usage.uuid == gpu.uuid);
    let shares = clients.iter().filter(here).filter(|client| !client.share.is_empty());
    groups_text(out, shares.map(|client| (client.id, format!("have {} by rule {}", client.share, rule(client)))));
    for client in clients.iter().filter(here) {
        let id = client.id;
        if !client.environment.is_empty() {
            let _ = writeln!(out, "  Client {id} has {} by its own environment.", client.environment);
        }
        for remark in &client.environment_ignored {
            let _ = writeln!(out, "  Client {id}: {remark}.");
        }
    }
    for client in clients.iter().filter(here) {
        let (id, why) = (client.id, &client.sleep_obstacle);
        if client.sleep == "lost" {
            let _ = writeln!(out, "  Client {id} was off the GPU and cannot come back: its CUDA calls fail.");
        } else if !client.moving.is_empty() {
            let _ = writeln!(out, "  Client {id} is on its way to {}.", client.moving);
        } else if !why.is_empty() {
            let held = if client.paused { " is held off all the same, but" } else { "" };
            let _ = writeln!(out, "  Client {id}{held} cannot sleep: {why}.");
        }
        if let Some(took) = client.wake_time {
            let took = units::duration(Duration::try_from_secs_f64(took).unwrap_or_default());
            let by = if client.woken_by == "resume" { "it was resumed" } else { "it called the driver" };
            let _ = writeln!(out, "  Client {id} was last woken because {by}, in {took}.");
        }
    }
    // Each gang once.
    let first = |client: &&Client| client.gang.first().is_some_and(|peer| client.id < *peer);
    for client in clients.iter().filter(here).filter(first) {
        let others: Vec<String> = client.gang.iter().map(u64::to_string).collect();
        let _ = writeln!(out, "  Client {} runs together with {}.", client.id, others.join(", "));
    }
    for client in clients.iter().filter(|client| client.placed.contains(&gpu.uuid)) {
        let is_here = client.gpus.iter().any(|usage| usage.uuid == gpu.uuid);
        let still = if is_here { "" } else { ", and does not use it yet" };
        let _ = writeln!(out, "  Client {} was placed on this GPU{still}.", client.id);
    }
    for client in clients.iter().filter(|client| client.gpus.iter().any(|u| u.uuid == gpu.uuid && u.untracked_work)) {
        let _ = writeln!(out, "  Client {} gives this GPU work by another API than CUDA: its memory stays.", client.id);
    }
    for client in clients {
        for usage in client.gpus.iter().filter(|u| u.uuid == gpu.uuid && !u.eviction_blocked.is_empty()) {
            let _ = writeln!(out, "  The memory of client {} stays on the GPU: {}.", client.id, usage.eviction_blocked);
        }
    }
}

/// What clients' groups have by a rule: a line for all of which the same can be said, since a class of notebooks has one rule.
fn groups_text(out: &mut String, have: impl Iterator<Item = (u64, String)>) {
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    for (id, what) in have {
        match lines.iter_mut().find(|(said, _)| *said == what) {
            Some((_, ids)) => ids.push(id.to_string()),
            None => lines.push((what, vec![id.to_string()])),
        }
    }
    for (what, ids) in lines {
        let _ = match ids.split_last() {
            Some((last, others)) if !others.is_empty() => {
                let others = others.join(", ");
                writeln!(out, "  Clients {others} and {last}, each with all that count with it, {what}.")
            }
            _ => writeln!(out, "  Client {}, and all that count with it, {what}.", ids.concat()),
        };
    }
}

/// A client's pod, by its name in Kubernetes, else its container, else its unit.
pub(super) fn place_of(client: &Client) -> String {
    match client {
        Client { pod_name: name, pod_namespace: namespace, .. } if !name.is_empty() => format!("{namespace}/{name}"),
        Client { container, .. } if !container.is_empty() => container.clone(),
        _ => client.unit.clone(),
    }
}

/// The rule that a client has, as people know it: by its name and its place.
fn rule(client: &Client) -> String {
    match &*client.rule {
        "" => client.rule_origin.clone(),
        name => format!("\"{name}\" ({})", client.rule_origin),
    }
}

/// True if a line about its engine is needed beside the table.
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

fn write_table(out: &mut String, table: &Table, colours: &[&str], style: Style) {
    for (number, line) in table.lines().iter().enumerate() {
        let line = format!("  {line}");
        let cut: String = line.chars().take(style.width.unwrap_or(usize::MAX)).collect();
        let colour = number.checked_sub(1).and_then(|row| colours.get(row)).unwrap_or(&"");
        let _ = writeln!(out, "{}", paint(style, colour, &cut));
    }
}

fn pid(client: &Client) -> String {
    if client.pid == 0 { "?".into() } else { client.pid.to_string() }
}

pub(super) fn command(client: &Client) -> String {
    match &client.command {
        // A lock: who holds it, and what for.
        _ if !client.why.is_empty() => format!("{}: {}", client.name, client.why),
        Some(command) if !command.is_empty() => command.clone(),
        _ if client.name.is_empty() => "?".into(),
        _ => client.name.clone(),
    }
}

/// The name of a user of this host, or the number.
fn user(uid: u32) -> String {
    name_of(uid).unwrap_or_else(|| uid.to_string())
}

/// A tenant as people know it: a user by the name, if there is one here.
pub(super) fn tenant(tenant: &str) -> String {
    let uid = tenant.strip_prefix("user ").and_then(|uid| uid.parse().ok());
    uid.and_then(name_of).unwrap_or_else(|| tenant.to_owned())
}

/// A user's name on this host. Only the file is read: a static program has no other services of names.
pub(super) fn name_of(uid: u32) -> Option<String> {
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
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
    fn the_holder_comes_first_and_then_the_queue() {
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

GPU 0  NVIDIA H200  GPU-1
  memory   138 GiB of 140 GiB for programs: 20 GiB resident
  demand   30 GiB
  CLIENT  PID  USER  STATE               FOR  DEMAND  ON GPU  SWAPPED  ENGINE        HELD  WAITED  UNIT             COMMAND
       2  102  root  holding            4.2s  10 GiB  10 GiB      0 B  swap    1min 01s    0.0s  session-2.scope  python3 b.py
       3  103  root  waiting #1     1min 10s   1 GiB   1 GiB      0 B  swap    1min 01s    0.0s  session-2.scope  python3 c.py
       1  101  root  waiting #2         1.0s   1 GiB   1 GiB      0 B  swap    1min 01s    0.0s  session-2.scope  python3 a.py
";
        assert!(!text(&status, &Waits::new(), Style::default()).contains("another API"));
        let mut other = status.clone();
        other.clients[1].gpus[0].untracked_work = true;
        assert!(
            text(&other, &Waits::new(), Style::default())
                .ends_with("  Client 2 gives this GPU work by another API than CUDA: its memory stays.\n")
        );
        assert!(!text(&status, &Waits::new(), Style::default()).contains("engine swap"), "the usual needs no words");
        let mut asked = status.clone();
        let usage = &mut asked.clients[2].gpus[0];
        (usage.engine, usage.engine_reason) = ("none".into(), bus::engine_reason(EngineReason::Asked).into());
        assert!(
            text(&asked, &Waits::new(), Style::default())
                .ends_with("  Client 3 has engine none: NVSHARE_ENGINE asks for it.\n")
        );
        let mut stays = status.clone();
        stays.clients[0].gpus[0].eviction_blocked = "host memory is full".into();
        assert!(
            text(&stays, &Waits::new(), Style::default())
                .ends_with("  The memory of client 1 stays on the GPU: host memory is full.\n")
        );
        let squeeze =
            |text: &str| text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>();
        let shown = text(&status, &Waits::new(), Style::default());
        assert_eq!(squeeze(&shown), squeeze(expected));
        assert!(!shown.contains('\x1b'));
        let coloured = text(&status, &Waits::new(), Style { colour: true, width: Some(40) });
        assert!(coloured.contains("\x1b[32m"), "{coloured}");
        assert!(!coloured.contains("c.py"), "lines are cut: {coloured}");
    }

    #[test]
    fn it_says_who_sleeps_and_why_not() {
        let shown = |change: fn(&mut Client)| {
            let mut client = client(7, "python3 a.py", usage("waiting", 1.0, 1 << 30));
            client.sleep = "awake".into();
            change(&mut client);
            let gpus = vec![Gpu { uuid: "GPU-1".into(), queue: vec![7], ..Gpu::default() }];
            text(&Status { gpus, clients: vec![client], ..Status::default() }, &Waits::new(), Style::default())
        };
        assert!(shown(|_| ()).contains("waiting #1"));
        assert!(shown(|client| client.sleep = "sleeping".into()).contains("sleeping"));
        assert!(shown(|client| (client.sleep, client.paused) = ("sleeping".into(), true)).contains(" paused "));
        let held = shown(|client| (client.sleep_obstacle, client.paused) = ("it is in a gang".into(), true));
        assert!(held.contains("waiting, paused"), "{held}");
        assert!(held.ends_with("  Client 7 is held off all the same, but cannot sleep: it is in a gang.\n"), "{held}");
        let woken = shown(|client| (client.woken_by, client.wake_time) = ("call".into(), Some(1.5)));
        assert!(woken.ends_with("  Client 7 was last woken because it called the driver, in 1.5s.\n"), "{woken}");
    }

    #[test]
    fn what_a_rule_gives_to_several_is_one_line() {
        let shown = |shares: &[&str]| {
            let clients = shares.iter().zip(1..).map(|(share, id)| {
                let one = client(id, "python3 a.py", usage("idle", 1.0, 1 << 30));
                Client { share: (*share).into(), rule: "notebooks".into(), rule_origin: "a.toml:1".into(), ..one }
            });
            let gpus = vec![Gpu { uuid: "GPU-1".into(), ..Gpu::default() }];
            text(&Status { gpus, clients: clients.collect(), ..Status::default() }, &Waits::new(), Style::default())
        };
        let one = shown(&["weight 200"]);
        assert!(
            one.ends_with(
                "  Client 1, and all that count with it, have weight 200 by rule \"notebooks\" (a.toml:1).\n"
            ),
            "{one}"
        );
        let three = shown(&["weight 200", "weight 300", "weight 200", "weight 200"]);
        assert!(
            three.contains("  Clients 1, 3 and 4, each with all that count with it, have weight 200 by rule"),
            "{three}"
        );
        assert!(three.contains("  Client 2, and all that count with it, have weight 300 by rule"), "{three}");
    }

    #[test]
    fn a_lock_is_named_by_its_owner_and_purpose_for_root_as_well() {
        let lock = Client {
            name: "Ann".into(),
            why: "thesis".into(),
            command: Some("nvsharectl lock --who Ann --why thesis -- sleep 6".into()),
            ..Client::default()
        };
        assert_eq!(command(&lock), "Ann: thesis");
    }

    #[test]
    fn it_says_what_a_program_waits_for() {
        let clients = vec![client(7, "python3 a.py", usage("waiting", 1.0, 1 << 30))];
        let gpus = vec![Gpu { uuid: "GPU-1".into(), queue: vec![7], ..Gpu::default() }];
        let status = Status { gpus, clients, ..Status::default() };
        let waits = Waits::from([(7, vec!["It has waited.".into(), "It is expected to run at once.".into()])]);
        let shown = text(&status, &waits, Style::default());
        assert!(shown.contains("\n  Client 7: It has waited. It is expected to run at once.\n"), "{shown}");
    }
}
