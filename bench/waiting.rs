//! Clients that all wait for one GPU. If root runs the benchmark, the clients belong to many users.
//! One thread simulates the library of all clients. The thread acknowledges allowances and limits,
//! and requests the lock again after each release.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nvshare_wire::client::{Engine, EngineReason, GpuKind};
use nvshare_wire::{ClientMessage, SchedulerMessage, Text};
use test_support::daemon::{self, Client, Daemon, GPU, PATIENCE};

/// Demand of each client, in bytes. The GPU has room for all clients.
const DEMAND: u64 = 8 << 20;
/// Time without a message after which the last hand-over counts as complete.
const QUIET: Duration = Duration::from_micros(500);
const FIRST_USER: u32 = 60_000;

pub struct Waiting {
    clients: Vec<Waiter>,
    epoll: OwnedFd,
    holder: usize,
    attached: usize,
    /// Clients that have received a message and have not yet sent the report that acknowledges it.
    unanswered: Vec<usize>,
}

struct Waiter {
    client: Client,
    ack: u32,
    limit_ack: u32,
    allowance: u64,
}

impl Waiting {
    /// Creates `clients` waiting clients that belong to `users` users in rotation. Also creates the
    /// client that holds the lock.
    pub fn new(daemon: &Daemon, clients: usize, users: u32) -> Self {
        // SAFETY: the call takes no pointers. The descriptor is new, so no other value owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let mut all = Self { clients: Vec::new(), epoll, holder: usize::MAX, attached: 0, unanswered: Vec::new() };
        for number in 0..=clients {
            let client = connect(daemon, users, number);
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: number as u64 };
            // SAFETY: both descriptors are open, and the kernel reads `event`, which outlives the
            // call.
            let added = unsafe {
                libc::epoll_ctl(all.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, client.socket.as_raw_fd(), &mut event)
            };
            assert_eq!(added, 0, "epoll_ctl");
            let (kind, engine, name, reason) = (GpuKind::Gpu, Engine::Swap, Text::new("Test GPU"), EngineReason::Best);
            client.send(ClientMessage::Attach { slot: 0, uuid: GPU, kind, engine, total: 1 << 40, name, reason });
            all.clients.push(Waiter { client, ack: 0, limit_ack: 0, allowance: 0 });
            all.answer_until(daemon, |all| all.attached > number);
        }
        for waiter in &all.clients {
            waiter.report();
            waiter.client.request();
        }
        all.answer_until(daemon, |all| all.holder != usize::MAX);
        all.settle();
        all
    }

    /// Measures `count` hand-overs, from the packet that releases the lock until the next client
    /// has read its grant.
    pub fn hand_overs(&mut self, daemon: &Daemon, count: usize) -> Vec<Duration> {
        let mut times: Vec<Duration> = (0..count).map(|_| self.hand_over(daemon)).collect();
        times.sort();
        times
    }

    fn hand_over(&mut self, daemon: &Daemon) -> Duration {
        let before = std::mem::replace(&mut self.holder, usize::MAX);
        let (begin, deadline) = (Instant::now(), Instant::now() + PATIENCE);
        self.clients[before].client.release();
        while self.holder == usize::MAX {
            self.read(Duration::from_secs(1));
            assert!(Instant::now() < deadline, "nobody has the lock: {}", daemon.ctl(&["status"]).stdout);
        }
        let time = begin.elapsed();
        self.clients[before].client.request();
        self.settle();
        time
    }

    fn settle(&mut self) {
        while self.read(QUIET) || !self.unanswered.is_empty() {
            self.answer();
        }
    }

    fn answer_until(&mut self, daemon: &Daemon, is_done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_done(self) {
            self.read(Duration::from_secs(1));
            self.answer();
            assert!(Instant::now() < deadline, "the scheduler does not answer: {}", daemon.ctl(&["status"]).stdout);
        }
    }

    fn answer(&mut self) {
        for number in self.unanswered.drain(..) {
            self.clients[number].report();
        }
    }

    /// Reads one message from each client that has a message. Returns false if no message arrived
    /// within `patience`.
    fn read(&mut self, patience: Duration) -> bool {
        const EVENTS: usize = 64;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let patience = libc::timespec { tv_sec: patience.as_secs() as _, tv_nsec: patience.subsec_nanos().into() };
        // SAFETY: the kernel writes at most `EVENTS` events, and the array has room for `EVENTS`
        // events. The kernel only reads the timeout.
        let count = unsafe {
            let set = std::ptr::null();
            libc::epoll_pwait2(self.epoll.as_raw_fd(), events.as_mut_ptr(), EVENTS as i32, &patience, set)
        };
        for event in &events[..usize::try_from(count).expect("epoll_pwait2")] {
            self.receive(event.u64 as usize);
        }
        count > 0
    }

    fn receive(&mut self, number: usize) {
        let waiter = &mut self.clients[number];
        match waiter.client.receive().expect("the daemon is there") {
            SchedulerMessage::Attached { .. } => self.attached += 1,
            SchedulerMessage::Grant { .. } => {
                assert_eq!(self.holder, usize::MAX, "turns are exclusive");
                self.holder = number;
            }
            SchedulerMessage::Limit { seq, .. } => {
                waiter.limit_ack = seq;
                self.unanswered.push(number);
            }
            SchedulerMessage::Allowance { seq, bytes, .. } => {
                (waiter.ack, waiter.allowance) = (seq, bytes);
                self.unanswered.push(number);
            }
            _ => {}
        }
    }
}

impl Waiter {
    fn report(&self) {
        self.client.send(daemon::memory_after(self.ack, self.limit_ack, DEMAND, self.allowance.min(DEMAND)));
    }
}

/// Connects a client as one of the users. Without root, connects as this process's user.
fn connect(daemon: &Daemon, users: u32, number: usize) -> Client {
    let user = FIRST_USER + number as u32 % users;
    let becomes = |user: u32| {
        // The raw system call changes only this thread's user. The kernel records a connection's
        // user when the connection is made.
        // SAFETY: the call takes no pointers.
        let done = unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) };
        assert_eq!(done, 0, "only root can be several users");
    };
    if users > 1 {
        becomes(user);
    }
    let client = Client::welcomed(&daemon.socket());
    if users > 1 {
        becomes(0);
    }
    client
}
