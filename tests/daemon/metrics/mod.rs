//! Compares the metrics with the clients' actions.

mod documents;
mod http;
mod scrape;

use nvshare_wire::client::ReleaseReason;
use nvshare_wire::{ClientMessage, Counts, SchedulerMessage, Text, Uuid};
use scrape::{Scrape, scrape};
use test_support::daemon::*;

fn client(daemon: &Daemon) -> Client {
    let client = Client::welcomed(&daemon.socket());
    client.attach();
    client
}

/// A report with the client's counters.
fn report(demand: u64, mapped: u64, counts: [u64; 4]) -> ClientMessage {
    let [swapped_out, swapped_in, unmoved, refused] = counts;
    ClientMessage::Memory {
        slot: 0,
        ack: 0,
        demand,
        mapped,
        swapped: demand - mapped,
        pinned: 0,
        device_free: u64::MAX,
        limit_ack: 0,
        host: demand - mapped,
        counts: Counts { swapped_out, swapped_in, unmoved, refused },
        in_file: 0,
        managed: 0,
        managed_mapped: 0,
    }
}

/// Waits until the daemon has read all of a client's messages.
fn settle(client: &Client) {
    // The daemon immediately answers a reservation that fits into the free memory.
    client.send(ClientMessage::Reserve { slot: 0, bytes: 1 });
    client.until(|message| matches!(message, SchedulerMessage::Reserved { .. }));
}

/// Scrapes all metrics again, and checks that no counter has decreased.
fn scrape_again(daemon: &Daemon, before: &Scrape) -> Scrape {
    // Scrapes within a short time share one result.
    std::thread::sleep(std::time::Duration::from_millis(150));
    let after = scrape(&daemon.directory.0);
    for (name, family) in before.families.iter().filter(|(_, family)| family.kind != "gauge") {
        for sample in &family.samples {
            let labels: Vec<(&str, &str)> = sample.labels.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
            // Clients that have disconnected have no samples.
            if let [now] = after.all(name, &labels)[..] {
                assert!(now.value >= sample.value, "{name} {labels:?}: {} and then {}", sample.value, now.value);
            } else {
                assert!(name.starts_with("nvshare_client_"), "{name} {labels:?}");
            }
        }
    }
    after
}

#[test]
fn metrics_are_served_only_if_configured() {
    let daemon = Daemon::start();
    daemon.client().attach();
    let threads = || -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).expect("it runs");
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok()).collect()
    };
    // A thread sets its name only after it has started.
    test_support::wait_for("the D-Bus thread", || threads().iter().any(|name| name == "dbus\n").then_some(()));
    assert!(!threads().iter().any(|name| name == "metrics\n"), "{:?}", threads());
    assert_eq!(daemon.log.count("metrics are at"), 0);
}

#[test]
fn lock_and_wait_times_match_the_clients_turns() {
    let daemon = scrape::daemon("", "anti-thrash = \"on\"");
    let (one, other) = (client(&daemon), client(&daemon));
    one.request();
    one.until_granted();
    other.request();
    one.until(|message| matches!(message, SchedulerMessage::Contended { waiters: 1, .. }));
    let before = scrape(&daemon.directory.0);
    assert!(before.of(&one, "lock_seconds") > 0.0 && before.of(&other, "waiting_seconds") > 0.0);
    assert_eq!((before.of(&other, "lock_seconds"), before.of(&other, "wait_seconds")), (0.0, 0.0));
    assert_eq!((before.of_gpu("clients"), before.of_gpu("holders"), before.of_gpu("waiters")), (2.0, 1.0, 1.0));
    assert_eq!((before.of_gpu("grants"), before.of_gpu("hand_overs")), (1.0, 0.0));

    one.release();
    other.until_granted();
    let between = scrape_again(&daemon, &before);
    assert_eq!((between.of_gpu("grants"), between.of_gpu("hand_overs")), (2.0, 1.0));
    assert_eq!((between.of(&one, "hand_overs"), between.of(&other, "hand_overs")), (0.0, 1.0));
    assert_eq!((between.of_gpu("holders"), between.of_gpu("waiters")), (1.0, 0.0));
    let waited = between.of(&other, "wait_seconds");
    assert!(waited >= before.of(&other, "waiting_seconds") && between.of(&other, "waiting_seconds") == 0.0);
    // The histogram counts both waits. The sum of both waits is the clients' total.
    let [waits] = between.all("nvshare_gpu_wait_seconds", &[])[..] else { panic!("one GPU") };
    assert_eq!(waits.buckets.last(), Some(&(f64::INFINITY, 2)));
    assert_eq!(waits.buckets.iter().find(|(bound, _)| *bound >= waited).map(|(_, count)| *count), Some(2));
    assert!((waits.value - waited - between.of(&one, "wait_seconds")).abs() < 1e-6);

    // Without a holder, no time is counted.
    other.release();
    settle(&other);
    let idle = scrape_again(&daemon, &between);
    let still = scrape_again(&daemon, &idle);
    for name in ["lock_seconds", "held_seconds", "wait_seconds"] {
        assert_eq!(still.of_gpu(name), idle.of_gpu(name), "{name}");
    }
    let sum = idle.of(&one, "lock_seconds") + idle.of(&other, "lock_seconds");
    assert!((idle.of_gpu("lock_seconds") - sum).abs() < 1e-6);
    assert!((idle.of_gpu("held_seconds") - sum).abs() < 1e-2, "they took turns");
}

#[test]
fn concurrent_holders_are_each_counted() {
    let daemon = scrape::daemon("", "anti-thrash = \"off\"");
    let clients = [client(&daemon), client(&daemon), client(&daemon)];
    clients.iter().for_each(Client::request);
    clients.iter().for_each(Client::until_granted);
    let first = scrape(&daemon.directory.0);
    assert_eq!((first.of_gpu("holders"), first.of_gpu("hand_overs")), (3.0, 2.0));
    let then = scrape_again(&daemon, &first);
    let more = |name| then.of_gpu(name) - first.of_gpu(name);
    assert!((more("lock_seconds") - 3.0 * more("held_seconds")).abs() < 1e-6);
}

#[test]
fn moved_bytes_match_reports_and_outlive_their_clients() {
    let daemon = scrape::daemon("", "");
    let (one, other) = (client(&daemon), client(&daemon));
    // The scheduler ignores the counts in a client's first report, because they are from before the
    // connection.
    one.send(report(8 * GIB, 2 * GIB, [100, 200, 300, 7]));
    other.send(report(GIB, 0, [0; 4]));
    one.send(report(8 * GIB, 3 * GIB, [1100, 200, 350, 9]));
    one.send(report(8 * GIB, 4 * GIB, [1600, 260, 350, 9]));
    other.send(report(GIB, GIB, [0, 40, 5, 0]));
    [&one, &other].into_iter().for_each(settle);
    let said = scrape(&daemon.directory.0);
    let moved = |name| (said.of(&one, name), said.of(&other, name), said.of_gpu(name));
    assert_eq!(moved("swapped_out_bytes"), (1500.0, 0.0, 1500.0));
    assert_eq!(moved("swapped_in_bytes"), (60.0, 40.0, 100.0));
    assert_eq!(moved("unmoved_bytes"), (50.0, 5.0, 55.0));
    assert_eq!(moved("refused_allocations"), (2.0, 0.0, 2.0));
    let gib = GIB as f64;
    assert_eq!(moved("demand_bytes"), (8.0 * gib, gib, 9.0 * gib));
    assert_eq!(moved("resident_bytes"), (4.0 * gib, gib, 5.0 * gib));
    assert_eq!(moved("swapped_bytes"), (4.0 * gib, 0.0, 4.0 * gib));
    assert_eq!(said.of_gpu("total_bytes"), 16.0 * gib);

    // The client detaches from the GPU and attaches again. Its counters continue, but its gauges
    // start again.
    one.send(ClientMessage::Detach { slot: 0 });
    settle(&other);
    let detached = scrape_again(&daemon, &said);
    assert_eq!(detached.of(&one, "swapped_out_bytes"), 1500.0);
    assert_eq!(detached.all("nvshare_client_demand_bytes", &[]).len(), 1);
    one.attach();
    one.send(report(GIB, GIB, [5000, 260, 350, 9]));
    one.send(report(GIB, GIB, [5007, 260, 350, 9]));
    settle(&one);
    let back = scrape_again(&daemon, &detached);
    assert_eq!((back.of(&one, "swapped_out_bytes"), back.of_gpu("swapped_out_bytes")), (1507.0, 1507.0));

    drop(one);
    daemon.log.wait("client=1 pid");
    settle(&other);
    let gone = scrape_again(&daemon, &back);
    assert!(gone.families["nvshare_client_swapped_out_bytes"].samples.len() == 1);
    assert_eq!((gone.of_gpu("swapped_out_bytes"), gone.of_gpu("clients")), (1507.0, 1.0));
    assert!(gone.of_gpu("lock_seconds") >= back.of_gpu("lock_seconds"));
}

#[test]
fn counters_of_a_hostile_client_never_overflow_or_decrease() {
    let daemon = scrape::daemon("", "");
    let client = client(&daemon);
    let mut before = scrape(&daemon.directory.0);
    for counts in [[0; 4], [u64::MAX; 4], [0; 4], [u64::MAX; 4]] {
        client.send(report(GIB, 0, counts));
        settle(&client);
        before = scrape_again(&daemon, &before);
    }
    assert!(before.of_gpu("swapped_out_bytes") > 1e19);
}

#[test]
fn rule_and_scheduler_limits_are_gauges() {
    let daemon = scrape::daemon("", "[[rule]]\nmemory-max = \"2G\"");
    let client = client(&daemon);
    client.send(ClientMessage::RequestLimit { slot: 0, bytes: 4 * GIB });
    client.until(|message| matches!(message, SchedulerMessage::Denied { .. }));
    let said = scrape(&daemon.directory.0);
    // The library counts failed allocations and reports their number, so the daemon's own denial
    // isn't counted here.
    assert_eq!((said.of(&client, "refused_allocations"), said.of_gpu("refused_allocations")), (0.0, 0.0));
    assert_eq!(said.of(&client, "memory_max_bytes"), 2.0 * GIB as f64);
    assert!(said.of(&client, "limit_bytes") <= 2.0 * GIB as f64);
}

#[test]
fn a_release_for_lack_of_memory_counts_as_a_turn() {
    let daemon = scrape::daemon("", "");
    let client = client(&daemon);
    client.request();
    client.until_granted();
    client.send(ClientMessage::Release { gpus: 1, reason: ReleaseReason::NoMemory, busy_us: 0 });
    client.request();
    client.until_granted();
    assert_eq!(scrape(&daemon.directory.0).of_gpu("grants"), 2.0);
}

/// The names of a process and of its GPU may contain any characters.
#[test]
fn label_values_are_escaped() {
    let daemon = scrape::daemon("", "");
    let before = std::fs::read("/proc/self/comm").expect("a name");
    let names: [(&[u8], &str); 5] = [
        (b"a\"b\\c{d},e=\"", "a\"b\\c{d},e=\""),
        (b"\\n\\\\\"", "\\n\\\\\""),
        (b"a\nb\x1b\tc", "a?b??c"),
        (b"\xff\xfe caf\xc3\xa9", "\u{fffd}\u{fffd} café"),
        (b"# EOF", "# EOF"),
    ];
    let mut clients = Vec::new();
    for (name, _) in names {
        std::fs::write("/proc/self/comm", name).expect("a name");
        clients.push(client(&daemon));
    }
    std::fs::write("/proc/self/comm", before).expect("a name");
    let gpu = Uuid([8; 16]);
    let mut attached = attach(1, gpu);
    if let ClientMessage::Attach { name, .. } = &mut attached {
        *name = Text::new("GPU \"0\"\\\n{} é");
    }
    clients[0].send(attached);
    settle(&clients[0]);
    let said = scrape(&daemon.directory.0);
    for (client, (_, name)) in clients.iter().zip(names) {
        let id = client.id.to_string();
        let of_it = said.all("nvshare_client_grants", &[("client", &id), ("gpu", GPU_NAME)]);
        assert_eq!(of_it[0].label("name"), Some(name), "{}", said.text);
        assert_eq!(of_it[0].label("pid"), Some(&*std::process::id().to_string()));
    }
    said.one("nvshare_gpu_total_bytes", &[("name", "GPU \"0\"\\?{} é"), ("index", "")]);
}

#[test]
fn a_d_bus_lock_counts_as_a_client() {
    let daemon = scrape::daemon("", "");
    let client = daemon.client();
    client.attach();
    let mut command = ctl();
    command.arg("--control").arg(daemon.control()).args(["lock", "--", "cat"]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().expect("it starts");
    daemon.log.wait("Grant");
    let said = scrape(&daemon.directory.0);
    assert_eq!(said.of_gpu("holders"), 1.0);
    assert_eq!(said.families["nvshare_client_lock_seconds"].samples.len(), 2);
    drop(child.stdin.take());
    assert!(wait(&mut child).success());
}

#[test]
fn a_workloads_counters_outlive_its_programs() {
    let daemon = scrape::daemon_without_programs();
    // NVML doesn't know the GPU, so the daemon lists the GPU only while this client uses it.
    let _stays = client(&daemon);
    let said = |expected: [f64; 3]| {
        // Scrapes within a short time share one result.
        std::thread::sleep(std::time::Duration::from_millis(150));
        let scrape = scrape(&daemon.directory.0);
        let all =
            ["programs", "grants", "demand_bytes"].map(|name| scrape.one(&format!("nvshare_workload_{name}"), &[]));
        assert_eq!(all, expected, "{}", scrape.text);
        assert!(scrape.families.keys().all(|name| !name.starts_with("nvshare_client_")), "{}", scrape.text);
    };
    for (number, left) in [(1.0, 0), (2.0, 1)] {
        let client = client(&daemon);
        client.send(report(2 << 20, 0, [0; 4]));
        client.request();
        client.until(|message| matches!(message, SchedulerMessage::Grant { .. }));
        said([2.0, number, f64::from(2 << 20)]);
        drop(client);
        test_support::wait_for("its end", || (daemon.log.count(" disconnected") > left).then_some(()));
        said([1.0, number, 0.0]);
    }
}
