//! Users who call D-Bus methods at the highest rate that the bus allows.

use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use zbus::Message;
use zbus::connection::Builder;
use zbus::message::Flags;

use test_support::daemon::*;

use crate::private_bus::{Bus, block_on, on_bus, on_control, scheduler};

const FLOOD: Duration = Duration::from_secs(4);
/// The maximum memory of the daemon. The debug build's code takes most of it.
const MAX_MEMORY: u64 = 200 << 20;
/// The longest time until root's two calls are answered, on a busy machine. Before the daemon
/// limited each caller's calls by a budget, root's calls timed out.
const MAX_ANSWER: Duration = Duration::from_secs(10);

#[test]
#[ignore = "a helper: calls methods that cost much and expects no reply"]
fn helper_floods() {
    let address = std::env::var("NVSHARE_TEST_BUS").expect("run by a test, not by hand");
    block_on(async {
        let connection = Builder::address(address.as_str()).build().await.expect("the bus");
        let call = |method: &'static str| {
            let call = Message::method_call("/org/nvshare/Scheduler1", method);
            let call = call.destination("org.nvshare.Scheduler1").interface("org.nvshare.Scheduler1");
            call.with_flags(Flags::NO_REPLY_EXPECTED).build(&()).expect("a call")
        };
        let begin = Instant::now();
        let mut sent = 0;
        while begin.elapsed() < FLOOD {
            for method in ["CreateTimeline", "ListGpus", "ListClients"] {
                connection.send(&call(method)).await.expect("the bus takes it");
                sent += 1;
            }
        }
        eprintln!("sent {sent}");
    });
}

#[test]
fn a_flood_of_calls_uses_little_memory_and_root_is_still_answered() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    let mut flood = helper("flood::helper_floods", &daemon.socket());
    flood.env("NVSHARE_TEST_BUS", &bus.address).uid(65534).gid(65534).stderr(Stdio::piped());
    let flood = flood.spawn().expect("it starts");
    std::thread::sleep(FLOOD / 2);
    let [by_control, by_bus] = block_on(async {
        let mut took = Vec::new();
        for connection in [on_control(&daemon.control()).await, on_bus(&bus).await] {
            let scheduler = scheduler(&connection).await;
            let begin = Instant::now();
            scheduler.set_time_quantum(45).await.expect("root may");
            scheduler.list_gpus().await.expect("root may");
            took.push(begin.elapsed());
        }
        [took[0], took[1]]
    });
    let output = flood.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let used = daemon.private_memory();
    eprintln!("{}; {} MiB, root's answers took {by_control:?} and {by_bus:?}", said.trim(), used >> 20);
    assert!(used < MAX_MEMORY, "the daemon has {} MiB after {said}", used >> 20);
    // The bus delivers calls in order, and a debug build takes some time to refuse the earlier
    // calls.
    assert!(by_control < MAX_ANSWER && by_bus < MAX_ANSWER, "root was answered after {by_control:?} and {by_bus:?}");
}
