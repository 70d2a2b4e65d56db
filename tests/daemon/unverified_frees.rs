//! A client that reports memory as freed but keeps it. NVML shows the difference, and no other user
//! is given the missing memory.

use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;

use cuda_sim_gpus::{Account, Config};
use nvshare_wire::{SchedulerMessage, Uuid};
use serde_json::Value;
use test_support::daemon::*;
use test_support::{has_own_process, wait_for};

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 256 * MIB;
const CONTEXT: u64 = 16 * MIB;
const DEMAND: u64 = 120 * MIB;
/// The granularity of measurements. Smaller differences don't count against a client.
const SLACK: u64 = 4 * MIB;

fn attach(client: &Client) {
    client.attach_gpu(Uuid(Config::get().uuid(0)), TOTAL);
}

/// Reads messages until one matches, or until the end of the connection. Reports after each limit
/// and each allowance that the client has carried it out: the scheduler names a client that does
/// not answer as late, whatever NVML shows. `mapped` returns the bytes that the client claims to
/// have mapped under an allowance.
fn answer_until(client: &Client, mut mapped: impl FnMut(u64) -> u64, is_it: impl Fn(&SchedulerMessage) -> bool) {
    let (mut ack, mut limit_ack, mut claimed) = (0, 1, 0);
    while let Some(message) = client.receive() {
        match message {
            SchedulerMessage::Allowance { seq, bytes, .. } => (ack, claimed) = (seq, mapped(bytes)),
            SchedulerMessage::Limit { seq, .. } => limit_ack = seq,
            _ if is_it(&message) => return,
            _ => continue,
        }
        client.send(memory_after(ack, limit_ack, DEMAND, claimed));
    }
}

fn status(daemon: &Daemon) -> Value {
    serde_json::from_str(&daemon.ctl(&["--json", "status"]).stdout).expect("JSON")
}

/// Starts a client of another user that requests memory and the lock. The client ends successfully
/// when it has received both.
fn other_user(daemon: &Daemon) -> Child {
    let mut other = helper("unverified_frees::helper_wants", &daemon.socket());
    other.uid(65534).gid(65534).stderr(Stdio::inherit()).spawn().expect("it starts")
}

#[test]
#[ignore = "a helper: a client of another user"]
fn helper_wants() {
    let client = Client::welcomed(&helper_socket());
    attach(&client);
    client.send(memory_after(0, 1, DEMAND, 0));
    client.request();
    answer_until(&client, |_| 0, |message| matches!(message, SchedulerMessage::Grant { gpus: 1 }));
}

#[test]
fn memory_freed_after_the_disconnect_stops_counting() {
    let test = "unverified_frees::memory_freed_after_the_disconnect_stops_counting";
    if !has_own_process(test, &[("CUDA_SIM_MEMORY", TOTAL.to_string()), ("CUDA_SIM_CONTEXT", CONTEXT.to_string())]) {
        return;
    }
    let daemon = Daemon::start();
    daemon.log.wait("found");
    let client = Client::welcomed(&daemon.socket());
    attach(&client);
    let gpu = Account::get();
    assert!(gpu.take(0, CONTEXT));
    wait_for("its context to be measured", || (status(&daemon)["gpus"][0]["overhead"] == CONTEXT).then_some(()));
    drop(client);
    daemon.log.wait("disconnected");
    // The scheduler must still measure the context after the disconnect. Otherwise the test is
    // meaningless.
    std::thread::sleep(std::time::Duration::from_secs(1));
    gpu.give(0, CONTEXT);
    wait_for("the memory to be seen to be free", || (status(&daemon)["gpus"][0]["overhead"] == 0).then_some(()));
}

#[test]
fn falsely_reported_frees_are_not_given_to_another_user() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let test = "unverified_frees::falsely_reported_frees_are_not_given_to_another_user";
    let environment = [("CUDA_SIM_MEMORY", TOTAL.to_string()), ("CUDA_SIM_CONTEXT", CONTEXT.to_string())];
    if !has_own_process(test, &environment) {
        return;
    }
    let daemon = Daemon::start();
    daemon.log.wait("found");

    let gpu = Account::get();
    let liar = Arc::new(Client::welcomed(&daemon.socket()));
    attach(&liar);
    assert!(gpu.take(0, CONTEXT));
    wait_for("its context to be measured", || (status(&daemon)["gpus"][0]["overhead"] == CONTEXT).then_some(()));
    liar.send(memory_after(0, 1, DEMAND, 0));
    let client = Arc::clone(&liar);
    thread::spawn(move || {
        let mut holds_all = false;
        let lie = |allowance: u64| {
            if !holds_all && allowance == DEMAND {
                assert!(Account::get().take(0, DEMAND));
                holds_all = true;
            }
            allowance.min(DEMAND) // and it keeps all of its memory
        };
        answer_until(&client, lie, |_| false);
    });
    let of = |client: &Value, key: &str| client["gpus"][0][key].as_u64().unwrap_or(0);
    let named = |status: &Value| {
        let clients = status["clients"].as_array().expect("clients");
        clients.iter().find(|client| client["id"] == liar.id).cloned()
    };
    wait_for("the liar to map all", || (of(&named(&status(&daemon))?, "resident") == DEMAND).then_some(()));

    let mut other = other_user(&daemon);
    wait_for("status to name the liar", || {
        let status = status(&daemon);
        let clients = status["clients"].as_array().expect("clients");
        for client in clients.iter().filter(|client| client["id"] != liar.id) {
            let allowed = of(client, "allowance");
            assert!(allowed + DEMAND + CONTEXT <= TOTAL + SLACK, "{allowed} bytes are not there: {status:#}");
        }
        let liar = named(&status)?;
        let why = liar["gpus"][0]["eviction-blocked"].as_str()?;
        (why == "NVML still shows memory that the program reported as freed"
            && of(&liar, "pinned") + of(&liar, "resident") + SLACK >= DEMAND)
            .then_some(())
    });
    assert!(other.try_wait().expect("a child").is_none(), "it cannot have the memory yet");
    let text = daemon.ctl(&["status"]).stdout;
    assert!(text.contains("NVML still shows memory that the program reported as freed"), "{text}");

    let bundle = daemon.ctl(&["debug", "--output", "-"]).stdout;
    let line = |kind: &str| {
        let lines = bundle.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        lines.into_iter().find(|line| line["kind"] == kind).expect("the line")
    };
    assert!(line("nvshare-bundle")["driver"].is_string() && line("nvshare-bundle")["nvml"].is_string());
    let (measured, pid) = (&line("nvml")["gpus"][0], std::process::id().to_string());
    assert_eq!(measured["steady"], true);
    assert!(measured["processes"][pid].as_u64().is_some_and(|bytes| bytes >= DEMAND), "{measured:#}");

    gpu.give(0, DEMAND);
    assert!(wait(&mut other).success());
}
