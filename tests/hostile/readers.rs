//! Users who read the scheduler's state, and programs that make the state as large as they may.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvshare::bus::SchedulerProxy;
use nvshare_wire::{ClientMessage, SchedulerMessage, Uuid};
use test_support::daemon::{self as support, Client, Daemon, GIB};

/// The number of clients of one process. All of them wait for all GPUs, and each GPU has at most
/// one holder.
const CLIENTS: usize = 256;
const GPUS: u32 = 16;

fn crowd(daemon: &Daemon) -> Vec<Client> {
    let clients: Vec<Client> = (0..CLIENTS).map(|_| daemon.client()).collect();
    for client in &clients {
        for slot in 0..GPUS {
            let mut attach = support::attach(slot, Uuid([100 + slot as u8; 16]));
            // Leaves room for the contexts of all clients.
            if let ClientMessage::Attach { total, .. } = &mut attach {
                *total = 1024 * GIB;
            }
            client.send(attach);
        }
    }
    for client in &clients {
        let attached = Cell::new(0);
        client.until(|message| {
            attached.set(attached.get() + u32::from(matches!(message, SchedulerMessage::Attached { .. })));
            attached.get() == GPUS
        });
        client.send(ClientMessage::Request { gpus: (1 << GPUS) - 1 });
    }
    clients
}

/// Ends the other thread, even if this thread fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn readers_do_not_block_the_scheduling_loop() {
    let daemon = Daemon::start_with(|command, _| {
        command.args(["--log-level", "info"]);
    });
    let clients = crowd(&daemon);
    let ends = AtomicBool::new(false);
    let (welcomes, answers) = thread::scope(|scope| {
        let end = Ends(&ends);
        let welcomes = scope.spawn(|| {
            let mut welcomes = Vec::new();
            while !ends.load(Ordering::Relaxed) {
                let begin = Instant::now();
                drop(daemon.client());
                welcomes.push((begin, Instant::now()));
                thread::sleep(Duration::from_millis(1));
            }
            welcomes
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let answers = runtime.block_on(async {
            let stream = UnixStream::connect(daemon.control()).expect("the control socket");
            let connection = zbus::connection::Builder::unix_stream(stream).p2p().build().await.expect("the handshake");
            let scheduler = SchedulerProxy::new(&connection).await.expect("a proxy");
            let mut answers = Vec::new();
            for _ in 0..3 {
                let begin = Instant::now();
                let sentences = scheduler.explain(std::process::id()).await.expect("an explanation");
                let explained = (begin, Instant::now());
                let (listed, gpus) = (scheduler.list_clients().await, scheduler.list_gpus().await);
                answers.push((sentences.len(), explained, listed.expect("clients").len(), gpus.expect("GPUs").len()));
            }
            answers
        });
        drop(end);
        (welcomes.join().expect("it ends"), answers)
    });
    eprintln!("answers (sentences, time, clients, GPUs): {answers:?}");
    // If the scheduling loop explained the waits itself, no program would be welcomed during an answer.
    let during = |(begin, end)| welcomes.iter().filter(|welcome| begin < welcome.0 && welcome.1 < end).count();
    let welcomed: usize = answers.iter().map(|answer| during(answer.1)).sum();
    assert!(welcomed >= 2 * answers.len(), "{welcomed} programs were welcomed during {} answers", answers.len());
    for (sentences, _, listed, gpus) in answers {
        assert!(sentences <= 1000, "an answer has {sentences} sentences");
        assert!(listed >= CLIENTS && gpus >= GPUS as usize, "{listed} clients, {gpus} GPUs");
    }
    // Other clients are still served.
    let client = daemon.client();
    client.attach();
    client.report(12 * GIB, 0);
    client.request();
    client.until_granted();
    drop(clients);
}
