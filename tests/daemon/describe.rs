//! What a page reads: `Describe`, `DescribeTimeline`, `ListPermissions` and the signal `GpuChanged`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use nvshare::bus::{NAME, PATH};
use serde_json::Value;
use test_support::daemon::*;
use zbus::export::futures_core::Stream;
use zbus::{MessageStream, Variant};

use crate::fake_polkit::{Polkit, Says};
use crate::polkit::{NOBODY, on_bus_as};
use crate::private_bus::*;

type Options<'a> = HashMap<&'a str, Variant<'a>>;

async fn describe(connection: &zbus::Connection, options: Options<'_>) -> (Value, usize) {
    let text = scheduler(connection).await.describe(options).await.expect("a description");
    (serde_json::from_str(&text).expect("JSON"), text.len())
}

#[test]
fn a_description_has_the_holder_the_queue_and_the_matching_programs() {
    let daemon = Daemon::start();
    let [holder, waiter] = daemon.holder_and_waiter();
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        let (all, _) = describe(&connection, Options::new()).await;
        let gpu = &all["gpus"][0];
        assert_eq!((&gpu["holders"][0]["id"], &gpu["queue"][0]["id"]), (&holder.id.into(), &waiter.id.into()), "{all}");
        assert_eq!((&gpu["holders-length"], &gpu["queue-length"]), (&1.into(), &1.into()));
        let why = gpu["queue"][0]["why"].as_str().expect("a reason");
        assert!(why.contains("holds GPU") && why.contains("Its turn ends in"), "{why}");
        assert_eq!((&all["total"], &all["found"]), (&2.into(), &2.into()));
        assert_eq!(all["programs"].as_array().map(Vec::len), Some(2));

        let (one, _) = describe(&connection, Options::from([("count", 1_u32.into()), ("first", 1_u32.into())])).await;
        assert_eq!((&one["found"], one["programs"].as_array().map(Vec::len)), (&2.into(), Some(1)));
        let (none, _) = describe(&connection, Options::from([("find", "no such program".into())])).await;
        assert_eq!((&none["total"], &none["found"]), (&2.into(), &0.into()));
        let pid = std::process::id();
        let (whole, _) = describe(&connection, Options::from([("pid", pid.into())])).await;
        assert_eq!(whole["programs"][0]["connected-since"].as_f64().map(|since| since > 1e9), Some(true), "{whole}");
        assert!(whole["why"].as_array().is_some_and(|why| why.len() > 2), "{whole}");

        let scheduler = scheduler(&connection).await;
        for (option, value, said) in [
            ("count", Variant::from(51_u32), "the option count cannot be 51: at most 50 is allowed"),
            ("find", Variant::from(1_u32), "wrong options: invalid type: integer `1`, expected a string in `find`"),
            (
                "order",
                Variant::from("x"),
                "wrong options: unknown variant `x`, expected one of `memory`, `time`, `wait`, `name` in `order`",
            ),
            (
                "x",
                Variant::from(1_u32),
                "wrong options: unknown option `x`, expected one of `gpu`, `find`, `order`, `first`, `count`, `pid`",
            ),
            ("pid", Variant::from(1_u32), "no program under nvshare has process ID 1"),
        ] {
            let refused = refusal(scheduler.describe(HashMap::from([(option, value)])).await);
            assert_eq!(refused, ("org.freedesktop.DBus.Error.InvalidArgs".to_owned(), said.to_owned()));
        }
    });
}

/// The length of a description and of a timeline with this number of programs, one of which holds the
/// lock.
fn length_with(programs: usize) -> usize {
    let daemon = Daemon::start();
    let clients: Vec<Client> = (0..programs).map(|_| daemon.client()).collect();
    clients.iter().for_each(|client| client.attach_gpu(GPU, 4096 * GIB));
    for client in &clients {
        client.report(3000 * GIB, 0); // no two of them fit
        client.request();
    }
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        let length = eventually("all to wait for one", async || {
            let (all, length) = describe(&connection, Options::new()).await;
            assert_eq!(all["programs"].as_array().map(Vec::len), Some(50));
            (all["gpus"][0]["queue-length"] == programs - 1).then_some(length)
        });
        let length = length.await;
        let timeline = scheduler(&connection).await.describe_timeline(HashMap::new()).await.expect("a timeline");
        let read: Value = serde_json::from_str(&timeline).expect("JSON");
        assert_eq!(read["gpus"][0]["lanes"].as_array().map(Vec::len), Some(24));
        length + timeline.len()
    })
}

/// So a page with 1,000 programs refreshes with less than 200 KB.
#[test]
fn a_description_does_not_grow_with_the_number_of_programs() {
    let [few, many] = [60, 240].map(length_with);
    assert!(few < 100_000 && many < few + few / 20, "{few} and {many} bytes");
}

#[test]
fn a_live_timeline_continues_and_names_only_own_programs() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let daemon = bus.daemon();
    let [holder, waiter] = daemon.holder_and_waiter();
    block_on(async {
        let read = async |connection: &zbus::Connection| {
            let text = scheduler(connection).await.describe_timeline(HashMap::new()).await.expect("a timeline");
            serde_json::from_str::<Value>(&text).expect("JSON")["gpus"][0]["lanes"].take()
        };
        let spans = |lanes: &Value| {
            let all = lanes
                .as_array()
                .expect("lanes")
                .iter()
                .flat_map(|lane| lane["spans"].as_array().expect("spans").clone());
            all.map(|span| span[0].as_str().expect("a kind").to_owned()).collect::<Vec<_>>()
        };
        let (root, stranger) = (on_bus(&bus).await, on_bus_as(&bus, NOBODY).await);
        let lanes = read(&root).await;
        assert_eq!(lanes.as_array().map(Vec::len), Some(2));
        assert!(spans(&lanes).contains(&"waits".to_owned()), "{lanes}");
        let own = format!("(PID {})", std::process::id());
        assert!(lanes[0]["name"].as_str().is_some_and(|name| name.ends_with(&own)), "{lanes}");
        let lanes = read(&stranger).await;
        assert!(
            lanes.as_array().is_some_and(|lanes| lanes.iter().all(|lane| lane["name"] == "another user's program"))
        );
        // The next reading shows what has happened since.
        holder.release();
        holder.report(12 * GIB, 0);
        waiter.until_granted();
        waiter.release();
        let held = eventually("both turns", async || {
            let kinds = spans(&read(&root).await);
            (kinds.iter().filter(|kind| *kind == "holds").count() == 2).then_some(kinds)
        });
        held.await;
        let said = refusal(scheduler(&root).await.describe_timeline(HashMap::from([("last", 601_u32.into())])).await).1;
        assert_eq!(said, "the option last cannot be 601 seconds: 1 to 600 are allowed");
    });
}

#[test]
fn a_gpu_that_changes_is_announced_by_its_name_alone_twice_a_second() {
    let daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    block_on(async {
        let connection = on_control(&daemon.control()).await;
        let gpu = scheduler(&connection).await.list_gpus().await.expect("GPUs")[0].uuid.clone();
        let mut signals = MessageStream::from(&connection);
        let mut times = Vec::new();
        while times.len() < 3 {
            client.request();
            client.until_granted();
            client.release();
            let next = std::future::poll_fn(|cx| std::pin::Pin::new(&mut signals).poll_next(cx));
            let Ok(message) = tokio::time::timeout(Duration::from_millis(1), next).await else { continue };
            let message = message.expect("the connection lives").expect("a message");
            let header = message.header();
            if header.member().is_some_and(|member| member == "GpuChanged") {
                assert_eq!(
                    (header.interface().map(|name| name.as_str()), header.path().map(|path| path.as_str())),
                    (Some(NAME), Some(PATH))
                );
                assert_eq!(message.body().deserialize::<String>().expect("a name"), gpu);
                times.push(Instant::now());
            }
        }
        // The messages are read a little after they were sent.
        assert!(times[2] - times[0] > Duration::from_millis(900), "{times:?}");
    });
}

#[test]
fn permissions_are_what_polkit_allows_without_a_password() {
    let daemon = Daemon::start();
    block_on(async {
        let all = scheduler(&on_control(&daemon.control()).await).await.list_permissions().await.expect("permissions");
        assert_eq!(all.len(), 5);
        assert!(all.values().all(|may| *may), "the daemon's own user may do everything: {all:?}");
    });
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let bus = Bus::start();
    let _daemon = bus.daemon();
    block_on(async {
        let (root, stranger) = (on_bus(&bus).await, on_bus_as(&bus, NOBODY).await);
        let of = async |connection: &zbus::Connection| {
            scheduler(connection).await.list_permissions().await.expect("permissions")
        };
        assert!(of(&root).await.values().all(|may| *may));
        assert!(of(&stranger).await.values().all(|may| !*may), "without polkit");
        let polkit = Polkit::start(&bus).await;
        for (says, may) in [(Says::Yes, true), (Says::Challenge, false), (Says::No, false)] {
            polkit.say(says);
            let permissions = of(&stranger).await;
            assert!(permissions.len() == 5 && permissions.values().all(|one| *one == may), "{permissions:?}");
            assert!(polkit.asked().iter().all(|asked| asked.flags == 0), "polkit asks for no password");
        }
    });
}
