//! Authorization on the bus. root may do everything. Other users may do what polkit allows, even if
//! polkit behaves badly.

use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use crate::fake_polkit::*;
use crate::private_bus::*;
use nvshare::bus::{NAME, PATH, SchedulerProxy};
use test_support::artifact;
use test_support::daemon::*;
use zbus::connection::Builder;
use zbus::proxy::MethodFlags;
use zbus::{Connection, OwnedVariant, Variant};

pub const NOBODY: u32 = 65534;
/// The bus admits only users with a name. On every system, this user is named "daemon".
const SOMEBODY: u32 = 1;

const NOT_AUTHORIZED: &str = "org.freedesktop.DBus.Error.AccessDenied";
const NEEDS_PASSWORD: &str = "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired";
const CHANGE: &str = "org.nvshare.Scheduler1.change-settings";
const LOCK: &str = "org.nvshare.Scheduler1.acquire-lock";
const SEE: &str = "org.nvshare.Scheduler1.see-commands";
const DEBUG: &str = "org.nvshare.Scheduler1.debug";

// ---- users ---------------------------------------------------------------------------------------------------------

/// Runs `work` as another user, in a separate thread: the system call changes the user of one
/// thread only.
fn as_user<T: Send + 'static>(uid: u32, work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        // SAFETY: `setresuid` takes no pointers and changes only this thread's effective user. -1 keeps
        // the other user IDs.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
        work()
    });
    thread.join().expect("no panic")
}

pub async fn on_bus_as(bus: &Bus, uid: u32) -> Connection {
    let path = bus.address.split([':', ',']).find_map(|part| part.strip_prefix("path=")).expect("a path").to_owned();
    let stream = as_user(uid, || UnixStream::connect(path).expect("the bus"));
    Builder::unix_stream(stream).user_id(uid).build().await.expect("the handshake")
}

/// Calls a method with flags. The flags determine whether polkit may ask for a password.
async fn call(connection: &Connection, interface: &str, method: &str, body: &Body<'_>, flags: MethodFlags) -> Reply {
    let proxy = zbus::Proxy::new(connection, NAME, PATH, interface).await.expect("a proxy");
    match body {
        Some(body) => proxy.call_with_flags(method, flags, body).await,
        None => proxy.call_with_flags(method, flags, &()).await,
    }
    .map(|_: Option<()>| ())
}
type Body<'a> = Option<(&'a str, &'a str, Variant<'a>)>;
type Reply = zbus::Result<()>;

async fn set(connection: &Connection, property: &str, value: impl Into<Variant<'_>>, flags: MethodFlags) -> Reply {
    let body = Some((NAME, property, value.into()));
    call(connection, "org.freedesktop.DBus.Properties", "Set", &body, flags).await
}

async fn set_quantum(connection: &Connection, seconds: u32) -> Reply {
    set(connection, "TimeQuantum", seconds, MethodFlags::empty()).await
}

/// Starts calls that wait for polkit, each in a separate task.
fn start_waiting(connection: &Connection, calls: usize) -> Vec<tokio::task::JoinHandle<Reply>> {
    let wait = |_| {
        let connection = connection.clone();
        tokio::spawn(async move { set_quantum(&connection, 45).await })
    };
    (0..calls).map(wait).collect()
}

/// Runs a test with a daemon on a bus with a fake polkit.
fn with_polkit(test: impl AsyncFn(&Bus, &Daemon, &Polkit)) {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    block_on(async {
        let polkit = Polkit::start(&bus).await;
        test(&bus, &daemon, &polkit).await;
    });
}

async fn quantum(connection: &Connection) -> u32 {
    scheduler(connection).await.time_quantum().await.expect("everybody may read")
}

async fn acquire(scheduler: &SchedulerProxy<'_>) -> zbus::Result<nvshare::bus::LockFd> {
    scheduler.acquire_lock("", "somebody", "a test", HashMap::new()).await
}

/// Whether the only client's command line is listed.
async fn sees_command(scheduler: &SchedulerProxy<'_>) -> bool {
    let clients = scheduler.list_clients().await.expect("everybody may list");
    let [client] = clients.as_slice() else { panic!("{clients:?}") };
    client.command.is_some()
}

// ---- the tests -----------------------------------------------------------------------------------------------------

/// The bus delivers messages to a connection in order. Answers about callers must not queue behind calls.
#[test]
fn the_connection_that_serves_calls_asks_no_questions_about_callers() {
    with_polkit(async |bus, _, polkit| {
        let stranger = on_bus_as(bus, NOBODY).await;
        polkit.say(Says::Yes);
        set(&stranger, "TimeQuantum", 45_u32, MethodFlags::empty()).await.expect("polkit says yes");
        let bus = zbus::fdo::DBusProxy::new(&stranger).await.expect("the bus");
        let owner = bus.get_name_owner(NAME.try_into().expect("a name")).await.expect("the daemon");
        let askers: Vec<String> = polkit.asked().into_iter().map(|question| question.asker).collect();
        assert!(askers.len() == 1 && askers[0] != owner.as_str(), "{askers:?} and {owner}");
    });
}

#[test]
fn polkit_decides_about_the_sender_of_a_call() {
    with_polkit(async |bus, _, polkit| {
        let stranger = on_bus_as(bus, NOBODY).await;
        let name = stranger.unique_name().expect("a name").to_string();
        let (plain, interactive) = (MethodFlags::empty(), MethodFlags::ALLOW_INTERACTIVE_AUTH);
        for (flags, sent) in [(plain, 0), (interactive, 1)] {
            polkit.say(Says::Yes);
            set(&stranger, "TimeQuantum", 45_u32, flags).await.expect("polkit says yes");
            set(&stranger, "MaxWait", 90_u32, flags).await.expect("polkit says yes");
            set(&stranger, "AntiThrash", "on", flags).await.expect("polkit says yes");
            assert_eq!(quantum(&stranger).await, 45);
            call(&stranger, NAME, "Reload", &None, flags).await.expect("polkit says yes");
            call(&stranger, NAME, "Reset", &None, flags).await.expect("polkit says yes");
            assert_eq!(quantum(&stranger).await, 30);
            let asked = polkit.asked();
            assert_eq!(asked.len(), 5);
            let changes: Vec<_> = asked.iter().map(|question| question.details["change"].as_str()).collect();
            let expected = [
                "change the time quantum",
                "change the longest wait",
                "change anti-thrash",
                "reload the configuration",
                "reset the settings",
            ];
            assert_eq!(changes, expected);
            for question in asked {
                let Asked { subject, action, flags, .. } = question;
                assert_eq!((subject.as_str(), action.as_str(), flags), (name.as_str(), CHANGE, sent));
            }

            polkit.say(Says::No);
            let refusals = [
                set(&stranger, "TimeQuantum", 45_u32, flags).await,
                set(&stranger, "MaxWait", 90_u32, flags).await,
                set(&stranger, "AntiThrash", "on", flags).await,
                call(&stranger, NAME, "Reload", &None, flags).await,
                call(&stranger, NAME, "Reset", &None, flags).await,
            ];
            assert_eq!(polkit.asked().len(), refusals.len());
            for refused in refusals {
                let (name, text) = refusal(refused);
                assert_eq!(name, NOT_AUTHORIZED);
                assert!(
                    text.starts_with("user nobody may not ") && text.ends_with(": polkit does not allow it"),
                    "{text}"
                );
            }
        }
        polkit.say(Says::Challenge);
        let (name, text) = refusal(set(&stranger, "TimeQuantum", 45_u32, plain).await);
        assert_eq!(name, NEEDS_PASSWORD);
        let wanted = "user nobody may not change the time quantum without a password, \
                      and the call does not allow a password prompt";
        assert_eq!(text, wanted);
        let (name, text) = refusal(set(&stranger, "TimeQuantum", 45_u32, interactive).await);
        assert_eq!(name, NOT_AUTHORIZED);
        assert!(text.ends_with("there is no polkit agent to ask for a password"), "{text}");
        polkit.say(Says::Dismissed);
        let (name, text) = refusal(set(&stranger, "TimeQuantum", 45_u32, interactive).await);
        assert_eq!(name, NOT_AUTHORIZED);
        assert!(text.ends_with("no password was given"), "{text}");
        assert_eq!(quantum(&stranger).await, 30);
    });
}

#[test]
fn polkit_is_not_asked_about_root_or_for_an_invalid_value() {
    with_polkit(async |bus, daemon, polkit| {
        polkit.say(Says::No);
        let (root, stranger) = (on_bus(bus).await, on_bus_as(bus, NOBODY).await);
        let client = daemon.client();
        client.attach();
        set_quantum(&root, 45).await.expect("root may");
        let scheduler = scheduler(&root).await;
        scheduler.reload().await.expect("root may");
        scheduler.reset().await.expect("root may");
        acquire(&scheduler).await.expect("root may");
        scheduler.list_clients().await.expect("everybody may");
        for value in [0, 3601] {
            let (name, text) = refusal(set_quantum(&stranger, value).await);
            assert_eq!(name, "org.freedesktop.DBus.Error.InvalidArgs");
            assert!(text.ends_with("whole seconds from 1 to 3600 are allowed"), "{text}");
        }
        assert_eq!(polkit.asked(), []);
    });
}

#[test]
fn a_lock_requires_polkit_authorization() {
    with_polkit(async |bus, daemon, polkit| {
        let client = daemon.client();
        client.attach();
        let stranger = on_bus_as(bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        acquire(&scheduler).await.expect("polkit says yes");
        let [question] = polkit.asked().try_into().expect("one question");
        assert_eq!((question.action.as_str(), question.flags), (LOCK, 0));
        let program = std::fs::read_to_string("/proc/self/comm").expect("a name");
        let told = |question: &Asked, name: &str| question.details.get(name).cloned();
        assert_eq!(told(&question, "program").as_deref(), Some(program.trim_end()));
        assert_eq!(told(&question, "gpu").as_deref(), Some(GPU_NAME));
        assert_eq!(told(&question, "rule").as_deref(), Some(""));
        polkit.say(Says::No);
        let refused = format!("user nobody may not acquire the lock of {GPU_NAME}: polkit does not allow it");
        assert_eq!(refusal(acquire(&scheduler).await), (NOT_AUTHORIZED.to_owned(), refused));
        polkit.asked();
        // No user is asked for a password for an invalid request.
        let refused = refusal(scheduler.acquire_lock("GPU-0", "a", "b", HashMap::new()).await);
        assert_eq!(refused.0, "org.freedesktop.DBus.Error.InvalidArgs");
        assert_eq!(polkit.asked(), []);
    });
}

#[test]
fn a_room_requires_polkit_authorization() {
    with_polkit(async |bus, daemon, polkit| {
        let client = daemon.client();
        client.attach();
        let stranger = on_bus_as(bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        let make = async |bytes: u64| scheduler.make_room("", bytes, HashMap::new()).await;
        drop(make(1 << 30).await.expect("polkit says yes"));
        let [question] = polkit.asked().try_into().expect("one question");
        assert_eq!(question.action, "org.nvshare.Scheduler1.make-room");
        assert_eq!(question.details.get("gpu").map(String::as_str), Some(GPU_NAME));
        polkit.say(Says::No);
        let refused = format!("user nobody may not reserve memory of {GPU_NAME}: polkit does not allow it");
        assert_eq!(refusal(make(1 << 30).await), (NOT_AUTHORIZED.to_owned(), refused));
        polkit.asked();
        // No user is asked for a password for an invalid request.
        assert_eq!(refusal(make(0).await).0, "org.freedesktop.DBus.Error.InvalidArgs");
        assert_eq!(polkit.asked(), []);
    });
}

/// Creates the devices of a machine with one GPU, in the daemon's mount namespace.
const DEVICES: &str = "mount -t tmpfs none /dev && : > /dev/null && : > /dev/nvidia0 && chmod 660 /dev/nvidia0 && \
                       chgrp 44 /dev/nvidia0 && exec \"$@\"";

#[test]
fn a_lock_requires_access_to_the_gpu_even_if_polkit_permits_it() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = Daemon::start_with(|command, directory| {
        std::fs::copy(artifact("libnvidia_ml.so"), directory.join("libnvidia-ml.so.1")).expect("NVML");
        let mut inside = std::process::Command::new("unshare");
        inside.args(["--mount", "--propagation", "private", "sh", "-ec", DEVICES, "sh"]);
        inside.arg(command.get_program()).args(command.get_args()).arg("--bus-address").arg(&bus.address);
        inside.env("LD_LIBRARY_PATH", directory).env("CUDA_SIM_DIR", directory.join("gpu"));
        inside.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM").env_remove("STATE_DIRECTORY");
        *command = inside;
    });
    daemon.log.wait("on the bus as");
    let device = std::path::PathBuf::from(format!("/proc/{}/root/dev/nvidia0", daemon.child.id()));
    block_on(async {
        let polkit = Polkit::start(&bus).await;
        let stranger = on_bus_as(&bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        let (name, text) = refusal(acquire(&scheduler).await);
        assert_eq!(name, NOT_AUTHORIZED);
        assert!(text.starts_with("user nobody may not acquire the lock of GPU-"), "{text}");
        assert!(text.ends_with(": it may not read and write /dev/nvidia0"), "{text}");
        assert_eq!(polkit.asked(), [], "no password opens the device");

        // The bus passes on the groups of this thread. One of them is root's group.
        std::os::unix::fs::chown(&device, None, Some(0)).expect("its group");
        acquire(&scheduler).await.expect("its group may");
        let [question] = polkit.asked().try_into().expect("one question");
        assert!(question.details["gpu"].starts_with("GPU 0 ("), "{question:?}");

        std::fs::remove_file(&device).expect("the device");
        let (name, text) = refusal(acquire(&scheduler).await);
        assert_eq!(name, NOT_AUTHORIZED);
        assert!(text.contains("cannot examine /dev/nvidia0: No such file"), "{text}");
        drop(acquire(&self::scheduler(&on_bus(&bus).await).await).await.expect("root may"));
    });
}

#[test]
fn polkit_requests_name_the_changed_rule_or_the_locks_rule() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        let rule = format!("[[rule]]\nname = \"guests\"\nuser = {NOBODY}\npriority = 5\n");
        std::fs::write(&config, format!("anti-thrash = \"on\"\n{rule}")).expect("a file");
        command.arg("--config").arg(config).arg("--bus-address").arg(&bus.address);
    });
    daemon.log.wait("on the bus as");
    block_on(async {
        let polkit = Polkit::start(&bus).await;
        let stranger = on_bus_as(&bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        let holder = daemon.client();
        holder.attach();
        holder.request();
        holder.until_granted();
        let _lock = acquire(&scheduler).await.expect("polkit says yes");
        // The rule of the lock's caller has a priority, so the lock doesn't wait for the end of the
        // turn.
        holder.until(|message| matches!(message, nvshare_wire::SchedulerMessage::Revoke { .. }));
        let rule = HashMap::from([("weight", Variant::from(5_i64)), ("user", Variant::from("root"))]);
        scheduler.set_rule("batch", rule).await.expect("polkit says yes");
        let [lock, change] = polkit.asked().try_into().expect("two questions");
        assert!(lock.details["rule"].starts_with("\"guests\" ("), "{lock:?}");
        assert_eq!((change.action.as_str(), change.details["rule"].as_str()), (CHANGE, "batch"));
        assert_eq!(change.details["change"], "change the rule \"batch\"");
    });
}

#[test]
fn a_debug_bundle_has_its_own_polkit_action() {
    with_polkit(async |bus, _, polkit| {
        let stranger = on_bus_as(bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        polkit.say(Says::Yes);
        scheduler.create_debug_bundle(HashMap::new()).await.expect("polkit says yes");
        let [question] = polkit.asked().try_into().expect("one question");
        assert_eq!(question.action, DEBUG);
        polkit.say(Says::No);
        let refused = refusal(scheduler.create_debug_bundle(HashMap::new()).await);
        let text = "user nobody may not create a debug bundle: polkit does not allow it";
        assert_eq!(refused, (NOT_AUTHORIZED.to_owned(), text.to_owned()));
    });
}

#[test]
fn other_users_command_lines_are_shown_if_polkit_permits_it() {
    with_polkit(async |bus, daemon, polkit| {
        let stranger = on_bus_as(bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        let path = daemon.socket();
        let own = as_user(NOBODY, move || Client::welcomed(&path));
        assert!(sees_command(&scheduler).await, "one's own");
        drop(own);
        daemon.log.wait("disconnected");
        assert_eq!(polkit.asked(), []);

        let _client = daemon.client();
        // Repeats the query in case this machine was too slow for polkit's answer.
        eventually("an answer in time", async || sees_command(&scheduler).await.then_some(())).await;
        let flags = MethodFlags::ALLOW_INTERACTIVE_AUTH;
        let listed: zbus::Result<Option<Vec<nvshare::bus::Client>>> =
            scheduler.inner().call_with_flags("ListClients", flags, &()).await;
        listed.expect("an answer");
        let asked = polkit.asked();
        assert!(asked.len() >= 2, "{asked:?}");
        let is_quiet = |question: &Asked| question.action == SEE && question.flags == 0;
        assert!(asked.iter().all(is_quiet), "nobody is asked for a password: {asked:?}");
        for says in [Says::No, Says::Challenge, Says::Nothing] {
            polkit.say(says);
            assert!(!sees_command(&scheduler).await, "{says:?}");
        }
        let questions = polkit.asked();
        assert_eq!(questions.len(), 3);
        polkit.is_cancelled(&questions[2]).await;
    });
}

#[test]
fn a_hung_polkit_delays_no_other_call() {
    with_polkit(async |bus, daemon, polkit| {
        polkit.say(Says::Nothing);
        let (root, stranger) = (on_bus(bus).await, on_bus_as(bus, NOBODY).await);
        let waiting = start_waiting(&stranger, 3);
        let reload = tokio::spawn({
            let stranger = stranger.clone();
            async move { call(&stranger, NAME, "Reload", &None, MethodFlags::ALLOW_INTERACTIVE_AUTH).await }
        });
        let questions = polkit.asked_times(4).await;

        for connection in [&stranger, &root] {
            let scheduler = scheduler(connection).await;
            assert_eq!(scheduler.anti_thrash().await.expect("a value"), "auto");
            scheduler.list_gpus().await.expect("an answer");
            scheduler.list_clients().await.expect("an answer");
            // These calls would wait for the pending calls if a pending handler held the lock that
            // zbus takes for every call.
            let plain = MethodFlags::empty();
            for nothing in ["Version", "Holders", "Nothing"] {
                refusal(set(connection, nothing, "x", plain).await);
            }
            refusal(set(connection, "TimeQuantum", "x", plain).await);
            if connection.unique_name() == root.unique_name() {
                refusal(call(connection, NAME, "Nothing", &None, plain).await);
            }
            let introspectable = "org.freedesktop.DBus.Introspectable";
            connection.call_method(Some(NAME), PATH, Some(introspectable), "Introspect", &()).await.expect("a text");
            let everything = connection
                .call_method(Some(NAME), PATH, Some("org.freedesktop.DBus.Properties"), "GetAll", &NAME)
                .await
                .expect("an answer");
            let everything: HashMap<String, OwnedVariant> = everything.body().deserialize().expect("properties");
            assert_eq!(everything.len(), 7);
        }
        set_quantum(&root, 46).await.expect("root may");
        assert_eq!(quantum(&stranger).await, 46);
        let [a, b] = [daemon.client(), daemon.client()];
        a.attach();
        a.request();
        a.until_granted();
        b.attach();
        b.request();
        a.release();
        b.until_granted();

        assert!(waiting.iter().chain([&reload]).all(|call| !call.is_finished()));
        stranger.close().await.expect("it leaves");
        for question in &questions {
            polkit.is_cancelled(question).await;
        }
        assert_eq!(quantum(&root).await, 46, "nothing of it was done");
    });
}

#[test]
fn pending_polkit_questions_are_limited_per_caller() {
    with_polkit(async |bus, _, polkit| {
        polkit.say(Says::Nothing);
        let crowd = [on_bus_as(bus, NOBODY).await, on_bus_as(bus, NOBODY).await, on_bus_as(bus, NOBODY).await];
        for connection in &crowd[..2] {
            drop(start_waiting(connection, 16));
            polkit.asked_times(16).await;
            let (name, text) = refusal(set_quantum(connection, 45).await);
            assert_eq!(name, "org.freedesktop.DBus.Error.LimitsExceeded");
            assert!(text.contains("of this connection"), "{text}");
        }
        let (name, _) = refusal(set_quantum(&crowd[2], 45).await);
        assert_eq!(name, "org.freedesktop.DBus.Error.LimitsExceeded", "the user has enough of them");

        polkit.say(Says::Yes);
        set_quantum(&on_bus_as(bus, SOMEBODY).await, 46).await.expect("another user's");
        set_quantum(&on_bus(bus).await, 47).await.expect("root's");
        let [first, _, third] = crowd;
        first.close().await.expect("it leaves");
        eventually("16 questions to be cancelled", async || (polkit.cancelled() == 16).then_some(())).await;
        // The daemon cancels a question to polkit before it lets the user ask another question.
        eventually("a free place", async || set_quantum(&third, 48).await.ok()).await;
        assert_eq!(quantum(&third).await, 48);
    });
}

#[test]
fn a_lost_polkit_denies_and_without_polkit_only_root_is_authorized() {
    with_polkit(async |bus, daemon, polkit| {
        let client = daemon.client();
        client.attach();
        polkit.say(Says::Nothing);
        let stranger = on_bus_as(bus, NOBODY).await;
        let scheduler = scheduler(&stranger).await;
        let [waiting] = start_waiting(&stranger, 1).try_into().expect("one");
        polkit.asked_times(1).await;
        polkit.connection.clone().close().await.expect("it leaves");
        let (name, text) = refusal(waiting.await.expect("no panic"));
        assert_eq!(name, NOT_AUTHORIZED);
        assert!(text.contains(": polkit does not answer: "), "{text}");

        let (name, text) = refusal(set_quantum(&stranger, 45).await);
        assert_eq!(name, NOT_AUTHORIZED);
        assert_eq!(
            text,
            "user nobody may not change the time quantum: polkit is not running, so only root may do this"
        );
        let (name, text) = refusal(acquire(&scheduler).await);
        assert_eq!(name, NOT_AUTHORIZED);
        assert!(
            text.ends_with("Without polkit, only root and the group nvshare (on the control socket) may do this."),
            "{text}"
        );
        let _client = daemon.client();
        let clients = scheduler.list_clients().await.expect("everybody may");
        assert!(clients.iter().all(|client| client.command.is_none()), "{clients:?}");
        set_quantum(&on_bus(bus).await, 45).await.expect("root may");
    });
}

// ---- nvsharectl ----------------------------------------------------------------------------------------------------

/// Opens a terminal. Returns the end that programs see, and the end that keeps the terminal open.
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut keeper, mut seen) = (-1, -1);
    let null = std::ptr::null_mut();
    // SAFETY: both descriptors are valid places to write, and the null pointers ask for nothing else.
    let made = unsafe { libc::openpty(&mut keeper, &mut seen, null, null.cast(), null.cast()) };
    assert_eq!(made, 0);
    // SAFETY: `openpty` has just made both descriptors, and nothing else owns them.
    unsafe { (OwnedFd::from_raw_fd(seen), OwnedFd::from_raw_fd(keeper)) }
}

#[test]
fn nvsharectl_starts_an_agent_or_explains_a_denial() {
    // This script replaces polkit's own agent, which finds no polkit to register with.
    let directory = Directory::new();
    fs::set_permissions(&directory.0, Permissions::from_mode(0o777)).expect("its mode");
    let (program, agent) = (directory.0.join("pkttyagent"), directory.0.join("said"));
    let script = "#!/bin/sh\nexec 2>${0%/*}/said\necho \"$@\" >&2\ntrap 'echo ended >&2; exit' TERM\nexec >&-\nwhile :; do sleep 0.01; done\n";
    fs::write(&program, script).expect("a script");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("its mode");
    let path = format!("{}:{}", directory.0.display(), std::env::var("PATH").unwrap_or_default());
    with_polkit(async |bus, _, polkit| {
        let run = async |stdin: Stdio| {
            let mut command = ctl();
            command.env("PATH", &path);
            command.args(["set", "time-quantum", "45"]).env("DBUS_SYSTEM_BUS_ADDRESS", &bus.address);
            command.uid(NOBODY).gid(NOBODY).stdin(stdin);
            let output = tokio::task::spawn_blocking(move || command.output().expect("it starts")).await;
            let output = output.expect("no panic");
            (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
        };
        let (code, text) = run(Stdio::null()).await;
        assert_eq!((code, text.as_str()), (Some(0), ""));
        polkit.say(Says::No);
        let (code, text) = run(Stdio::null()).await;
        assert_eq!(code, Some(1));
        let refused =
            "nvsharectl: user nobody may not change the time quantum: polkit does not allow it (try it with sudo)\n";
        assert_eq!(text, refused);
        polkit.say(Says::Challenge);
        let (code, text) = run(Stdio::null()).await;
        assert_eq!(code, Some(1));
        assert!(
            text.ends_with("does not allow a password prompt (run nvsharectl on a terminal, or with sudo)\n"),
            "{text}"
        );
        assert!(polkit.asked().iter().all(|question| question.flags == 0));

        let on_a_terminal = async || {
            let (seen, _keeper) = terminal();
            run(seen.into()).await
        };
        polkit.say(Says::Yes);
        assert_eq!(on_a_terminal().await, (Some(0), String::new()));
        assert!(!agent.exists(), "nobody has to be asked");
        polkit.say(Says::Challenge);
        let (code, text) = on_a_terminal().await;
        assert_eq!(code, Some(1));
        assert!(text.ends_with("there is no polkit agent to ask for a password (try it with sudo)\n"), "{text}");
        let flags: Vec<u32> = polkit.asked().iter().map(|question| question.flags).collect();
        assert_eq!(flags, [0, 0, 1], "a password can be asked for where one is needed");
        let said = fs::read_to_string(&agent).expect("it was started");
        assert_eq!(said, "--notify-fd 1 --fallback\nended\n");
    });
}
