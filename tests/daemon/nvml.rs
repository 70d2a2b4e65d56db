//! NVML that is slow, fails, or is released, and GPUs and MIG slices that appear and disappear. The
//! simulated NVML keeps a file open while it is initialized, as the real NVML keeps the driver's
//! device files open.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::private_bus::*;
use cuda_sim_gpus::{Config, trouble};
use nvshare::bus::{NAME, PATH};
use nvshare_wire::{SchedulerMessage, Uuid};
use serde_json::Value;
use test_support::daemon::*;
use test_support::{has_own_process, wait_for};
use zbus::MessageStream;

const GIB: u64 = 1 << 30;

fn own_process(test: &str, gpus: u64) -> bool {
    let environment = [("CUDA_SIM_GPUS", gpus.to_string()), ("CUDA_SIM_MEMORY", "1G".to_owned())];
    has_own_process(&format!("nvml::{test}"), &environment)
}

fn machine() -> &'static Path {
    let dir = Config::get().dir.as_path();
    std::fs::create_dir_all(dir).expect("a directory");
    dir
}

fn name(gpu: usize) -> String {
    Config::get().uuid_text(gpu)
}

fn status(daemon: &Daemon) -> Value {
    serde_json::from_str(&daemon.ctl(&["--json", "status"]).stdout).expect("JSON")
}

/// UUIDs of the GPUs in `nvsharectl status`. Lost GPUs are marked.
fn listed(daemon: &Daemon) -> Vec<String> {
    let mut names: Vec<String> = status(daemon)["gpus"]
        .as_array()
        .expect("GPUs")
        .iter()
        .map(|gpu| {
            let mark = if gpu["gone"] == true { " gone" } else { "" };
            format!("{}{mark}", gpu["uuid"].as_str().expect("a name"))
        })
        .collect();
    names.sort();
    names
}

#[track_caller]
fn wait_for_list(daemon: &Daemon, expected: &[String]) {
    let mut expected = expected.to_vec();
    expected.sort();
    let what = format!("the GPUs {expected:?}");
    wait_for(&what, || (listed(daemon) == expected).then_some(()));
}

/// Files of the simulated driver that the daemon has opened.
fn open_files(daemon: &Daemon) -> Vec<PathBuf> {
    let files = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).expect("it runs");
    let targets = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
    let is_the_drivers =
        |path: &PathBuf| *path == trouble::device_file(machine()) || path.to_string_lossy().starts_with("/dev/nvidia");
    targets.filter(is_the_drivers).collect()
}

fn attach(client: &Client, gpu: usize) {
    client.attach_gpu(Uuid(Config::get().uuid(gpu)), GIB);
}

/// Returns the next signal about a GPU that appears or disappears.
async fn next(stream: &mut MessageStream) -> (String, String) {
    use zbus::export::futures_core::Stream;
    loop {
        let message = std::future::poll_fn(|cx| std::pin::Pin::new(&mut *stream).poll_next(cx)).await;
        let message = message.expect("the connection lives").expect("a message");
        let member = message.header().member().map(|member| member.to_string()).unwrap_or_default();
        if ["GpuAdded", "GpuRemoved"].contains(&member.as_str()) {
            return (member, message.body().deserialize().expect("a text"));
        }
    }
}

// ---- startup ----

#[test]
fn the_daemon_is_ready_while_nvml_initializes() {
    if !own_process("the_daemon_is_ready_while_nvml_initializes", 1) {
        return;
    }
    trouble::hold_init(machine(), true).expect("a file");
    let daemon = Daemon::start(); // waits until the daemon serves clients
    daemon.log.wait("NVML is slow");
    let client = daemon.client();
    attach(&client, 0);
    client.report(GIB / 4, 0);
    client.request();
    client.until_granted();
    assert_eq!(status(&daemon)["gpus"][0]["index"], Value::Null, "only the client knows the GPU");
    trouble::hold_init(machine(), false).expect("no file");
    wait_for("NVML to list the GPU", || (status(&daemon)["gpus"][0]["index"] == 0).then_some(()));
    wait_for("its memory to be measured", || (status(&daemon)["gpus"][0]["accounting"] != "reports").then_some(()));
}

#[test]
fn a_driver_loaded_later_is_detected() {
    if !own_process("a_driver_loaded_later_is_detected", 1) {
        return;
    }
    trouble::unload(machine(), true).expect("a file");
    let daemon = Daemon::start();
    daemon.log.wait("cannot use NVML, retrying");
    assert_eq!(listed(&daemon), [""; 0]);
    assert!(open_files(&daemon).is_empty());
    trouble::unload(machine(), false).expect("no file");
    wait_for_list(&daemon, &[name(0)]);
    daemon.log.wait("NVML can be used");
    let failures = daemon.log.count("cannot use NVML");
    assert_eq!(failures, 1, "it is said once");
}

#[test]
fn failing_nvml_is_retried_and_no_gpu_is_lost() {
    if !own_process("failing_nvml_is_retried_and_no_gpu_is_lost", 1) {
        return;
    }
    let daemon = Daemon::start();
    let client = daemon.client();
    attach(&client, 0);
    wait_for("its memory to be measured", || (status(&daemon)["gpus"][0]["accounting"] != "reports").then_some(()));
    trouble::break_nvml(machine(), true).expect("a file");
    daemon.log.wait("cannot use NVML, retrying");
    assert_eq!(status(&daemon)["gpus"][0]["accounting"], "reports");
    assert_eq!(listed(&daemon), [name(0)], "an error does not say that it is gone");
    // Without NVML, no client waits for a measurement.
    client.report(GIB / 4, 0);
    client.request();
    client.until_granted();
    trouble::break_nvml(machine(), false).expect("no file");
    daemon.log.wait("NVML can be used");
    wait_for("its memory to be measured", || (status(&daemon)["gpus"][0]["accounting"] != "reports").then_some(()));
}

// ---- GPUs that appear and disappear ----

#[test]
fn added_and_removed_gpus_are_listed_and_signalled() {
    if !own_process("added_and_removed_gpus_are_listed_and_signalled", 2) {
        return;
    }
    trouble::take_out(machine(), 1, true).expect("a file");
    let bus = Bus::start();
    let daemon = bus.daemon();
    wait_for_list(&daemon, &[name(0)]);
    let rule = format!("type='signal',sender='{NAME}',path='{PATH}'");
    block_on(async {
        let (here, there) = (on_bus(&bus).await, on_control(&daemon.control()).await);
        let mut on_bus = MessageStream::for_match_rule(rule.as_str(), &here, None).await.expect("a match");
        let mut on_control = MessageStream::from(&there);
        scheduler(&there).await.version().await.expect("it listens");
        for (is_out, signal) in [(false, "GpuAdded"), (true, "GpuRemoved"), (false, "GpuAdded")] {
            trouble::take_out(machine(), 1, is_out).expect("a file");
            for stream in [&mut on_bus, &mut on_control] {
                assert_eq!(next(stream).await, (signal.to_owned(), name(1)));
            }
            let gpus = scheduler(&here).await.list_gpus().await.expect("GPUs");
            assert_eq!(gpus.len(), if is_out { 1 } else { 2 });
        }
    });
    daemon.log.wait("Simulated GPU is gone");
    // If a GPU with a lower number is removed, the others are renumbered.
    trouble::take_out(machine(), 0, true).expect("a file");
    wait_for_list(&daemon, &[name(1)]);
    wait_for("its new number", || (status(&daemon)["gpus"][0]["index"] == 0).then_some(()));
}

#[test]
fn a_client_waiting_for_a_lost_gpu_continues() {
    if !own_process("a_client_waiting_for_a_lost_gpu_continues", 2) {
        return;
    }
    let daemon = Daemon::start();
    wait_for_list(&daemon, &[name(0), name(1)]);
    let [holder, waiter] = [daemon.client(), daemon.client()];
    attach(&holder, 0);
    holder.report(GIB / 4 * 3, 0);
    holder.request();
    holder.until_granted();
    attach(&waiter, 0);
    waiter.report(GIB / 4 * 3, 0);
    waiter.request();
    daemon.log.wait("Contended");
    trouble::lose(machine(), 0, true).expect("a file");
    waiter.until_granted();
    wait_for_list(&daemon, &[format!("{} gone", name(0)), name(1)]);
    let text = daemon.ctl(&["status"]).stdout;
    assert!(text.contains("This GPU is gone: the driver no longer lists it"), "{text}");
    daemon.log.wait("is gone, and programs still use it");

    // The lost GPU can no longer be chosen, but other GPUs can.
    let refused = daemon.ctl(&["lock", "--gpu", &name(0), "true"]);
    assert!(refused.stderr.contains(&format!("unknown GPU {:?}. The GPUs are {}", name(0), name(1))), "{refused:?}");
    assert_eq!(daemon.ctl(&["lock", "--gpu", &name(1), "true"]).code, Some(0));

    drop(holder);
    wait_for_list(&daemon, &[format!("{} gone", name(0)), name(1)]);
    drop(waiter);
    wait_for_list(&daemon, &[name(1)]);
    trouble::lose(machine(), 0, false).expect("no file");
    wait_for_list(&daemon, &[name(0), name(1)]);
}

#[test]
fn mig_slices_replace_their_gpu_and_each_other() {
    if !own_process("mig_slices_replace_their_gpu_and_each_other", 1) {
        return;
    }
    let slice = |slice| Config::get().slice_uuid_text(0, slice);
    let daemon = Daemon::start();
    wait_for_list(&daemon, &[name(0)]);
    trouble::slice(machine(), 0, Some(&[1, 2])).expect("a file");
    wait_for_list(&daemon, &[slice(1), slice(2)]);
    trouble::slice(machine(), 0, Some(&[2, 3])).expect("a file");
    wait_for_list(&daemon, &[slice(2), slice(3)]);
    // No program can run on a GPU in MIG mode without slices.
    trouble::slice(machine(), 0, Some(&[])).expect("a file");
    wait_for_list(&daemon, &[]);
    trouble::slice(machine(), 0, None).expect("no file");
    wait_for_list(&daemon, &[name(0)]);
}

// ---- releasing the driver ----

#[test]
fn the_driver_is_released_until_a_program_attaches() {
    if !own_process("the_driver_is_released_until_a_program_attaches", 1) {
        return;
    }
    let daemon = Daemon::start();
    wait_for_list(&daemon, &[name(0)]);
    wait_for("NVML to be open", || (!open_files(&daemon).is_empty()).then_some(()));

    let released = daemon.ctl(&["release-driver", "--for", "600"]);
    assert_eq!((released.code, open_files(&daemon).len()), (Some(0), 0), "{released:?}");
    assert!(released.stdout.contains("released the driver for 600 s"), "{released:?}");
    // The list shows the last known state and doesn't call NVML.
    assert_eq!(listed(&daemon), [name(0)]);
    assert!(open_files(&daemon).is_empty());

    let client = daemon.client();
    attach(&client, 0);
    wait_for("NVML to be opened", || (!open_files(&daemon).is_empty()).then_some(()));
    wait_for("its memory to be measured", || (status(&daemon)["gpus"][0]["accounting"] != "reports").then_some(()));

    // The daemon releases the driver, but the client's process still uses it, so the command fails.
    let refused = daemon.ctl(&["release-driver"]);
    assert_eq!((refused.code, open_files(&daemon).len()), (Some(1), 0), "{refused:?}");
    let line = format!("(process {}", std::process::id());
    assert!(
        refused.stderr.contains("programs still use it. Stop these programs") && refused.stderr.contains(&line),
        "{refused:?}"
    );
    // The program continues without measurements.
    client.report(GIB / 4, 0);
    client.request();
    client.until_granted();
    let other = daemon.client();
    attach(&other, 0);
    other.report(GIB, 0);
    other.request();
    client.until(|message| matches!(message, SchedulerMessage::Contended { .. } | SchedulerMessage::Revoke { .. }));
}

#[test]
#[ignore = "takes more than half a minute, as the daemon waits for so long"]
fn an_unused_driver_is_released_after_a_timeout() {
    if !own_process("an_unused_driver_is_released_after_a_timeout", 1) {
        return;
    }
    let daemon = Daemon::start();
    let client = daemon.client();
    attach(&client, 0);
    wait_for("NVML to be open", || (!open_files(&daemon).is_empty()).then_some(()));
    drop(client);
    wait_for("NVML to be closed", || open_files(&daemon).is_empty().then_some(()));
    daemon.log.wait("nobody needs NVML");
    // Readers get the last known state. Reading it doesn't open NVML.
    assert_eq!(listed(&daemon), [name(0)]);
    assert!(open_files(&daemon).is_empty());
    attach(&daemon.client(), 0);
    wait_for("NVML to be opened again", || (!open_files(&daemon).is_empty()).then_some(()));
}

#[test]
fn a_driver_release_expires() {
    if !own_process("a_driver_release_expires", 1) {
        return;
    }
    let daemon = Daemon::start();
    let client = daemon.client();
    attach(&client, 0);
    wait_for("NVML to be open", || (!open_files(&daemon).is_empty()).then_some(()));
    assert_eq!(daemon.ctl(&["release-driver", "--for", "1"]).code, Some(1), "a program uses it");
    daemon.log.wait("the driver was released");
    wait_for("NVML to be open again", || (!open_files(&daemon).is_empty()).then_some(()));
    for wrong in ["0", "3601", "soon"] {
        let refused = daemon.ctl(&["release-driver", "--for", wrong]);
        assert_eq!(refused.code, Some(2), "{refused:?}");
    }
}

#[test]
fn only_administrators_release_the_driver() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    if !own_process("only_administrators_release_the_driver", 1) {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let daemon = Daemon::start();
    let anybody = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(daemon.control(), anybody.clone()).expect("the socket");
    std::fs::set_permissions(daemon.control().parent().expect("its directory"), anybody).expect("the directory");
    let mut command = ctl();
    command.arg("--control").arg(daemon.control()).arg("release-driver").uid(65534).gid(65534);
    let refused = Output::of(&mut command);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("may not make the scheduler release the driver"), "{refused:?}");
    assert!(!open_files(&daemon).is_empty());
}

#[test]
fn programs_queue_less_work_on_a_gpu_with_a_display() {
    if !own_process("programs_queue_less_work_on_a_gpu_with_a_display", 1) {
        return;
    }
    let daemon = Daemon::start();
    let until_told = |client: &Client, wanted: Duration| {
        let wanted = wanted.as_micros() as u32;
        client.until(|message| matches!(message, SchedulerMessage::RunAhead { slot: 0, micros } if *micros == wanted));
    };
    let client = Client::welcomed(&daemon.socket());
    attach(&client, 0);
    trouble::set_display(machine(), 0, true).expect("a file");
    until_told(&client, Duration::from_millis(16));
    let other = Client::welcomed(&daemon.socket());
    attach(&other, 0);
    until_told(&other, Duration::from_millis(16));
    trouble::set_display(machine(), 0, false).expect("a file");
    until_told(&client, Duration::ZERO);
    until_told(&other, Duration::ZERO);
}

#[test]
fn without_a_driver_every_command_reports_it_in_one_line() {
    let daemon = Daemon::start_in(Directory::new(), None, |command, directory| {
        // An empty file replaces the library, so that the daemon finds no driver of this machine.
        std::fs::write(directory.join("libnvidia-ml.so.1"), "").expect("a file");
        command.env("LD_LIBRARY_PATH", directory);
    });
    daemon.log.wait("cannot use NVML");
    let problem = "the NVIDIA driver cannot be used: ";
    for command in [&[][..], &["top", "-n", "1"]] {
        let shown = daemon.ctl(command);
        let lines: Vec<&str> = shown.stdout.lines().filter(|line| line.contains(problem)).collect();
        assert_eq!((shown.code, lines.len()), (Some(0), 1), "{command:?}: {}", shown.stdout);
    }
    for command in [&["lock", "--", "true"][..], &["drain", "0"], &["make-room", "1G", "--", "true"]] {
        let refused = daemon.ctl(command);
        assert_eq!((refused.code, refused.stderr.lines().count()), (Some(1), 1), "{command:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(&format!("the scheduler knows no GPU: {problem}")), "{}", refused.stderr);
    }
    let mut run = ctl();
    run.args(["run", "--gpus", "1", "--library"])
        .arg(test_support::artifact("libnvshare.so"))
        .args(["--", "echo", "in"]);
    let said = Output::of(run.env("NVSHARE_SOCKET", daemon.socket()));
    assert_eq!((said.code, said.stdout.as_str()), (Some(0), "in\n"));
    assert!(said.stderr.starts_with(&format!("nvsharectl: the scheduler knows no GPU: {problem}")), "{}", said.stderr);
}
