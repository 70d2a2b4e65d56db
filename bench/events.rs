//! The cost of one event in the scheduler's state machine, by the number of clients. Two clients
//! take turns. The other clients are idle or wait for the same GPU.
//!
//! `cargo bench --bench events [-- --json FILE]`: with a file, the benchmark writes the figures to
//! it (see `bench_support::results`).

mod virtual_time;

use std::time::Duration;

use bench_support::results::{Figure, Results};
use virtual_time::cost;

/// The numbers of users to which the waiting clients belong. A turn of one client changes the order
/// of all clients of its user.
const USERS: [u64; 3] = [1, 2, 50];

fn main() {
    let mut results = Results::from_arguments();
    println!("{:>8}  {:>12}  {:>14}  others wait, of 1, 2 and 50 users", "clients", "attach", "others idle");
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    for clients in [10, 100, 1_000, 10_000] {
        let (attach, idle) = cost(clients, 1, 50, false);
        let waiting = USERS.map(|users| cost(clients, 1, users, true).1);
        println!("{clients:>8}  {attach:>12.1?}  {idle:>14.1?}  {waiting:.1?}");
        let mut add =
            |name, value, note: &str| results.add(Figure { name, value: us(value), unit: "us", note: note.into() });
        match clients {
            1_000 => add(
                "event-1000-waiting-clients",
                waiting.into_iter().max().unwrap_or_default(),
                "a request or a release; 1,000 clients wait for one GPU, of 1, 2 or 50 users: the longest of the three",
            ),
            10_000 => add(
                "event-10000-idle-clients",
                idle,
                "a request or a release of one of two clients that take turns; 10,000 others are idle",
            ),
            _ => {}
        }
    }
    results.write();
}
