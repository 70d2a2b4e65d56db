//! Tests `org.nvshare.Scheduler1` on a private bus and on the control socket. Every user can read
//! the state, and root can change settings. Signals and log lines report the changes.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use crate::private_bus::*;
use nvshare::bus::{NAME, PATH, SchedulerProxy};
use nvshare::scheduler::Event;
use nvshare_wire::{ClientMessage, SchedulerMessage};
use test_support::daemon::*;
use zbus::connection::Builder;
use zbus::{Connection, MessageStream, Variant};

/// Runs the same test on the bus and on the control socket.
fn both_ways(test: impl AsyncFn(&Daemon, &Connection)) {
    if is_root() {
        let bus = Bus::start();
        let daemon = bus.daemon();
        block_on(async {
            test(&daemon, &on_bus(&bus).await).await;
        });
    } else {
        test_support::skip("root, who may do everything on a bus");
    }
    let daemon = Daemon::start();
    block_on(async {
        test(&daemon, &on_control(&daemon.control()).await).await;
    });
}

#[test]
fn settings_can_be_read_and_changed() {
    both_ways(async |_, connection| {
        let scheduler = scheduler(connection).await;
        assert_eq!(scheduler.time_quantum().await.expect("a value"), 30);
        assert_eq!(scheduler.anti_thrash().await.expect("a value"), "auto");
        assert_eq!(scheduler.version().await.expect("a value"), env!("CARGO_PKG_VERSION"));
        for quantum in [1, 3600, 45] {
            scheduler.set_time_quantum(quantum).await.expect("allowed");
            assert_eq!(scheduler.time_quantum().await.expect("a value"), quantum);
        }
        for mode in ["on", "off", "auto"] {
            scheduler.set_anti_thrash(mode).await.expect("allowed");
            assert_eq!(scheduler.anti_thrash().await.expect("a value"), mode);
        }
    });
}

#[test]
fn an_invalid_value_is_rejected_and_changes_nothing() {
    both_ways(async |_, connection| {
        let scheduler = scheduler(connection).await;
        for quantum in [0, 3601, u32::MAX] {
            let expected =
                format!("the time quantum cannot be {quantum} seconds: whole seconds from 1 to 3600 are allowed");
            let error = refusal(scheduler.set_time_quantum(quantum).await);
            assert_eq!(error, ("org.freedesktop.DBus.Error.InvalidArgs".to_owned(), expected));
        }
        let error = refusal(scheduler.set_anti_thrash("maybe").await);
        assert_eq!(error.0, "org.freedesktop.DBus.Error.InvalidArgs");
        assert!(error.1.contains("\"auto\", \"on\" or \"off\" are allowed"), "{}", error.1);
        assert_eq!(scheduler.time_quantum().await.expect("a value"), 30);
        assert_eq!(scheduler.anti_thrash().await.expect("a value"), "auto");
    });
}

/// Returns the changed properties of the next PropertiesChanged signal, as text.
async fn next_change(stream: &mut MessageStream) -> Vec<(String, String)> {
    use zbus::export::futures_core::Stream;
    loop {
        let message = std::future::poll_fn(|cx| std::pin::Pin::new(&mut *stream).poll_next(cx)).await;
        let message = message.expect("the connection lives").expect("a message");
        if message.header().member().is_some_and(|member| member == "PropertiesChanged") {
            let body = message.body();
            let (interface, changed, invalidated): (String, HashMap<String, zbus::OwnedVariant>, Vec<String>) =
                body.deserialize().expect("the signal's types");
            assert_eq!(interface, NAME);
            let mut changes: Vec<_> = changed.into_iter().map(|(name, value)| (name, value.to_string())).collect();
            changes.extend(invalidated.into_iter().map(|name| (name, "invalidated".to_owned())));
            changes.sort();
            return changes;
        }
    }
}

#[test]
fn a_settings_change_is_signalled_once_to_every_subscriber() {
    if !is_root() {
        return test_support::skip("root, who may change settings on a bus");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    block_on(async {
        let (here, there) = (on_bus(&bus).await, on_control(&daemon.control()).await);
        let rule = format!("type='signal',sender='{NAME}',path='{PATH}'");
        let mut on_bus = MessageStream::for_match_rule(rule.as_str(), &here, None).await.expect("a match");
        let mut on_control = MessageStream::from(&there);
        let (bus, control) = (scheduler(&here).await, scheduler(&there).await);
        // Changes a property on the bus and on the control socket. Setting the present value again
        // sends no signal.
        bus.set_time_quantum(45).await.expect("allowed");
        bus.set_time_quantum(45).await.expect("allowed");
        refusal(bus.set_time_quantum(0).await);
        control.set_anti_thrash("on").await.expect("allowed");
        control.set_anti_thrash("on").await.expect("allowed");
        bus.set_time_quantum(46).await.expect("allowed");
        let expected = [("TimeQuantum", "uint32 45"), ("AntiThrash", "\"on\""), ("TimeQuantum", "uint32 46")];
        for (name, value) in expected {
            for stream in [&mut on_bus, &mut on_control] {
                let changes = next_change(stream).await;
                assert_eq!(changes, [(name.to_owned(), value.to_owned())]);
            }
        }
    });
}

#[test]
fn introspection_matches_the_xml_file() {
    both_ways(async |_, connection| {
        let interface = "org.freedesktop.DBus.Introspectable";
        let reply = connection.call_method(Some(NAME), PATH, Some(interface), "Introspect", &()).await;
        let xml: String = reply.expect("an answer").body().deserialize().expect("a text");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        let file = std::fs::read_to_string("dbus/org.nvshare.Scheduler1.xml").expect("the file");
        let start = file.find("<interface ").expect("an interface");
        let end = file.find("</interface>").expect("its end");
        assert!(words(&xml).contains(&words(&file[start..end])), "{xml}");
    });
}

#[test]
fn the_busctl_command_of_the_manual_works() {
    if !is_root() {
        return test_support::skip("root, who may change settings on a bus");
    }
    let bus = Bus::start();
    let _daemon = bus.daemon();
    let busctl = |arguments: &[&str]| {
        Output::of(Command::new("busctl").arg(format!("--address={}", bus.address)).args(arguments))
    };
    let set = busctl(&["set-property", NAME, PATH, NAME, "TimeQuantum", "u", "45"]);
    assert_eq!((set.code, set.stderr.as_str()), (Some(0), ""));
    let get = busctl(&["get-property", NAME, PATH, NAME, "TimeQuantum"]);
    assert_eq!(get.stdout, "u 45\n");
    let wrong = busctl(&["set-property", NAME, PATH, NAME, "TimeQuantum", "u", "0"]);
    assert_eq!(wrong.code, Some(1));
    assert!(wrong.stderr.contains("whole seconds from 1 to 3600 are allowed"), "{}", wrong.stderr);
    let wrong = busctl(&["set-property", NAME, PATH, NAME, "TimeQuantum", "s", "soon"]);
    assert_eq!(wrong.code, Some(1));
}

#[test]
fn clients_and_gpus_are_listed() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let [holder, waiter] = daemon.holder_and_waiter();

        let mut gpus = scheduler.list_gpus().await.expect("an answer");
        // The daemon may read the waiter's request before the holder's last report.
        while gpus.iter().all(|gpu| gpu.resident == 0) {
            gpus = scheduler.list_gpus().await.expect("an answer");
        }
        let [gpu] = gpus.as_slice() else { panic!("{gpus:?}") };
        assert_eq!((gpu.uuid.as_str(), gpu.kind.as_str(), gpu.name.as_str()), (GPU_NAME, "gpu", "Test GPU"));
        assert_eq!((gpu.total, gpu.demand, gpu.resident), (16 * GIB, 24 * GIB, 12 * GIB));
        assert_eq!((&gpu.holders, &gpu.queue, gpu.clients), (&vec![holder.id], &vec![waiter.id], 2));
        assert!(gpu.capacity < gpu.total && gpu.capacity > 13 * GIB, "{gpu:?}");

        let ends = gpu.turn_ends.as_ref().expect("this scheduler says it");
        let starts = gpu.expected_starts.as_ref().expect("this scheduler says it");
        assert!((0.0..60.0).contains(&ends[&holder.id]), "{ends:?}");
        assert!(starts[&waiter.id] >= ends[&holder.id] - 0.1, "it runs once that turn is over: {starts:?}, {ends:?}");
        assert_eq!((ends.len(), starts.len()), (1, 1));
        assert_eq!((gpu.swapped_in_bytes, gpu.swapped_out_bytes), (Some(0), Some(0)));
        assert_eq!((gpu.link_rate, &gpu.contexts), (None, &None), "NVML would know them");

        let clients = scheduler.list_clients().await.expect("an answer");
        let ids: Vec<u64> = clients.iter().map(|client| client.id).collect();
        assert_eq!(ids, [holder.id, waiter.id]);
        // Both clients belong to one user, whose share is divided between them.
        assert_eq!(clients.iter().map(|client| client.gpus[0].share_due).collect::<Vec<_>>(), [Some(500); 2]);
        let first = &clients[0];
        assert_eq!((first.pid, first.library.as_str()), (std::process::id(), "test"));
        assert!(first.command.as_ref().is_some_and(|line| line.contains("daemon")), "{first:?}");
        let [usage] = first.gpus.as_slice() else { panic!("{first:?}") };
        assert_eq!((usage.uuid.as_str(), usage.state.as_str(), usage.engine.as_str()), (GPU_NAME, "holding", "swap"));
        assert_eq!(usage.engine_reason, "the default");
        assert_eq!((usage.demand, usage.resident, usage.grants), (12 * GIB, 12 * GIB, 1));
        assert_eq!(clients[1].gpus[0].state, "waiting");
    });
}

#[test]
#[ignore = "a helper: what a user who is not root sees and may do"]
fn helper_other_user() {
    let address = std::env::var("NVSHARE_TEST_BUS").expect("run by a test, not by hand");
    block_on(async {
        let connection = Builder::address(address.as_str()).build().await.expect("the bus");
        let scheduler = scheduler(&connection).await;
        assert_eq!(scheduler.time_quantum().await.expect("everybody may read"), 30);
        let denied = [
            refusal(scheduler.set_time_quantum(45).await),
            refusal(scheduler.set_anti_thrash("on").await),
            refusal(scheduler.reload().await),
            refusal(scheduler.create_debug_bundle(HashMap::new()).await),
        ];
        for (name, text) in denied {
            assert_eq!(name, "org.freedesktop.DBus.Error.AccessDenied");
            assert!(text.starts_with("user nobody may not ") && text.ends_with("only root may do this"), "{text}");
        }
        assert_eq!(scheduler.time_quantum().await.expect("everybody may read"), 30);
        let clients = scheduler.list_clients().await.expect("everybody may read");
        let [client] = clients.as_slice() else { panic!("{clients:?}") };
        assert_eq!((client.uid, &client.command), (0, &None), "the command lines of others are not shown");
        assert!(!client.name.is_empty());
        assert_eq!(client.tenant, "root");
    });
}

#[test]
fn users_other_than_root_cannot_change_settings() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    let _client = daemon.client();
    let mut stranger = helper("bus::helper_other_user", &daemon.socket());
    stranger.env("NVSHARE_TEST_BUS", &bus.address).uid(65534).gid(65534).stderr(Stdio::piped());
    let output = stranger.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the names of the programs in a timeline. Users other than root see the names of their
/// own programs only.
async fn timeline(connection: &Connection) -> Vec<String> {
    let file = scheduler(connection).await.create_timeline().await.expect("everybody may");
    let mut file = std::fs::File::from(std::os::fd::OwnedFd::from(file));
    assert!(std::io::Write::write_all(&mut file, b"x").is_err() && file.set_len(0).is_err());
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut file, &mut text).expect("it is read");
    let (timeline, _) = nvshare::timeline::json::read(&text).expect("a timeline");
    assert!(timeline.span.is_some_and(|(begins, ends)| begins <= ends));
    timeline.lanes.into_values().flat_map(|lanes| lanes.into_values().map(|lane| lane.label)).collect()
}

#[test]
#[ignore = "a helper: what a user who is not root sees of a timeline"]
fn helper_timeline() {
    let address = std::env::var("NVSHARE_TEST_BUS").expect("run by a test, not by hand");
    let client = Client::welcomed(&helper_socket());
    client.attach();
    client.report(12 * GIB, 0);
    client.request();
    let ended = Client::welcomed(&helper_socket());
    ended.attach();
    ended.report(GIB, 0);
    ended.request();
    block_on(async {
        let connection = Builder::address(address.as_str()).build().await.expect("the bus");
        // The daemon must read the client's request before the client ends.
        let scheduler = scheduler(&connection).await;
        let queued = async || scheduler.list_gpus().await.expect("an answer")[0].queue.len();
        eventually("both requests", async || (queued().await == 2).then_some(())).await;
        drop(ended);
        let clients = async || scheduler.list_clients().await.expect("an answer").len();
        eventually("its end", async || (clients().await == 2).then_some(())).await;
        let own = format!("(PID {})", std::process::id());
        let seen = timeline(&connection).await;
        let [first, second, third] = &seen[..] else { panic!("{seen:?}") };
        // One of the caller's two programs has ended.
        assert!(first.ends_with(&own) && second.ends_with(&own), "{seen:?}");
        assert_eq!(third, "another user's program");
    });
    drop(client);
}

#[test]
fn a_timeline_names_only_the_callers_own_programs() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    let holder = daemon.client();
    holder.attach();
    holder.report(12 * GIB, 0);
    holder.request();
    holder.until_granted();
    let mut stranger = helper("bus::helper_timeline", &daemon.socket());
    stranger.env("NVSHARE_TEST_BUS", &bus.address).uid(65534).gid(65534).stderr(Stdio::piped());
    let output = stranger.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen = block_on(async { timeline(&on_bus(&bus).await).await });
    assert!(seen.iter().all(|label| !label.contains("another")), "root sees all: {seen:?}");
    let own = format!("(PID {})", std::process::id());
    assert!(seen.iter().any(|label| label.ends_with(&own)), "{seen:?}");

    // The timeline still names the program after the program has ended.
    drop(holder);
    block_on(async {
        let connection = on_bus(&bus).await;
        let scheduler = scheduler(&connection).await;
        while !scheduler.list_clients().await.expect("everybody may read").is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let seen = timeline(&connection).await;
        assert!(seen.iter().any(|label| label.ends_with(&own)), "{seen:?}");
    });
}

#[test]
fn a_debug_bundle_is_a_sealed_file() {
    both_ways(async |daemon, connection| {
        let client = daemon.client();
        client.attach();
        let scheduler = scheduler(connection).await;
        let bundle = scheduler.create_debug_bundle(HashMap::new()).await.expect("root may");
        let mut file = std::fs::File::from(std::os::fd::OwnedFd::from(bundle));
        assert!(std::io::Write::write_all(&mut file, b"x").is_err() && file.set_len(0).is_err());
        let bundle = nvshare::recorder::bundle::read(BufReader::new(file)).expect("a bundle");
        assert!(!bundle.header.command_lines);
        assert_eq!(bundle.header.version, env!("CARGO_PKG_VERSION"));
        assert_eq!(bundle.status["clients"][0]["id"], client.id);
        let id = nvshare::scheduler::ClientId(client.id);
        let is_attached = |event: &Event| matches!(event, Event::Attached { client, .. } if *client == id);
        let mut attached = 0;
        let entries = bundle.entries.inspect(|entry| {
            attached += usize::from(entry.as_ref().is_ok_and(|entry| is_attached(&entry.event)));
        });
        let replay = nvshare::recorder::replay::replay(bundle.checkpoint, entries).expect("it can be read");
        assert_eq!((replay.difference, attached), (None, 1));

        for (option, value, said) in [
            (
                "command-lines",
                Variant::from("yes"),
                "wrong options: invalid type: string \"yes\", expected a boolean in `command-lines`",
            ),
            ("secrets", Variant::from(true), "wrong options: unknown option `secrets`, expected `command-lines`"),
        ] {
            let refused = refusal(scheduler.create_debug_bundle(HashMap::from([(option, value)])).await);
            assert_eq!(refused, ("org.freedesktop.DBus.Error.InvalidArgs".to_owned(), said.to_owned()));
        }
    });
}

#[test]
fn reload_applies_a_valid_file_and_ignores_an_invalid_file() {
    if !is_root() {
        return test_support::skip("root, who may change settings on a bus");
    }
    let bus = Bus::start();
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "time-quantum = 10\n").expect("a file");
        command.arg("--config").arg(config).arg("--bus-address").arg(&bus.address);
    });
    daemon.log.wait("on the bus as");
    let config = daemon.directory.0.join("nvshare.toml");
    block_on(async {
        let connection = on_bus(&bus).await;
        let scheduler = scheduler(&connection).await;
        assert_eq!(scheduler.time_quantum().await.expect("a value"), 10);
        std::fs::write(&config, "time-quantum = 20\n").expect("a file");
        scheduler.reload().await.expect("it is right");
        assert_eq!(scheduler.time_quantum().await.expect("a value"), 20);

        std::fs::write(&config, "time-quantum = 0\nanti-thrash = \"on\"\n").expect("a file");
        let (name, text) = refusal(scheduler.reload().await);
        assert_eq!(name, "org.nvshare.Scheduler1.Error.InvalidConfiguration");
        assert!(text.contains("nvshare.toml:1:16: time-quantum"), "{text}");
        // SIGHUP also reloads the configuration, and reports to the log.
        daemon.signal(libc::SIGHUP);
        daemon.log.wait("cannot reload the configuration, keeping the current one");
        assert_eq!(scheduler.time_quantum().await.expect("a value"), 20);
        assert_eq!(scheduler.anti_thrash().await.expect("a value"), "auto");

        std::fs::write(&config, "").expect("a file");
        let before = daemon.log.count("the configuration was reloaded");
        daemon.signal(libc::SIGHUP);
        let reloaded = || daemon.log.count("the configuration was reloaded");
        eventually("it to be reloaded", async || (reloaded() > before).then_some(())).await;
        assert_eq!(scheduler.time_quantum().await.expect("a value"), 30, "what is not in the file is its default");
    });
}

#[test]
fn the_daemon_joins_a_bus_that_starts_later() {
    let directory = Directory::new();
    let address = format!("unix:path={}", directory.0.join("bus").display());
    let daemon = Daemon::start_with(|command, _| {
        command.arg("--bus-address").arg(&address);
    });
    daemon.log.wait("cannot connect to the bus, retrying");
    let client = daemon.client();
    client.attach();
    let bus = Bus::start_at(directory);
    daemon.log.wait("on the bus as");
    block_on(async {
        assert_eq!(scheduler(&on_bus(&bus).await).await.time_quantum().await.expect("a value"), 30);
    });
}

#[test]
fn many_d_bus_calls_do_not_delay_a_hand_over() {
    let bus = Bus::start();
    let daemon = bus.daemon();
    let crowd: Vec<Client> = (0..50).map(|_| daemon.client()).collect();
    let (stop, stopped) = mpsc::channel::<()>();
    let control = daemon.control();
    let listed = Arc::new(AtomicUsize::new(0));
    let count = listed.clone();
    let flood = std::thread::spawn(move || {
        block_on(async {
            let connection = on_control(&control).await;
            let scheduler = scheduler(&connection).await;
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                scheduler.list_clients().await.expect("an answer");
                count.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    assert_eq!(daemon.ctl(&["set", "anti-thrash", "on"]).code, Some(0));
    let [a, b] = [daemon.client(), daemon.client()];
    a.attach();
    a.request();
    a.until_granted();
    b.attach();
    b.request();
    daemon.log.wait("Contended");
    let before = listed.load(Ordering::Relaxed);
    for _ in 0..500 {
        for (holder, next) in [(&a, &b), (&b, &a)] {
            holder.release();
            next.until_granted();
            holder.request();
        }
    }
    // If each hand-over waited for a list, there would be about one list for each hand-over.
    let listings = listed.load(Ordering::Relaxed) - before;
    assert!(listings < 250, "1000 hand-overs took as long as {listings} lists");
    drop(stop);
    flood.join().expect("no panic");
    assert!(listed.load(Ordering::Relaxed) > 0);
    drop(crowd);
}

// ---- locks ---------------------------------------------------------------------------------------------------------

/// Returns the lines that the owner of a lock receives.
fn lines(lock: nvshare::bus::LockFd) -> BufReader<UnixStream> {
    let stream = UnixStream::from(std::os::fd::OwnedFd::from(lock));
    stream.set_nonblocking(false).expect("a blocking socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
    BufReader::new(stream)
}

fn next_line(lines: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line in time");
    line.trim_end().to_owned()
}

#[test]
fn pressure_grows_while_a_client_waits() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        assert_eq!(scheduler.list_pressure().await.expect("an answer"), []);
        let (holder, waiter) = (daemon.client(), daemon.client());
        for client in [&holder, &waiter] {
            client.attach();
            client.request();
        }
        holder.until_granted();
        let look = async || {
            let groups = scheduler.list_pressure().await.expect("an answer");
            let gpu = groups.iter().find(|group| group.kind == "gpu").expect("the GPU").clone();
            let tenant = groups.iter().find(|group| group.kind == "tenant").expect("the tenant");
            // Both clients belong to one tenant.
            assert!((tenant.some_total - gpu.some_total).abs() < 1e-3, "{groups:?}");
            gpu
        };
        let waits = eventually("50 ms", async || Some(look().await).filter(|gpu| gpu.some_total > 0.05)).await;
        assert!(waits.some_avg10 > waits.some_avg300 && waits.full_total < waits.some_total, "{waits:?}");
        holder.release();
        waiter.until_granted();
        let (once, again) = (look().await, look().await);
        assert_eq!((once.some_total, once.full_total), (again.some_total, again.full_total), "nobody waits");
        assert!(again.some_avg10 <= once.some_avg10 && again.some_avg10 > 0.0, "{once:?} {again:?}");
    });
}

#[test]
fn explain_names_the_reasons_for_a_wait() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let refused = refusal(scheduler.explain(0).await);
        assert_eq!(refused.0, "org.freedesktop.DBus.Error.InvalidArgs", "{}", refused.1);
        let (holder, waiter) = (daemon.client(), daemon.client());
        holder.attach();
        // Both clients belong to this process.
        let own = std::process::id();
        let idle = scheduler.explain(own).await.expect("sentences");
        assert!(idle.iter().any(|sentence| sentence.ends_with("it has no work for that GPU.")), "{idle:?}");
        assert!(idle.iter().any(|sentence| sentence == "It uses no GPU."), "{idle:?}");
        holder.request();
        holder.until_granted();
        waiter.attach();
        waiter.request();
        second_once(&scheduler, "waiting").await;
        let text = scheduler.explain(own).await.expect("sentences").join(" ");
        for part in
            ["It holds GPU-", "It has waited for GPU-", &format!("(process {own}) holds GPU-"), "It is expected to run"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        holder.release();
        waiter.until_granted();
        let text = scheduler.explain(own).await.expect("sentences").join(" ");
        assert!(!text.contains("It has waited"), "{text}");
    });
}

/// Waits until the second client is in this state, and returns its entry.
async fn second_once(scheduler: &SchedulerProxy<'_>, state: &str) -> nvshare::bus::Client {
    let look = async || {
        let seen = scheduler.list_clients().await.expect("clients");
        seen.get(1).filter(|client| client.gpus.iter().any(|gpu| gpu.state == state)).cloned()
    };
    eventually(&format!("the second client to be {state}"), look).await
}

#[test]
fn a_lock_is_queued_shown_and_released_on_close() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let holder = daemon.client();
        holder.attach();
        holder.request();
        holder.until_granted();
        let lock = scheduler.acquire_lock("", "bench", "to measure\nalone", HashMap::new()).await.expect("a lock");
        let seen = second_once(&scheduler, "waiting").await;
        assert_eq!((seen.name.as_str(), seen.why.as_str()), ("bench", "to measure?alone"));
        // SAFETY: `geteuid` has no preconditions and cannot fail.
        assert_eq!((seen.pid, seen.uid), (std::process::id(), unsafe { libc::geteuid() }));

        holder.release();
        let mut lines = lines(lock);
        assert_eq!(next_line(&mut lines), "granted");
        holder.request();
        assert_eq!(next_line(&mut lines), "wanted");
        second_once(&scheduler, "holding").await;
        drop(lines);
        holder.until_granted();
        daemon.log.wait("no longer wants the lock");
    });
}

#[test]
fn a_lock_needs_no_free_gpu_memory() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let full = daemon.client();
        full.attach();
        // The remaining memory is less than a context is expected to take.
        full.report((14 << 30) + (900 << 20), 0);
        let look = async || scheduler.list_gpus().await.expect("GPUs");
        let status = eventually("a demand", async || Some(look().await).filter(|gpus| gpus[0].demand > 0)).await;
        assert!(status[0].capacity - status[0].demand < 600 << 20, "{status:?}");
        let lock = scheduler.acquire_lock("", "somebody", "something", HashMap::new()).await.expect("a lock");
        assert_eq!(next_line(&mut lines(lock)), "granted");
    });
}

#[test]
fn a_lock_is_revoked_after_its_turn_even_if_its_owner_never_reads() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        scheduler.set_anti_thrash("on").await.expect("allowed");
        scheduler.set_time_quantum(1).await.expect("allowed");
        let other = daemon.client();
        other.attach();
        let lock = scheduler.acquire_lock(GPU_NAME, "somebody", "something", HashMap::new()).await.expect("a lock");
        second_once(&scheduler, "holding").await;
        for _ in 0..2 {
            other.request();
            other.until_granted();
            other.until(|message| matches!(message, nvshare_wire::SchedulerMessage::Contended { waiters: 1, .. }));
            other.release();
        }
        let mut lines = lines(lock);
        let read: Vec<String> = (0..7).map(|_| next_line(&mut lines)).collect();
        assert_eq!(read, ["granted", "wanted", "revoked", "granted", "wanted", "revoked", "granted"]);
    });
}

#[test]
fn an_invalid_lock_request_is_refused_with_a_reason() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let ask = async |gpu: &str, who: &str, why: &str| {
            refusal(scheduler.acquire_lock(gpu, who, why, HashMap::new()).await)
        };
        let invalid = "org.freedesktop.DBus.Error.InvalidArgs";
        let said = |text: &str| (invalid.to_owned(), text.to_owned());
        let (name, text) = ask("", "a", "b").await;
        assert_eq!(name, said("").0);
        assert!(text.starts_with("the scheduler knows no GPU: the NVIDIA driver cannot be used: "), "{text}");
        let client = daemon.client();
        client.attach();
        let none = format!("unknown GPU \"GPU-0\". The GPUs are {GPU_NAME}");
        assert_eq!(ask("GPU-0", "a", "b").await, said(&none));
        let long = "why must have 1 to 200 characters";
        assert_eq!(ask("", "a", &"b".repeat(201)).await, said(long));
        assert_eq!(ask("", "", "b").await, said("who must have 1 to 200 characters"));
        let options = HashMap::from([("now", zbus::Variant::from(true))]);
        let refused = refusal(scheduler.acquire_lock("", "a", "b", options).await);
        assert_eq!(refused, said("wrong options: unknown option `now`, none is allowed"));
    });
}

/// Starts a client with `bytes` on the GPU. The client releases the lock and evicts memory on
/// request, until the daemon closes the connection.
fn obedient(daemon: &Daemon, bytes: u64) -> std::thread::JoinHandle<()> {
    let client = daemon.client();
    client.attach();
    client.report(bytes, 0);
    client.request();
    client.until_granted();
    client.report(bytes, bytes);
    std::thread::spawn(move || {
        let (mut mapped, mut limit_ack) = (bytes, 0);
        while let Some(message) = client.receive() {
            match message {
                SchedulerMessage::Revoke { .. } => {
                    client.release();
                    client.request();
                }
                SchedulerMessage::Limit { seq, .. } => {
                    limit_ack = seq;
                    client.send(memory_after(u32::MAX, limit_ack, bytes, mapped));
                }
                SchedulerMessage::Allowance { seq, bytes: allowed, .. } => {
                    mapped = allowed.min(bytes);
                    client.send(memory_after(seq, limit_ack, bytes, mapped));
                }
                _ => {}
            }
        }
    })
}

async fn rooms_once(scheduler: &SchedulerProxy<'_>, count: usize) -> nvshare::bus::Gpu {
    let look = async || {
        let gpu = scheduler.list_gpus().await.expect("GPUs").remove(0);
        gpu.rooms.as_ref().is_some_and(|rooms| rooms.len() == count).then_some(gpu)
    };
    eventually(&format!("{count} rooms"), look).await
}

#[test]
fn a_room_is_vacated_shown_and_ended_on_close() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let _client = obedient(daemon, 12 << 30);
        let room = scheduler.make_room("", 8 << 30, HashMap::new()).await.expect("a room");
        let gpu = rooms_once(&scheduler, 1).await;
        assert!(gpu.resident <= (15 << 30) - (8 << 30), "the holder has given its memory: {gpu:?}");
        assert_eq!(gpu.kept, Some(8 << 30));
        let [seen] = gpu.rooms.expect("rooms").try_into().expect("one");
        // SAFETY: `geteuid` has no preconditions and cannot fail.
        assert_eq!((seen.pid, seen.uid, seen.bytes), (std::process::id(), unsafe { libc::geteuid() }, 8 << 30));
        assert!(seen.ready && (1.0..=3600.0).contains(&seen.ends_in), "{seen:?}");
        let text = scheduler.explain(std::process::id()).await.expect("sentences").join(" ");
        assert!(text.contains("8 GiB of GPU-") && text.contains("are kept free for other programs"), "{text}");
        let room = std::os::fd::OwnedFd::from(room);
        let copy = room.try_clone().expect("a copy");
        drop(room);
        rooms_once(&scheduler, 1).await;
        drop(copy);
        assert_eq!(rooms_once(&scheduler, 0).await.kept, Some(0));
        second_resident(&scheduler, 12 << 30).await;
    });
}

/// Waits until clients have `bytes` on the GPU.
async fn second_resident(scheduler: &SchedulerProxy<'_>, bytes: u64) {
    let resident = async || scheduler.list_gpus().await.expect("GPUs")[0].resident;
    eventually(&format!("{bytes} resident bytes"), async || (resident().await >= bytes).then_some(())).await;
}

#[test]
fn a_room_expires_unless_a_written_byte_renews_it() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let client = daemon.client();
        client.attach();
        let lasts = |seconds: u32| HashMap::from([("for", Variant::from(seconds))]);
        let make = async |seconds| {
            let room = scheduler.make_room("", 1 << 30, lasts(seconds)).await.expect("a room");
            UnixStream::from(std::os::fd::OwnedFd::from(room))
        };
        let short = make(1).await;
        let ended = tokio::task::spawn_blocking(move || std::io::copy(&mut &short, &mut std::io::sink()));
        assert_eq!(ended.await.expect("a thread").expect("an end"), 0, "its end is read");
        rooms_once(&scheduler, 0).await;
        let long = make(60).await;
        let left = async || rooms_once(&scheduler, 1).await.rooms.expect("rooms")[0].ends_in;
        eventually("time to pass", async || (left().await < 59.8).then_some(())).await;
        let before = left().await;
        std::io::Write::write_all(&mut &long, b".").expect("room in the socket");
        eventually("it to be renewed", async || (left().await > before).then_some(())).await;
    });
}

#[test]
fn unknown_options_of_a_hibernation_are_refused() {
    both_ways(async |_, connection| {
        let scheduler = scheduler(connection).await;
        for (option, text) in [
            ("now", "wrong options: unknown option `now`, expected `close-connections`"),
            (
                "close-connections",
                "wrong options: invalid type: string \"yes\", expected a boolean in `close-connections`",
            ),
        ] {
            let options = HashMap::from([(option, Variant::from("yes"))]);
            let expected = ("org.freedesktop.DBus.Error.InvalidArgs".to_owned(), text.to_owned());
            assert_eq!(refusal(scheduler.hibernate(1, options).await), expected);
        }
    });
}

#[test]
fn an_impossible_room_is_refused_with_a_reason() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let ask = async |gpu: &str, bytes: u64, options| refusal(scheduler.make_room(gpu, bytes, options).await);
        let invalid = "org.freedesktop.DBus.Error.InvalidArgs";
        let said = |text: &str| (invalid.to_owned(), text.to_owned());
        let (name, text) = ask("", 1, HashMap::new()).await;
        assert_eq!(name, said("").0);
        assert!(text.starts_with("the scheduler knows no GPU: the NVIDIA driver cannot be used: "), "{text}");
        let client = daemon.client();
        client.attach();
        assert_eq!(ask("", 0, HashMap::new()).await, said("the size of a room must be at least 1 byte"));
        let (name, text) = ask("", 17 << 30, HashMap::new()).await;
        assert!(name == invalid && text.contains("has at most 1") && text.contains(" for a room"), "{text}");
        for (options, text) in [
            (("now", Variant::from(true)), "wrong options: unknown option `now`, expected `for`"),
            (
                ("for", Variant::from("long")),
                "wrong options: invalid type: string \"long\", expected a whole number in `for`",
            ),
            (
                ("for", Variant::from(0_u32)),
                "the duration of a room cannot be 0 seconds: whole seconds from 1 to 86400 are allowed",
            ),
        ] {
            assert_eq!(ask("", 1, HashMap::from([options])).await, said(text));
        }
        // Pinned memory is never evicted.
        client.send(pinned(12 << 30));
        client.request();
        client.until_granted();
        let look = async || {
            client.send(pinned(12 << 30));
            (scheduler.list_gpus().await.expect("GPUs")[0].resident >= 12 << 30).then_some(())
        };
        eventually("it to be resident", look).await;
        let (name, text) = ask("", 8 << 30, HashMap::new()).await;
        assert_eq!(name, "org.freedesktop.DBus.Error.Failed", "{text}");
        assert!(text.contains("from GPU-") && text.contains("12 GiB of its memory is pinned"), "{text}");
        let mut rooms = Vec::new();
        for _ in 0..4 {
            rooms.push(scheduler.make_room("", 1 << 20, HashMap::new()).await.expect("a room"));
        }
        let (name, text) = ask("", 1 << 20, HashMap::new()).await;
        assert_eq!(name, "org.freedesktop.DBus.Error.LimitsExceeded");
        assert!(text.contains("already has the maximum of 4 rooms"), "{text}");
    });
}

/// Returns a report of memory that is completely on the GPU and cannot be evicted.
fn pinned(bytes: u64) -> ClientMessage {
    let mut report = memory(0, bytes, bytes);
    if let ClientMessage::Memory { pinned, .. } = &mut report {
        *pinned = bytes;
    }
    report
}

#[test]
fn changes_of_holders_are_signalled() {
    let daemon = Daemon::start();
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        let mut changes = MessageStream::from(&connection);
        let scheduler = scheduler(&connection).await;
        assert_eq!(scheduler.holders().await.expect("a value"), HashMap::new());
        let client = daemon.client();
        client.attach();
        let invalidated = [("Holders".to_owned(), "invalidated".to_owned())];
        for _ in 0..2 {
            client.request();
            client.until_granted();
            let held = HashMap::from([(GPU_NAME.to_owned(), vec![client.id])]);
            while scheduler.holders().await.expect("a value") != held {
                assert_eq!(next_change(&mut changes).await, invalidated);
            }
            client.release();
            let free = HashMap::from([(GPU_NAME.to_owned(), Vec::new())]);
            while scheduler.holders().await.expect("a value") != free {
                assert_eq!(next_change(&mut changes).await, invalidated);
            }
        }
    });
}

/// Returns the next signal about a client: its name and arguments.
async fn next_signal(stream: &mut MessageStream) -> (String, u64, u32) {
    use zbus::export::futures_core::Stream;
    loop {
        let message = std::future::poll_fn(|cx| std::pin::Pin::new(&mut *stream).poll_next(cx)).await;
        let message = message.expect("the connection lives").expect("a message");
        let header = message.header();
        let of_clients = || header.member().is_some_and(|name| name.starts_with("Client"));
        if header.interface().is_some_and(|name| name == NAME) && of_clients() {
            let (id, pid) = message.body().deserialize().expect("the signal's types");
            return (header.member().expect("a name").to_string(), id, pid);
        }
    }
}

#[test]
fn client_arrivals_and_departures_are_signalled() {
    if !is_root() {
        return test_support::skip("root, who may change settings on a bus");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    block_on(async {
        let (here, there) = (on_bus(&bus).await, on_control(&daemon.control()).await);
        let rule = format!("type='signal',sender='{NAME}',interface='{NAME}',path='{PATH}'");
        let mut streams = [
            MessageStream::for_match_rule(rule.as_str(), &here, None).await.expect("a match"),
            MessageStream::from(&there),
        ];
        scheduler(&there).await.time_quantum().await.expect("both are served");
        let pid = std::process::id();
        let client = daemon.client();
        client.attach();
        for stream in &mut streams {
            assert_eq!(next_signal(stream).await, ("ClientAdded".to_owned(), client.id, pid));
        }
        let scheduler = scheduler(&here).await;
        let lock = scheduler.acquire_lock("", "somebody", "a test", HashMap::new()).await.expect("a lock");
        for stream in &mut streams {
            assert_eq!(next_signal(stream).await, ("ClientAdded".to_owned(), client.id + 1, pid));
        }
        drop(lock);
        for stream in &mut streams {
            assert_eq!(next_signal(stream).await, ("ClientRemoved".to_owned(), client.id + 1, pid));
        }
        let id = client.id;
        drop(client);
        for stream in &mut streams {
            assert_eq!(next_signal(stream).await, ("ClientRemoved".to_owned(), id, pid));
        }
    });
}

#[test]
fn connection_times_are_in_unix_seconds() {
    let daemon = Daemon::start();
    let _client = daemon.client();
    block_on(async {
        let scheduler = scheduler(&on_control(&daemon.control()).await).await;
        let [client] = scheduler.list_clients().await.expect("an answer").try_into().expect("one client");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("later than 1970");
        assert!((0.0..3600.0).contains(&(now.as_secs_f64() - client.connected_since)), "{}", client.connected_since);
    });
}

/// Starts a daemon on the bus with these rules.
fn with_rules(bus: &Bus, rules: &str) -> Daemon {
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, rules).expect("a file");
        command.arg("--config").arg(config).arg("--bus-address").arg(&bus.address);
    });
    daemon.log.wait("on the bus as");
    daemon
}

#[test]
fn a_lock_is_subject_to_its_callers_rule() {
    if !is_root() {
        return test_support::skip("root, who may change settings on a bus");
    }
    // SAFETY: `geteuid` has no preconditions and cannot fail.
    let uid = unsafe { libc::geteuid() };
    let bus = Bus::start();
    let rules = format!(
        "[[rule]]\nname = \"urgent\"\nuser = {uid}\nweight = 50\ntime-max = \"40%\"\nallowed-gpus = [\"{GPU_NAME}\"]\n"
    );
    let daemon = with_rules(&bus, &rules);
    let client = daemon.client();
    client.attach();
    let other = Client::welcomed(&daemon.socket());
    other.attach_gpu(nvshare_wire::Uuid([8; 16]), 16 * GIB);
    block_on(async {
        let connection = on_bus(&bus).await;
        let scheduler = scheduler(&connection).await;
        let _lock = scheduler.acquire_lock(GPU_NAME, "me", "a test", HashMap::new()).await.expect("allowed");
        let clients = scheduler.list_clients().await.expect("an answer");
        let lock = clients.iter().find(|client| client.library == "D-Bus").expect("the lock");
        assert_eq!((lock.rule.as_str(), lock.share.as_str()), ("urgent", "weight 50, time-max 40%"));
        let command = lock.command.as_deref().unwrap_or_default();
        assert!(command.contains("daemon"), "it is the caller's process that is shown: {command:?}");

        let (name, text) =
            refusal(scheduler.acquire_lock("GPU-08080808-0808-0808-0808-080808080808", "me", "", HashMap::new()).await);
        assert_eq!((name.as_str(), text.as_str()), (INVALID, "why must have 1 to 200 characters"));
        let other = "GPU-08080808-0808-0808-0808-080808080808";
        let (name, text) = refusal(scheduler.acquire_lock(other, "me", "a test", HashMap::new()).await);
        assert_eq!(name, "org.freedesktop.DBus.Error.AccessDenied");
        assert!(text.contains("rule \"urgent\"") && text.ends_with(&format!("does not allow {other}")), "{text}");
    });
}

const INVALID: &str = "org.freedesktop.DBus.Error.InvalidArgs";

#[test]
fn a_lock_is_in_no_gang() {
    // SAFETY: `geteuid` has no preconditions and cannot fail.
    let uid = unsafe { libc::geteuid() };
    let bus = Bus::start();
    let daemon = with_rules(&bus, &format!("[[rule]]\nname = \"job\"\nuser = {uid}\ngang = true\n"));
    let client = daemon.client();
    client.attach();
    block_on(async {
        let connection = on_bus(&bus).await;
        let (name, text) = refusal(scheduler(&connection).await.acquire_lock("", "me", "a test", HashMap::new()).await);
        assert_eq!(name, "org.freedesktop.DBus.Error.AccessDenied");
        assert!(text.contains("rule \"job\"") && text.ends_with("from running together as a gang"), "{text}");
    });
}

#[test]
fn an_administrator_can_end_a_lock_and_its_caller_is_notified() {
    both_ways(async |daemon, connection| {
        let scheduler = scheduler(connection).await;
        let client = daemon.client();
        client.attach();
        let lock = scheduler.acquire_lock("", "somebody", "a test", HashMap::new()).await.expect("a lock");
        let id = second_once(&scheduler, "holding").await.id;
        for wrong in [client.id, 4711] {
            let (name, text) = refusal(scheduler.terminate_lock(wrong).await);
            assert_eq!(
                (name.as_str(), text),
                (INVALID, format!("client {wrong} does not hold a lock acquired with AcquireLock"))
            );
        }
        client.request();
        let mut lines = lines(lock);
        assert_eq!(next_line(&mut lines), "granted");
        scheduler.terminate_lock(id).await.expect("root may");
        client.until_granted();
        while next_line(&mut lines) == "wanted" {}
        let mut rest = String::new();
        assert_eq!(lines.read_line(&mut rest).expect("the end"), 0, "{rest}");
        daemon.log.wait("is disconnected, because an administrator ended its lock");
    });
}
