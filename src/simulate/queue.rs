//! Future events: messages, which are delivered in order, and events of programs and GPUs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use nvshare_simulated_client::{Timer, Way};

use crate::scheduler::{ClientId, Command, Event, GpuId, Time};

/// The latency of a message in either direction: half of the measured hand-over latency, from the
/// packet that releases a lock until the next program has read its grant (`bench/RESULTS.md`: 49 µs
/// at the median).
pub const LATENCY: Duration = Duration::from_micros(25);

/// An event other than a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happening {
    /// A program starts.
    Arrives(usize),
    /// A program has work for the GPU after a pause.
    HasWork(usize),
    /// A program's work is done. The event is outdated if the number has changed.
    WorkDone(usize, u32),
    /// A timer of the program's client expires.
    Wakes(usize, Timer),
    /// Bytes of a program have been copied to or from the given GPU.
    Moved(usize, GpuId, Way, u64),
    /// The measurement of a GPU that began at the given time is done.
    Measured(usize, Time),
}

/// The next event of any kind.
#[derive(Debug)]
pub enum Next {
    ToMachine(Event),
    ToProgram(ClientId, Command),
    Happening(Happening),
}

#[derive(Debug, Default)]
pub struct Queue {
    /// Messages to the scheduler. All messages have the same latency, so they arrive in the order
    /// of sending.
    up: VecDeque<(Time, Event)>,
    down: VecDeque<(Time, ClientId, Command)>,
    /// Events by their time. The number orders events with the same time as they were created.
    heap: BinaryHeap<Reverse<(Time, u64, Happening)>>,
    counter: u64,
}

impl Queue {
    pub fn at(&mut self, at: Time, what: Happening) {
        self.counter += 1;
        self.heap.push(Reverse((at, self.counter, what)));
    }

    pub fn send(&mut self, now: Time, event: Event) {
        self.up.push_back((now + LATENCY, event));
    }

    pub fn tell(&mut self, now: Time, client: ClientId, command: Command) {
        self.down.push_back((now + LATENCY, client, command));
    }

    /// The time of the next event.
    pub fn next(&self) -> Option<Time> {
        let up = self.up.front().map(|(at, _)| *at);
        let down = self.down.front().map(|(at, ..)| *at);
        let heap = self.heap.peek().map(|Reverse((at, ..))| *at);
        [up, down, heap].into_iter().flatten().min()
    }

    /// Removes the next event if it is due by `now`.
    pub fn pop(&mut self, now: Time) -> Option<Next> {
        if self.up.front().is_some_and(|(at, _)| *at <= now) {
            return self.up.pop_front().map(|(_, event)| Next::ToMachine(event));
        }
        if self.down.front().is_some_and(|(at, ..)| *at <= now) {
            return self.down.pop_front().map(|(_, client, command)| Next::ToProgram(client, command));
        }
        self.heap.peek().filter(|Reverse((at, ..))| *at <= now)?;
        self.heap.pop().map(|Reverse((.., what))| Next::Happening(what))
    }
}
