//! A machine that suspends, with a fake logind on a private bus.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use zbus::connection::Builder;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, OwnedFd};

use crate::private_bus::*;
use nvshare_wire::SchedulerMessage;
use test_support::daemon::*;
use test_support::wait_for;

const MANAGER: &str = "/org/freedesktop/login1";

/// logind's ends of the inhibitors that it has issued.
type Inhibitors = Arc<Mutex<Vec<UnixStream>>>;

struct Manager(Inhibitors);

#[zbus::interface(name = "org.freedesktop.login1.Manager")]
impl Manager {
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> OwnedFd {
        assert_eq!((what, who, mode, why.is_empty()), ("sleep", "nvshare", "delay", false));
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("a socket");
        self.0.lock().expect("the list").push(ours);
        std::os::fd::OwnedFd::from(theirs).into()
    }

    #[zbus(signal)]
    async fn prepare_for_sleep(emitter: &SignalEmitter<'_>, start: bool) -> zbus::Result<()>;
}

struct Logind {
    inhibitors: Inhibitors,
    connection: Connection,
}

impl Logind {
    async fn start(bus: &Bus) -> Self {
        let inhibitors = Inhibitors::default();
        let connection = Builder::address(bus.address.as_str())
            .serve_at(MANAGER, Manager(inhibitors.clone()))
            .name("org.freedesktop.login1")
            .build()
            .await
            .expect("the bus");
        Self { inhibitors, connection }
    }

    async fn sleeps(&self, start: bool) {
        let emitter = SignalEmitter::new(&self.connection, MANAGER).expect("the path");
        Manager::prepare_for_sleep(&emitter, start).await.expect("the bus");
    }

    /// Returns the number of inhibitors that the daemon holds, which is never more than one.
    fn held(&self) -> usize {
        let mut all = self.inhibitors.lock().expect("the list");
        all.retain(|inhibitor| {
            let end = (&*inhibitor).read(&mut [0]);
            !matches!(end, Ok(0))
        });
        assert!(all.len() <= 1);
        all.len()
    }

    async fn until(&self, held: usize) {
        eventually(&format!("{held} inhibitors"), async || (self.held() == held).then_some(())).await;
    }
}

/// Carries out all allowances until the client has no bytes on the GPU.
fn evict(client: &Client, demand: u64) {
    let is_last = |message: &SchedulerMessage| matches!(message, SchedulerMessage::Allowance { bytes: 0, .. });
    let SchedulerMessage::Allowance { seq, .. } = client.until(is_last) else { panic!("it is an allowance") };
    client.send(memory_after(seq, 1, demand, 0));
}

#[test]
fn memory_is_evicted_before_a_suspend_and_programs_run_afterwards() {
    let bus = Bus::start();
    block_on(async {
        let logind = Logind::start(&bus).await;
        let daemon = bus.daemon();
        let connected = daemon.client();
        assert_eq!(logind.held(), 0, "without a GPU it does not matter");
        let [holder, waiter] = daemon.holder_and_waiter();
        logind.until(1).await;

        logind.sleeps(true).await;
        holder.until(|message| matches!(message, SchedulerMessage::Revoke { gpus: 1 }));
        assert_eq!(logind.held(), 1, "its memory is on the GPU");
        holder.release();
        evict(&holder, 12 * GIB);
        logind.until(0).await;
        daemon.log.wait("the host is about to suspend");
        let status = daemon.ctl(&["--json", "status"]).stdout;
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        assert_eq!(
            (&status["gpus"][0]["resident"], &status["gpus"][0]["holders"]),
            (&0.into(), &serde_json::json!([]))
        );

        logind.sleeps(false).await;
        waiter.until_granted();
        logind.until(1).await;
        daemon.log.wait("the host has resumed");
        drop((holder, waiter, connected));
        logind.until(0).await;
    });
}

#[test]
fn a_suspend_is_delayed_only_while_a_program_uses_a_gpu() {
    let bus = Bus::start();
    let daemon = bus.daemon();
    block_on(async {
        let logind = Logind::start(&bus).await;
        let client = daemon.client();
        client.attach();
        logind.until(1).await;
        // The client has no memory to evict.
        logind.sleeps(true).await;
        logind.until(0).await;
        logind.sleeps(false).await;
        logind.until(1).await;
        drop(client);
        logind.until(0).await;
    });
}

#[test]
fn programs_run_again_if_the_bus_is_lost_during_a_suspend() {
    let bus = Bus::start();
    let daemon = bus.daemon();
    let client = daemon.client();
    block_on(async {
        let logind = Logind::start(&bus).await;
        client.attach();
        logind.until(1).await;
        logind.sleeps(true).await;
        logind.until(0).await;
    });
    client.report(GIB, 0);
    client.request();
    wait_for("its request", || daemon.ctl(&["status"]).stdout.contains(" waits").then_some(()));
    drop(bus);
    client.until_granted();
}
