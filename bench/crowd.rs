//! A daemon with many clients, and the cost of concurrent activity: the time of the scheduling
//! loop, and the slowdown of hand-overs. The daemon is a real process. The clients are only
//! sockets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvshare_wire::ClientMessage;

use test_support::daemon::{self, Client, Daemon, GIB, GPU};

const HAND_OVERS: usize = 5_000;

/// Starts a daemon with additional lines at the end of its configuration.
pub fn daemon(more: impl Fn(&std::path::Path) -> String) -> Daemon {
    Daemon::start_with(|command, directory| {
        let file = directory.join("nvshare.toml");
        let text = "anti-thrash = \"on\"\nmax-clients-per-tenant = 65535\nlog-level = \"warn\"\n";
        std::fs::write(&file, format!("{text}{}", more(directory))).expect("a configuration");
        command.arg("--config").arg(file).args(["--log-level", "info"]);
    })
}

/// Creates clients with some memory each, on a GPU that has room for all contexts.
pub fn crowd(daemon: &Daemon, clients: usize) -> Vec<Client> {
    let crowd: Vec<Client> = (0..clients).map(|_| daemon.client()).collect();
    for client in &crowd {
        attach(client);
        client.report(GIB / 4, GIB / 8);
    }
    std::thread::sleep(Duration::from_secs(2)); // until the work after attaching is done
    crowd
}

fn attach(client: &Client) {
    let ClientMessage::Attach { slot, uuid, kind, engine, name, reason, .. } = daemon::attach(0, GPU) else {
        return;
    };
    client.send(ClientMessage::Attach { slot, uuid, kind, engine, total: 1 << 40, name, reason });
}

/// Returns the processor time of the daemon's first thread, which runs the scheduling loop.
pub fn loop_time(daemon: &Daemon) -> Duration {
    let pid = daemon.child.id();
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).expect("it runs");
    Duration::from_nanos(text.split(' ').next().and_then(|time| time.parse().ok()).expect("a time"))
}

/// Measures hand-overs, from the packet that releases the lock until the next client has the lock.
/// Returns the sorted times. Another thread calls `beside` repeatedly during the measurement.
pub fn hand_overs(daemon: &Daemon, beside: Option<&(dyn Fn() + Sync)>) -> Vec<Duration> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if let Some(beside) = beside {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    beside();
                }
            });
        }
        let [a, b] = [daemon.client(), daemon.client()];
        [&a, &b].into_iter().for_each(attach);
        a.request();
        a.until_granted();
        b.request();
        let mut pair = [&a, &b];
        let mut times: Vec<Duration> = (0..HAND_OVERS)
            .map(|_| {
                let [holder, next] = pair;
                let begin = Instant::now();
                holder.release();
                next.until_granted();
                let time = begin.elapsed();
                holder.request();
                pair = [next, holder];
                time
            })
            .collect();
        done.store(true, Ordering::Relaxed);
        times.sort();
        times
    })
}

/// Prints a row of the table of hand-overs. Without times, prints the table's heading.
pub fn print(what: &str, times: Option<&[Duration]>) {
    let Some(times) = times else {
        return println!("\n{what:>34}  {:>10}  {:>10}  {:>10}", "median", "99 %", "longest");
    };
    let [median, most, all] = [0.5, 0.99, 1.0].map(|share| at(times, share));
    println!("{what:>34}  {median:>10.1?}  {most:>10.1?}  {all:>10.1?}");
}

/// Returns the quantile `share` of sorted times.
pub fn at(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}
