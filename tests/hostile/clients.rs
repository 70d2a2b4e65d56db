//! Hostile programs against an honest scheduler. The resources that they can take are bounded for
//! each tenant, and the scheduler always serves other clients.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use nvshare_wire::client::Sharing;
use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{ClientMessage, SchedulerMessage, Secret, Uuid};
use test_support::cgroup::Unit;
use test_support::daemon::{self as support, Client, Daemon, GIB, helper, helper_socket, is_root};
use test_support::{has_own_process, wait_for};

const NOBODY: u32 = 65534;
const KEY: Secret = Secret([9; 16]);

/// Returns a container ID that no other test uses. Its first twelve digits are unique too, because
/// messages show only these digits.
fn container_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{:04x}{:08x}{:052x}", NEXT.fetch_add(1, Ordering::Relaxed), std::process::id(), 0)
}

/// Connects and attaches a client.
fn sharing(path: &std::path::Path, gpu: Uuid) -> Client {
    let client = Client::welcomed(path);
    client.attach_gpu(gpu, GIB);
    client
}

/// Runs a helper as another user, and checks that it succeeds.
#[track_caller]
fn as_nobody(name: &str, daemon: &Daemon) {
    let output = helper(name, &daemon.socket()).uid(NOBODY).gid(NOBODY).stderr(Stdio::piped()).output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "a helper: opens memory that it says somebody exports, far too much of it, and then the exporter ends"]
fn helper_imports() {
    let [exporter, importer] = [sharing(&helper_socket(), support::GPU), sharing(&helper_socket(), support::GPU)];
    exporter.send(ClientMessage::Exporter { key: KEY });
    for range in 0..30_000 {
        importer.send(ClientMessage::Imported { slot: 0, exporter: KEY, range, bytes: 1, adopted: 0 });
    }
    // When the daemon grants the lock, it has read all earlier messages.
    importer.request();
    importer.until_granted();
    drop(exporter);
    let mut adopted = BTreeSet::new();
    while adopted.len() < 4096 {
        let asked = importer.until(|message| matches!(message, SchedulerMessage::Adopt { .. }));
        let SchedulerMessage::Adopt { exporter, range } = asked else { continue };
        assert!(range < 4096 && adopted.insert(range), "it adopts what was counted, once: {range}");
        // The client acts like a busy one: it reads every message, and answers some of them later.
        if adopted.len() % 64 == 0 {
            let answer = |range: &u32| importer.send(ClientMessage::Adopted { exporter, range: *range });
            adopted.iter().rev().take(64).for_each(answer);
        }
    }
}

#[test]
fn imports_of_one_user_are_limited() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let daemon = Daemon::start();
    as_nobody("clients::helper_imports", &daemon);
    daemon.log.wait("Further imports by user 65534 are refused");
    daemon.client().attach();
}

#[test]
fn a_refused_client_cannot_keep_the_scheduler_reading() {
    let daemon = Daemon::start();
    let client = Client::connect(&daemon.socket()).expect("the daemon listens");
    assert!(client.send_raw(support::hello_of(999, 999).encode(0).as_bytes()));
    let flood = |_| {
        let socket = client.socket.try_clone().expect("a descriptor");
        // The thread sends until it cannot send, and never closes the connection.
        thread::spawn(move || {
            let packet = support::release().encode(1);
            let client = Client { socket, id: 0, version: 1, devices: None };
            while client.send_raw(packet.as_bytes()) {}
        })
    };
    let floods: Vec<_> = (0..8).map(flood).collect();
    wait_for("the floods to end", || floods.iter().all(thread::JoinHandle::is_finished).then_some(()));
    // The refusal arrives, whatever the client sent after the refused message.
    let said = client.receive();
    assert!(matches!(said, Some(SchedulerMessage::Refused { reason: Refusal::Version, .. })), "{said:?}");
    daemon.client();
}

#[test]
#[ignore = "a helper: connects until it is refused, and says by which words"]
fn helper_fill() {
    let mut welcomed = Vec::new();
    loop {
        let client = Client::connect(&helper_socket()).expect("the daemon listens");
        client.send(support::hello());
        match client.receive() {
            Some(SchedulerMessage::Welcome { .. }) => welcomed.push(client),
            Some(SchedulerMessage::Refused { text, .. }) => {
                return eprintln!("{} welcomed: {}", welcomed.len(), text.as_str());
            }
            other => panic!("instead of an answer: {other:?}"),
        }
        assert!(welcomed.len() < 1000, "never refused");
    }
}

/// Starts a daemon with a limit on clients.
fn limited(clients: u32) -> Daemon {
    Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        fs::write(&config, format!("max-clients-per-tenant = {clients}\n")).expect("a file");
        command.arg("--config").arg(config);
    })
}

/// Returns how many clients of a helper in that control group were welcomed, and the refusal that
/// followed.
fn filled_from(unit: Option<&Unit>, daemon: &Daemon) -> String {
    let mut command = helper("clients::helper_fill", &daemon.socket());
    let procs = unit.map(Unit::procs);
    // SAFETY: between fork and exec, the closure only opens and writes a file.
    unsafe { command.pre_exec(move || procs.as_ref().map_or(Ok(()), |procs| fs::write(procs, "0"))) };
    let output = command.stderr(Stdio::piped()).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said.lines().find(|line| line.contains("welcomed")).expect("its line").to_owned()
}

#[test]
fn a_containers_root_is_limited_by_its_outermost_container() {
    if !is_root() {
        return test_support::skip("root, to create control groups");
    }
    let id = container_id();
    let Some(outer) = Unit::new(&format!("docker-{id}.scope")) else { return };
    // In its container, a container's root may give any name to control groups.
    let invented = format!("docker-{id}.scope/docker-{}.scope", container_id());
    let Some(inner) = Unit::new(&invented) else { return };
    let daemon = limited(5);
    let refused =
        format!("container {} has 5 programs connected, which is the limit max-clients-per-tenant", &id[..12]);
    assert_eq!(filled_from(Some(&inner), &daemon), format!("5 welcomed: {refused}"));
    assert_eq!(filled_from(Some(&outer), &daemon), format!("5 welcomed: {refused}"));
    // The host's root has a separate, higher limit.
    let said = filled_from(None, &daemon);
    assert!(said.starts_with("40 welcomed: root has 40 programs connected"), "{said}");
    drop(inner);
}

#[test]
fn containers_of_the_same_user_share_no_memory() {
    if !is_root() {
        return test_support::skip("root, to create control groups");
    }
    if !has_own_process("clients::containers_of_the_same_user_share_no_memory", &[]) {
        return;
    }
    let [Some(one), Some(other)] = [(); 2].map(|()| Unit::new(&format!("docker-{}.scope", container_id()))) else {
        return;
    };
    let daemon = Daemon::start();
    let in_unit = |unit: &Unit| {
        let _stay = unit.enter();
        sharing(&daemon.socket(), Uuid(cuda_sim_gpus::Config::get().uuid(0)))
    };
    let (exporter, fellow, stranger) = (in_unit(&one), in_unit(&one), in_unit(&other));
    exporter.send(ClientMessage::Exporter { key: KEY });
    exporter.request();
    exporter.until_granted();
    let open = |ticket| ClientMessage::Open { ticket, exporter: KEY, secret: KEY, range: 1, allocation: 2, first: 0 };
    fellow.send(open(0));
    exporter.until(|message| matches!(message, SchedulerMessage::Export { .. }));
    let outcome = (0..1000).find_map(|ticket| {
        stranger.send(open(ticket));
        match stranger.until(|message| matches!(message, SchedulerMessage::Opened { .. })) {
            SchedulerMessage::Opened { outcome: Sharing::Busy, .. } => thread::sleep(Duration::from_millis(20)),
            SchedulerMessage::Opened { outcome, .. } => return Some(outcome),
            _ => {}
        }
        None
    });
    assert_eq!(outcome, Some(Sharing::Unknown));
}

/// The number of GPUs that the scheduler lists.
fn gpus(daemon: &Daemon) -> usize {
    let status: serde_json::Value = serde_json::from_str(&daemon.ctl(&["--json", "status"]).stdout).expect("JSON");
    status["gpus"].as_array().expect("GPUs").len()
}

/// The number of GPU lock files.
fn lock_files(daemon: &Daemon) -> usize {
    let directory = daemon.socket().parent().expect("a directory").to_owned();
    let files = fs::read_dir(directory).expect("the directory").flatten();
    files.filter(|file| file.file_name().to_string_lossy().starts_with("nvshare-")).count()
}

#[test]
#[ignore = "a helper: invents GPUs until it is hung up on"]
fn helper_invents_gpus() {
    let one = Client::welcomed(&helper_socket());
    for slot in 0..16 {
        one.send(support::attach(slot, Uuid([slot as u8 + 1; 16])));
        one.until(|message| matches!(message, SchedulerMessage::Attached { slot: of } if *of == slot));
    }
    let other = Client::welcomed(&helper_socket());
    other.send(support::attach(0, Uuid([1; 16])));
    other.until(|message| matches!(message, SchedulerMessage::Attached { .. }));
    other.send(support::attach(1, Uuid([100; 16])));
    other.until_end();
    one.send(ClientMessage::Detach { slot: 0 });
    one.send(ClientMessage::Detach { slot: 1 });
    one.send(support::attach(0, Uuid([101; 16])));
    one.until(|message| matches!(message, SchedulerMessage::Attached { slot: 0 }));
}

#[test]
fn invented_gpus_are_limited_per_tenant_and_dropped() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    // The directory outlives the daemon, and contains the lock files.
    let directory = support::Directory::new();
    fs::create_dir(directory.0.join("run")).expect("a directory");
    let daemon = Daemon::start_in(directory, None, |_, _| ());
    as_nobody("clients::helper_invents_gpus", &daemon);
    daemon.log.wait("its tenant uses too many GPUs that NVML does not list");
    wait_for("the GPUs to be forgotten", || (gpus(&daemon) == 0 && lock_files(&daemon) == 0).then_some(()));
    let client = daemon.client();
    client.attach();
    assert_eq!((gpus(&daemon), lock_files(&daemon)), (1, 2));
    client.send(ClientMessage::Detach { slot: 0 });
    wait_for("it to be forgotten", || (gpus(&daemon) == 0 && lock_files(&daemon) == 0).then_some(()));
}

/// A client that attaches the host's only GPU is disconnected if it shows no device file, a file
/// that is open for reading only, or another file.
#[test]
fn a_client_that_cannot_open_the_device_file_is_disconnected() {
    if !has_own_process("clients::a_client_that_cannot_open_the_device_file_is_disconnected", &[]) {
        return;
    }
    let daemon = Daemon::start();
    daemon.log.wait("found");
    let packet =
        |client: &Client| support::attach(0, Uuid(cuda_sim_gpus::Config::get().uuid(0))).encode(client.version);
    let [own, other, ..] = &support::device_files(support::devices().as_deref())[..] else { panic!("no device files") };
    let number = own.as_raw_fd();
    let only_read = File::open(format!("/proc/self/fd/{number}")).expect("the device file");
    for files in [vec![], vec![only_read], vec![other.try_clone().expect("a descriptor")]] {
        let client = daemon.client();
        assert!(client.send_with(packet(&client).as_bytes(), &files));
        client.until_end();
    }
    daemon.log.wait("has not shown that it can open the device file of GPU-");
    let client = daemon.client();
    assert!(client.send_with(packet(&client).as_bytes(), &[own.try_clone().expect("a descriptor")]));
    client.until(|message| matches!(message, SchedulerMessage::Attached { slot: 0 }));
}

/// A client can invent a GPU. A command without a GPU must still apply to the host's only real GPU.
#[test]
fn gpu_that_nvml_does_not_list_matters_only_to_its_clients() {
    if !has_own_process("clients::gpu_that_nvml_does_not_list_matters_only_to_its_clients", &[]) {
        return;
    }
    let daemon = Daemon::start();
    daemon.log.wait("found");
    let client = daemon.client();
    client.attach_gpu(Uuid(cuda_sim_gpus::Config::get().uuid(0)), GIB);
    client.send(support::attach(1, Uuid([200; 16])));
    client.until(|message| matches!(message, SchedulerMessage::Attached { slot: 1 }));
    assert_eq!((gpus(&daemon), lock_files(&daemon)), (1, 2));
    let room = daemon.ctl(&["make-room", "1M", "--", "true"]);
    assert_eq!(room.code, Some(0), "{}", room.stderr);
}

#[test]
#[ignore = "a helper: connects to the control socket, has another process use that connection, and ends"]
#[expect(clippy::zombie_processes, reason = "the child is to outlive this process")]
fn helper_hands_over_its_connection() {
    let stream = UnixStream::connect(helper_socket()).expect("the control socket");
    // SAFETY: `fcntl` with F_SETFD takes no pointers, and the descriptor is open.
    unsafe { libc::fcntl(stream.as_raw_fd(), libc::F_SETFD, 0) };
    let mut heir = helper("clients::helper_uses_an_inherited_connection", &helper_socket());
    heir.env("NVSHARE_TEST_FD", stream.as_raw_fd().to_string())
        .env("NVSHARE_TEST_PARENT", std::process::id().to_string());
    heir.stdout(Stdio::inherit()).stderr(Stdio::inherit()).spawn().expect("it starts");
}

#[test]
#[ignore = "a helper: once its parent has ended, sets the time quantum on a connection of its parent"]
fn helper_uses_an_inherited_connection() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok()).expect("a number");
    let parent: i32 = number("NVSHARE_TEST_PARENT");
    wait_for("its parent's end", || (std::os::unix::process::parent_id() as i32 != parent).then_some(()));
    // SAFETY: the parent passed the descriptor on for this purpose, and no other value owns it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(number("NVSHARE_TEST_FD")) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let said = runtime.block_on(async {
        let connection = zbus::connection::Builder::unix_stream(stream).p2p().build().await.expect("the handshake");
        let body = ("org.nvshare.Scheduler1", "TimeQuantum", zbus::Variant::from(45u32));
        let (path, interface) = ("/org/nvshare/Scheduler1", "org.freedesktop.DBus.Properties");
        connection.call_method(None::<&str>, path, Some(interface), "Set", &body).await.map(drop)
    });
    eprintln!("it may: {said:?}");
}

#[test]
fn an_inherited_connection_grants_no_rights() {
    let daemon = Daemon::start();
    let mut command = helper("clients::helper_hands_over_its_connection", &daemon.control());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
    // The process that inherits the connection also shares stderr, and closes stderr last.
    let mut lines = BufReader::new(child.stderr.take().expect("its stderr")).lines().map_while(Result::ok);
    // The process that connected exists until it is reaped, so the test reaps it.
    assert!(support::wait(&mut child).success());
    let said = lines.find(|line| line.contains("it may: ")).expect("its line");
    assert!(said.contains("AccessDenied") && said.contains("the process that connected has ended"), "{said}");
    assert!(daemon.ctl(&["get"]).stdout.contains("30"), "{}", daemon.ctl(&["get"]).stdout);
    assert_eq!(daemon.ctl(&["set", "time-quantum", "45"]).code, Some(0), "who is there may");
}

/// Gives a command a `/proc` that hides the processes of other users.
fn hides_processes(command: &mut Command) {
    let mount = || {
        let nothing = std::ptr::null();
        // SAFETY: the system calls get valid C strings or null.
        let done = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(nothing, c"/".as_ptr(), nothing, libc::MS_REC | libc::MS_PRIVATE, nothing.cast()) == 0
                && libc::mount(
                    c"proc".as_ptr(),
                    c"/proc".as_ptr(),
                    c"proc".as_ptr(),
                    0,
                    c"hidepid=2,gid=54321".as_ptr().cast(),
                ) == 0
        };
        if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: `mount` makes only async-signal-safe system calls.
    unsafe { command.pre_exec(mount) };
}

#[test]
fn processes_hidden_by_hidepid_are_unidentified_and_logged() {
    let mut probe = Command::new("true");
    hides_processes(&mut probe);
    if !is_root() || !probe.status().is_ok_and(|status| status.success()) {
        return test_support::skip("root, and the right to mount /proc");
    }
    let daemon = Daemon::start_with(|command, _| hides_processes(command));
    as_nobody("clients::helper_connects", &daemon);
    daemon.log.wait("hidepid");
    assert_eq!(daemon.log.count("hidepid"), 1);
    // Not even root may change settings, because this root could be a container's.
    let refused = daemon.ctl(&["set", "time-quantum", "45"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("hidepid") && refused.stderr.contains("nvshare.service(8)"), "{}", refused.stderr);
}

#[test]
#[ignore = "a helper: connects"]
fn helper_connects() {
    Client::welcomed(&helper_socket()).attach();
}
