//! The usage records of users, units and containers, which outlive the daemon.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nvshare::bus::Usage;
use nvshare_wire::{ClientMessage, Counts};
use test_support::daemon::*;

use crate::private_bus::{Bus, block_on, on_bus, on_control, refusal, scheduler};

/// A daemon with a state directory.
fn start(directory: Directory) -> Daemon {
    fs::create_dir_all(state(&directory.0)).expect("the state directory");
    start_as_it_is(directory)
}

fn start_as_it_is(directory: Directory) -> Daemon {
    let (state, file) = (state(&directory.0), config(&directory.0));
    if !file.exists() {
        fs::write(&file, "anti-thrash = \"on\"\n").expect("the configuration");
    }
    Daemon::start_in(directory, None, |command, _| {
        command.arg("--config").arg(&file).env("STATE_DIRECTORY", &state);
    })
}

fn state(directory: &Path) -> PathBuf {
    directory.join("state")
}

fn config(directory: &Path) -> PathBuf {
    directory.join("nvshare.toml")
}

fn database(daemon: &Daemon) -> PathBuf {
    state(&daemon.directory.0).join("usage.sqlite")
}

fn client(daemon: &Daemon) -> Client {
    let client = Client::welcomed(&daemon.socket());
    client.attach();
    client
}

/// A report with the bytes that the client has moved so far.
fn report(client: &Client, mapped: u64, swapped: u64, moved_in: u64, moved_out: u64) {
    client.send(ClientMessage::Memory {
        slot: 0,
        ack: 0,
        demand: mapped + swapped,
        mapped,
        swapped,
        pinned: 0,
        device_free: u64::MAX,
        limit_ack: 0,
        host: swapped,
        counts: Counts { swapped_in: moved_in, swapped_out: moved_out, ..Counts::default() },
        in_file: 0,
        managed: 0,
        managed_mapped: 0,
    });
}

fn usage(daemon: &Daemon, by: &[&str]) -> Vec<Usage> {
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        scheduler(&connection).await.list_usage(0.0, by).await.expect("an answer")
    })
}

/// Returns the usage of all programs together.
fn total(daemon: &Daemon) -> Usage {
    usage(daemon, &[]).pop().unwrap_or_default()
}

/// The clients' usage as measured by the test. Each range is a lower and an upper bound.
#[derive(Debug, Default)]
struct Ledger {
    lock: (f64, f64),
    wait: (f64, f64),
    resident: (f64, f64),
    swapped: (f64, f64),
}

/// Returns the shortest and the longest possible time between two moments. Each moment is a pair: a
/// time before the moment, and a time after it.
fn between(from: (Instant, Instant), to: (Instant, Instant)) -> (f64, f64) {
    ((to.0 - from.1).as_secs_f64().max(0.0), (to.1 - from.0).as_secs_f64())
}

fn times(range: (f64, f64), by: u64) -> (f64, f64) {
    (range.0 * by as f64, range.1 * by as f64)
}

fn plus(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    (a.0 + b.0, a.1 + b.1)
}

/// Runs `what`. Returns a time before the call, and a time after the daemon has handled the
/// call's messages.
fn during(client: &Client, what: impl FnOnce()) -> (Instant, Instant) {
    let before = Instant::now();
    what();
    // The daemon immediately answers a reservation that fits into the free memory.
    client.send(ClientMessage::Reserve { slot: 0, bytes: 1 });
    client.until(|message| matches!(message, nvshare_wire::SchedulerMessage::Reserved { .. }));
    (before, Instant::now())
}

#[track_caller]
fn assert_within(value: f64, (least, most): (f64, f64), what: &str) {
    // Allows for rounding in sums of floating-point numbers.
    assert!(value >= least * 0.999_999 && value <= most * 1.000_001, "{what}: {value} is not in {least}..={most}");
}

/// Returns the number of clients that have disconnected.
fn gone(daemon: &Daemon) -> usize {
    daemon.log.count("disconnected")
}

#[track_caller]
fn until(done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "it does not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Two clients take turns, and each has memory on the GPU. Returns their usage.
fn use_the_gpu(daemon: &Daemon) -> Ledger {
    let pause = || std::thread::sleep(Duration::from_millis(60));
    let (one, other) = (client(daemon), client(daemon));
    // The counts in a client's first report are from before the connection, and aren't usage.
    report(&one, 0, 0, 1000, 1000);
    report(&other, 0, 0, 0, 0);
    let granted = during(&one, || {
        one.request();
        one.until_granted();
    });
    let has = during(&one, || report(&one, 2 * GIB, GIB, 1000 + 70, 1000));
    let asks = during(&other, || other.request());
    pause();
    let moves = during(&one, || report(&one, GIB, 2 * GIB, 1000 + 70, 1000 + 30));
    pause();
    let hands_over = during(&other, || {
        one.release();
        other.until_granted();
    });
    pause();
    let releases = during(&other, || other.release());
    let ends = during(&other, || {
        let before = gone(daemon);
        drop(one);
        until(|| gone(daemon) > before);
    });
    Ledger {
        lock: plus(between(granted, hands_over), between(hands_over, releases)),
        wait: plus((0.0, (granted.1 - granted.0).as_secs_f64()), between(asks, hands_over)),
        resident: plus(times(between(has, moves), 2 * GIB), times(between(moves, ends), GIB)),
        swapped: plus(times(between(has, moves), GIB), times(between(moves, ends), 2 * GIB)),
    }
}

fn assert_used(usage: &Usage, ledger: &Ledger, rounds: u64) {
    assert_eq!((usage.grants, usage.swapped_in_bytes, usage.swapped_out_bytes), (2 * rounds, 70 * rounds, 30 * rounds));
    assert_within(usage.lock_seconds, ledger.lock, "with the lock");
    assert_within(usage.wait_seconds, ledger.wait, "waits");
    assert_within(usage.resident_byte_seconds, ledger.resident, "on the GPU");
    assert_within(usage.swapped_byte_seconds, ledger.swapped, "in host memory");
}

#[test]
fn usage_records_survive_stopped_and_killed_daemons() {
    let daemon = start(Directory::new());
    assert_eq!(usage(&daemon, &["tenant"]), []);
    assert!(!database(&daemon).exists(), "nobody has used anything");
    let first = use_the_gpu(&daemon);
    assert_used(&total(&daemon), &first, 1);
    let rows = usage(&daemon, &["time", "gpu", "tenant", "unit", "container"]);
    // There are two rows if an hour ended during the test.
    assert!(matches!(rows.len(), 1 | 2), "{rows:?}");
    for row in rows {
        assert_eq!(row.gpu.as_deref(), Some(GPU_NAME));
        assert!(row.lasts == Some(3600) && row.begins.is_some_and(|begins| begins % 3600 == 0), "{row:?}");
    }
    let before = total(&daemon);

    let daemon = start(daemon.stop());
    assert_eq!(total(&daemon), before, "it was saved at the end");
    let then = use_the_gpu(&daemon);
    let ledger = Ledger {
        lock: plus(first.lock, then.lock),
        wait: plus(first.wait, then.wait),
        resident: plus(first.resident, then.resident),
        swapped: plus(first.swapped, then.swapped),
    };
    let both = total(&daemon);
    assert_used(&both, &ledger, 2);
    // A changed retention time applies immediately, and the daemon saves all usage at the same
    // time.
    fs::write(config(&daemon.directory.0), "anti-thrash = \"on\"\n[accounting]\nkeep = \"30d\"\n").expect("a file");
    assert_eq!(daemon.ctl(&["reload"]).code, Some(0));
    assert_eq!(total(&daemon), both, "which the thread has done before it answers");
    let holder = client(&daemon);
    holder.request();
    holder.until_granted();
    let daemon = start(daemon.kill());
    let kept = total(&daemon);
    // Only later usage is lost. If a minute ended at that moment, the next grant was saved too.
    assert!(kept == both || kept.grants == both.grants + 1, "{kept:?} and before {both:?}");
    assert_eq!(daemon.log.count("created a new one"), 0);
}

#[test]
fn the_report_is_printed_as_table_csv_or_json() {
    let daemon = start(Directory::new());
    let none = daemon.ctl(&["report"]);
    assert_eq!((none.code, none.stdout.as_str()), (Some(0), "No program has used a GPU in that time.\n"));
    use_the_gpu(&daemon);
    let table = daemon.ctl(&["report", "--since", "-1h"]);
    assert_eq!((table.code, table.stderr.as_str()), (Some(0), ""));
    assert!(table.stdout.starts_with("USER") && table.stdout.lines().count() == 2, "{}", table.stdout);
    let csv = daemon.ctl(&["report", "--by", "unit", "--csv"]).stdout;
    assert!(csv.starts_with("tenant,unit,lock-seconds,grants,") && csv.lines().count() == 2, "{csv}");
    let json: serde_json::Value =
        serde_json::from_str(&daemon.ctl(&["report", "--by", "container", "--json"]).stdout).expect("JSON");
    assert_eq!((&json[0]["grants"], &json[0]["swapped-in-bytes"]), (&2.into(), &70.into()));
    assert!(json[0]["container"].is_string() && json[0]["lock-seconds"].is_f64(), "{json}");
    assert_eq!(daemon.ctl(&["report", "--since", "30d"]).code, Some(2));
}

#[test]
fn without_a_state_directory_the_report_fails_with_a_reason() {
    let daemon = Daemon::start();
    let report = daemon.ctl(&["report"]);
    assert_eq!(report.code, Some(1));
    assert!(report.stderr.contains("no directory for its state (StateDirectory=)"), "{}", report.stderr);
}

#[test]
fn a_damaged_database_is_set_aside_once() {
    let directory = Directory::new();
    fs::create_dir_all(state(&directory.0)).expect("the state directory");
    let file = state(&directory.0).join("usage.sqlite");
    fs::write(&file, "nonsense ".repeat(1000)).expect("a file");
    let daemon = start(directory);
    assert_eq!(usage(&daemon, &[]), []);
    daemon.log.wait("created a new one");
    let ledger = use_the_gpu(&daemon);
    let daemon = start(daemon.stop());
    assert_used(&total(&daemon), &ledger, 1);
    assert_eq!(daemon.log.count("created a new one"), 0);
    assert!(fs::read_to_string(file.with_extension("sqlite.damaged")).expect("set aside").starts_with("nonsense"));
}

#[test]
fn an_unwritable_state_directory_affects_no_client() {
    let directory = Directory::new();
    // Even root cannot write into a "directory" that is a file.
    fs::write(state(&directory.0), "").expect("a file");
    let daemon = start_as_it_is(directory);
    use_the_gpu(&daemon);
    fs::write(config(&daemon.directory.0), "[accounting]\nkeep = \"30d\"\n").expect("a file");
    assert_eq!(daemon.ctl(&["reload"]).code, Some(0));
    daemon.log.wait("cannot write usage records");
    use_the_gpu(&daemon);
    let report = daemon.ctl(&["report"]);
    assert!(report.code == Some(1) && report.stderr.contains("Not a directory"), "{}", report.stderr);
    daemon.stop();
}

#[test]
#[ignore = "a helper: a user who is not root uses a GPU, and sees nothing but that"]
fn helper_other_user() {
    let client = Client::welcomed(Path::new(&std::env::var("NVSHARE_TEST_SOCKET").expect("by a test")));
    client.attach();
    client.request();
    client.until_granted();
    client.release();
    let address = std::env::var("NVSHARE_TEST_BUS").expect("by a test");
    block_on(async {
        let connection = zbus::connection::Builder::address(address.as_str()).build().await.expect("the bus");
        let used = scheduler(&connection).await.list_usage(0.0, &["tenant"]).await.expect("everybody may");
        let [own] = &used[..] else { panic!("{used:?}") };
        assert_eq!((own.tenant.as_deref(), own.grants), (Some("user 65534"), 1));
        let all = scheduler(&connection).await.list_usage(0.0, &[]).await.expect("everybody may");
        assert_eq!(all.iter().map(|row| row.grants).sum::<u64>(), 1, "nor in sums");
    });
}

#[test]
fn users_other_than_root_see_only_their_own_usage() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let directory = Directory::new();
    let state = state(&directory.0);
    fs::create_dir_all(&state).expect("the state directory");
    let daemon = Daemon::start_in(directory, None, |command, _| {
        command.arg("--bus-address").arg(&bus.address).env("STATE_DIRECTORY", &state);
    });
    daemon.log.wait("on the bus as");
    use_the_gpu(&daemon);
    let mut stranger = helper("usage::helper_other_user", &daemon.socket());
    stranger.env("NVSHARE_TEST_BUS", &bus.address).uid(65534).gid(65534).stderr(Stdio::piped());
    let output = stranger.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tenants: Vec<_> = usage(&daemon, &["tenant"]).into_iter().map(|row| (row.tenant, row.grants)).collect();
    assert_eq!(tenants, [(Some("root".into()), 2), (Some("user 65534".into()), 1)]);
}

#[test]
fn unknown_report_columns_are_rejected() {
    let bus = Bus::start();
    let daemon = bus.daemon();
    block_on(async {
        let connection = on_bus(&bus).await;
        let (name, text) = refusal(scheduler(&connection).await.list_usage(0.0, &["pid"]).await);
        assert_eq!(name, "org.freedesktop.DBus.Error.InvalidArgs");
        assert!(text.contains("\"pid\"") && text.contains("container"), "{text}");
    });
    drop(daemon);
}

/// Returns the daemon's text about the rule's time for its newest client.
fn share(daemon: &Daemon) -> String {
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        let clients = scheduler(&connection).await.list_clients().await.expect("an answer");
        clients.into_iter().max_by_key(|client| client.id).map_or_else(String::new, |client| client.share)
    })
}

#[test]
fn programs_that_used_up_their_gpu_hours_lose_precedence() {
    let directory = Directory::new();
    let uid = rustix::process::geteuid().as_raw();
    let rule = |hours: &str| {
        format!(
            "[[rule]]\nuser = {uid}\ninteractive = true\npriority = 5\ntime-min = \"20%\"\ngpu-hours = \"{hours}\"\n"
        )
    };
    fs::write(config(&directory.0), rule("1s/week")).expect("the configuration");
    let daemon = start(directory);
    let first = client(&daemon);
    let before = "weight 100, time-min 20%, priority 5, interactive, gpu-hours 1s/week (0.0s used)";
    assert_eq!(share(&daemon), before);
    first.request();
    first.until_granted();
    std::thread::sleep(Duration::from_secs(1));
    let used_up = |share: &str| share.starts_with("weight idle, gpu-hours 1s/week (") && share.ends_with("s used)");
    until(|| used_up(&share(&daemon))); // the budget is checked every 5 s
    daemon.log.wait("of 1.0s GPU time in the last 7d");
    let more = client(&daemon);
    drop(first);
    until(|| gone(&daemon) == 1);
    until(|| used_up(&share(&daemon))); // the budget applies to the rule's next program too
    drop(more);

    let daemon = start(daemon.stop());
    let third = client(&daemon);
    // The daemon reads the usage records after it has started to serve.
    until(|| used_up(&share(&daemon)));
    fs::write(config(&daemon.directory.0), rule("100h/month")).expect("a file");
    assert_eq!(daemon.ctl(&["reload"]).code, Some(0));
    let after = "weight 100, time-min 20%, priority 5, interactive, gpu-hours 100h/month (";
    until(|| share(&daemon).starts_with(after));
    let status = daemon.ctl(&["status"]).stdout;
    assert!(status.contains("gpu-hours 100h/month (") && status.contains("s used) by rule"), "{status}");
    drop(third);
}
