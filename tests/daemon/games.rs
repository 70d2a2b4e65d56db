//! `nvsharectl make-room --games`: memory is kept free while a game runs. GameMode announces games
//! on the session bus.

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use test_support::daemon::*;
use zbus::Connection;
use zbus::connection::Builder;
use zbus::object_server::SignalEmitter;
use zbus::wire::ObjectPath;

use crate::private_bus::*;

const PATH: &str = "/com/feralinteractive/GameMode";

/// The number of running games, as GameMode's daemon publishes it.
struct GameMode(Arc<AtomicI32>);

#[zbus::interface(name = "com.feralinteractive.GameMode")]
impl GameMode {
    #[zbus(property)]
    fn client_count(&self) -> i32 {
        self.0.load(Ordering::Relaxed)
    }

    #[zbus(signal)]
    async fn game_registered(emitter: &SignalEmitter<'_>, pid: i32, path: ObjectPath<'_>) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn game_unregistered(emitter: &SignalEmitter<'_>, pid: i32, path: ObjectPath<'_>) -> zbus::Result<()>;
}

/// GameMode's daemon on a bus.
struct Games {
    connection: Connection,
    count: Arc<AtomicI32>,
}

impl Games {
    async fn start(bus: &Bus, running: i32) -> Self {
        let count = Arc::new(AtomicI32::new(running));
        let builder = Builder::address(bus.address.as_str()).serve_at(PATH, GameMode(count.clone()));
        let connection = builder.name("com.feralinteractive.GameMode").build().await.expect("the name");
        Self { connection, count }
    }

    /// Sets the number of running games.
    async fn run(&self, count: i32) {
        let before = self.count.swap(count, Ordering::Relaxed);
        let emitter = SignalEmitter::new(&self.connection, PATH).expect("a path");
        let path = ObjectPath::try_from(format!("{PATH}/Games/7")).expect("a path");
        match count > before {
            true => GameMode::game_registered(&emitter, 7, path).await,
            false => GameMode::game_unregistered(&emitter, 7, path).await,
        }
        .expect("a signal");
    }
}

/// Starts `nvsharectl make-room --games` with this bus as its session bus.
fn follow(daemon: &Daemon, bus: &Bus) -> Child {
    let mut command = ctl();
    command.arg("--control").arg(daemon.control()).args(["make-room", "--games", "2G"]);
    command.env("DBUS_SESSION_BUS_ADDRESS", &bus.address).stdin(Stdio::null()).spawn().expect("nvsharectl")
}

#[test]
fn memory_is_kept_free_while_games_run() {
    let (session, daemon) = (Bus::start(), Daemon::start());
    let client = daemon.client();
    client.attach();
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        let scheduler = scheduler(&connection).await;
        let kept = async |bytes: u64| {
            let is_kept = async || scheduler.list_gpus().await.expect("GPUs")[0].kept == Some(bytes);
            eventually(&format!("{bytes} bytes to be kept"), async || is_kept().await.then_some(())).await;
        };
        let mut following = follow(&daemon, &session);
        // GameMode starts while a game is already running.
        let games = Games::start(&session, 1).await;
        kept(2 << 30).await;
        games.run(2).await;
        games.run(1).await;
        games.run(0).await;
        kept(0).await;
        games.run(1).await;
        kept(2 << 30).await;
        // GameMode ends, and its count of games disappears.
        games.connection.close().await.expect("an end");
        kept(0).await;
        let _again = Games::start(&session, 1).await;
        kept(2 << 30).await;
        assert!(following.try_wait().expect("a child").is_none());
        drop(session);
        kept(0).await;
        assert!(following.wait().expect("its end").success(), "it ends with the session");
    });
}
