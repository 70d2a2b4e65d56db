//! Programs that push each other's memory off the simulated GPU: the scheduler sees it by NVML, and says so on the bus, in
//! the journal and to `nvsharectl`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::private_bus::*;
use cuda_sim_gpus::{Config, EngineKind, traffic};
use nvshare::bus::{Gpu, NAME, PATH};
use nvshare_wire::client::{Engine, EngineReason, GpuKind};
use nvshare_wire::{ClientMessage, SchedulerMessage, Text, Uuid};
use test_support::daemon::*;
use test_support::has_own_process;
use zbus::MessageStream;

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 1024 * MIB;
/// Of each of two programs.
const DEMAND: u64 = 800 * MIB;

/// A program with managed memory that has the GPU.
fn program(daemon: &Daemon) -> Client {
    let client = daemon.client();
    let uuid = Uuid(Config::get().uuid(0));
    let (kind, engine, reason) = (GpuKind::Gpu, Engine::Managed, EngineReason::Asked);
    client.send(ClientMessage::Attach {
        slot: 0,
        uuid,
        kind,
        engine,
        total: TOTAL,
        name: Text::new("simulated"),
        reason,
    });
    client.until(|message| matches!(message, SchedulerMessage::Attached { slot: 0 }));
    client.report(DEMAND, 0);
    client.request();
    client.until_granted();
    client
}

/// The next signal of that name: what it is about.
async fn next(stream: &mut MessageStream, name: &str) -> String {
    use zbus::export::futures_core::Stream;
    loop {
        let message = std::future::poll_fn(|cx| std::pin::Pin::new(&mut *stream).poll_next(cx)).await;
        let message = message.expect("the connection lives").expect("a message");
        if message.header().member().is_some_and(|member| member == name) {
            return message.body().deserialize().expect("a text");
        }
    }
}

fn only(gpus: Vec<Gpu>) -> Gpu {
    assert_eq!(gpus.len(), 1);
    gpus.into_iter().next().expect("a GPU")
}

#[test]
fn thrashing_is_announced_and_ended_by_turns() {
    let environment = [("CUDA_SIM_MEMORY", TOTAL.to_string()), ("CUDA_SIM_PCIE_LANES", "1".to_owned())];
    if !has_own_process("thrash::thrashing_is_announced_and_ended_by_turns", &environment) {
        return;
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    daemon.log.wait("found");
    assert!(daemon.ctl(&["set", "anti-thrash", "off"]).code == Some(0));
    let name = Config::get().uuid_text(0);

    let programs = [program(&daemon), program(&daemon)];
    // What moves, in the driver's place: 50 MB/s each way.
    static MOVES: AtomicBool = AtomicBool::new(true);
    let mover = thread::spawn(|| {
        while MOVES.load(Ordering::Relaxed) {
            traffic::add(0, EngineKind::In, 50_000);
            traffic::add(0, EngineKind::Out, 50_000);
            thread::sleep(Duration::from_millis(1));
        }
    });
    let rule = format!("type='signal',sender='{NAME}',path='{PATH}'");
    block_on(async {
        let (here, there) = (on_bus(&bus).await, on_control(&daemon.control()).await);
        let mut on_bus = MessageStream::for_match_rule(rule.as_str(), &here, None).await.expect("a match");
        let mut on_control = MessageStream::from(&there);
        scheduler(&there).await.version().await.expect("it listens");
        for stream in [&mut on_bus, &mut on_control] {
            assert_eq!(next(stream, "ThrashingBegan").await, name);
        }
        let gpu = only(scheduler(&here).await.list_gpus().await.expect("GPUs"));
        assert!(gpu.thrashing && !gpu.serialized, "{gpu:?}");
        assert_eq!(gpu.holders.len(), 2, "they are left to it");
    });
    let line = daemon.log.wait("the programs that run there together need");
    assert!(line.contains(&name) && line.contains("set anti-thrash to auto"), "{line}");
    assert_eq!(daemon.log.count("is detected without its page faults"), 1, "it is said once that they are not shown");
    let text = daemon.ctl(&["status"]).stdout;
    assert!(text.contains("thrashing: programs push") && text.contains("nvsharectl set anti-thrash auto"), "{text}");

    assert!(daemon.ctl(&["set", "anti-thrash", "auto"]).code == Some(0));
    let revoked = &programs[1];
    revoked.until(|message| matches!(message, SchedulerMessage::Revoke { .. }));
    block_on(async {
        let here = on_bus(&bus).await;
        let mut on_bus = MessageStream::for_match_rule(rule.as_str(), &here, None).await.expect("a match");
        revoked.release();
        assert_eq!(next(&mut on_bus, "ThrashingEnded").await, name);
        let gpu = only(scheduler(&here).await.list_gpus().await.expect("GPUs"));
        assert!(!gpu.thrashing && gpu.serialized, "{gpu:?}");
    });
    daemon.log.wait(&format!("thrashing on {name} has ended"));
    let text = daemon.ctl(&["status"]).stdout;
    assert!(text.contains("programs take turns for now: together they thrashed"), "{text}");
    MOVES.store(false, Ordering::Relaxed);
    mover.join().expect("it ends");
}
