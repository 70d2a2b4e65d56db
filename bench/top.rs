//! The cost of `nvsharectl top` with many clients, on a terminal of 80 columns without colours. The
//! daemon is a real process. The clients are only sockets.
//!
//! `cargo bench --bench top [-- --json FILE]`: with a file, the benchmark writes the figures to it
//! (see `bench_support::results`).

#[allow(dead_code, reason = "nothing is handed over here")]
mod crowd;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use crowd::{crowd, loop_time};
use test_support::daemon::{Daemon, ctl};

const CLIENTS: usize = 100;
const TIME: Duration = Duration::from_secs(20);
const COLUMNS: u16 = 80;
const LINES: u16 = 50;

fn main() {
    let mut results = Results::from_arguments();
    println!("{:>10}  {:>16}  {:>16}", "clients", "top, % of a core", "loop, % of a core");
    for clients in [2, 10, CLIENTS] {
        let daemon = crowd::daemon(|_| String::new());
        let crowd = crowd(&daemon, clients);
        for client in &crowd {
            client.request(); // one client has the GPU, and each other client has an expected time
        }
        let (shown, scheduler) = shown(&daemon);
        println!("{clients:>10}  {shown:>16.3}  {scheduler:>16.3}");
        if clients == CLIENTS {
            let load = bench_support::results::load();
            let note = format!(
                "over {} s, {COLUMNS} × {LINES}, one has the GPU and all others wait; the scheduler {scheduler:.2} %; {load}",
                TIME.as_secs()
            );
            results.add(Figure { name: "top-100-clients-cpu", value: shown, unit: "percent", note });
        }
    }
    results.write();
}

/// Returns the processor time of `nvsharectl top` at its default interval after its start, and of
/// the scheduling loop during the same period. Both times are in percent of a core.
fn shown(daemon: &Daemon) -> (f64, f64) {
    let (master, terminal) = terminal();
    let other = |file: &OwnedFd| file.try_clone().expect("a descriptor");
    let mut top = ctl();
    top.arg("--control").arg(daemon.control()).arg("top").env("NO_COLOR", "1").env("TERM", "xterm");
    top.stdin(other(&terminal)).stdout(other(&terminal)).stderr(terminal);
    let mut top = top.spawn().expect("nvsharectl");
    read_on(master);
    std::thread::sleep(Duration::from_secs(3));
    let pid = top.id();
    let (begin, before, loop_before) = (Instant::now(), time_of(pid), loop_time(daemon));
    std::thread::sleep(TIME);
    let percent = |time: Duration| 100.0 * time.as_secs_f64() / begin.elapsed().as_secs_f64();
    let used = (percent(time_of(pid) - before), percent(loop_time(daemon) - loop_before));
    top.kill().and_then(|()| top.wait()).expect("its end");
    used
}

/// The processor time of all threads of a process.
fn time_of(pid: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let times = tasks.flatten().map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|time| time.parse().ok()).map_or(Duration::ZERO, Duration::from_nanos)
    });
    times.sum()
}

/// Opens a pseudo-terminal. Returns the master and the terminal.
fn terminal() -> (OwnedFd, OwnedFd) {
    let size = libc::winsize { ws_row: LINES, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut master, mut terminal) = (-1, -1);
    // SAFETY: both pointers refer to live integers. The descriptors are new, so no other value owns
    // them.
    unsafe {
        let nothing = (std::ptr::null_mut(), std::ptr::null_mut());
        let made = libc::openpty(&mut master, &mut terminal, nothing.0, nothing.1, (&raw const size).cast_mut());
        assert_eq!(made, 0, "no terminal: {}", io::Error::last_os_error());
        (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(terminal))
    }
}

/// Reads and discards the terminal's output.
fn read_on(master: OwnedFd) {
    std::thread::spawn(move || {
        let (mut master, mut some) = (File::from(master), [0; 1 << 16]);
        while master.read(&mut some).is_ok_and(|length| length > 0) {}
    });
}
