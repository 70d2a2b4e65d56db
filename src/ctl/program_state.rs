//! A program's state, in the words of `status` and `top`.

use std::collections::HashMap;
use std::time::Duration;

use crate::bus::{Client, Gpu, GpuUse};
use crate::config::units;
use crate::identity::printable;

/// The colour of a state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tone {
    #[default]
    Plain,
    Runs,
    Waits,
    Bad,
}

/// Formats a number of seconds like `3.2s`.
pub fn seconds(seconds: f64) -> String {
    units::duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// Formats an estimate like `about 12s`. The estimate is imprecise, so it is shown in whole units.
pub fn about(time: f64) -> String {
    match time {
        ..0.1 => "<0.1s".into(),
        ..60.0 => format!("about {:.0}s", time.ceil()),
        ..3600.0 => format!("about {:.0}min", (time / 60.0).round()),
        _ => format!("about {:.0}h", (time / 3600.0).round()),
    }
}

/// Describes a program's state on a GPU. `moves_in` is true while memory is being restored to that
/// GPU.
pub fn state(client: &Client, usage: Option<&GpuUse>, gpu: Option<&Gpu>, moves_in: bool) -> (String, Tone) {
    let (resident, swapped) = usage.map_or((0, 0), |usage| (usage.resident, usage.swapped));
    let percent = |part: u64| (part as f64 * 100.0 / (resident.saturating_add(swapped).max(1) as f64)).floor();
    let leaving = || if resident == 0 { "leaving".into() } else { format!("leaving {} %", percent(swapped)) };
    match client.sleep.as_str() {
        "preparing" => return (leaving(), Tone::Waits),
        "checkpointing" => return ("leaving, driver".into(), Tone::Waits),
        "sleeping" if client.paused => return ("paused".into(), Tone::Plain),
        "sleeping" => return ("asleep".into(), Tone::Plain),
        "waking" => return ("waits for room".into(), Tone::Waits),
        "restoring" => return ("returning, driver".into(), Tone::Waits),
        "settling" => return ("state unknown".into(), Tone::Waits),
        "locked" => return ("locked".into(), Tone::Plain),
        "checkpointed" | "lent" => return ("checkpointed".into(), Tone::Plain),
        "lost" => return ("lost: calls fail".into(), Tone::Bad),
        _ => {}
    }
    if client.paused {
        let leaves = swapped < resident && client.sleep_obstacle.is_empty();
        return (if leaves { leaving() } else { "paused".into() }, Tone::Plain);
    }
    let Some(usage) = usage else { return ("uses no GPU".into(), Tone::Plain) };
    let is_coming = swapped > 0 && usage.allowance > resident && moves_in;
    let coming = || format!("returning {} %", percent(resident));
    let time = |of: Option<&HashMap<u64, f64>>| of.and_then(|times| times.get(&client.id)).copied();
    match usage.state.as_str() {
        "attaching" => ("waits for room".into(), Tone::Waits),
        _ if client.stopped => ("stopped".into(), Tone::Bad),
        "holding" if is_coming => (coming(), Tone::Runs),
        "holding" => match time(gpu.and_then(|gpu| gpu.turn_ends.as_ref())) {
            Some(left) => (format!("runs, {} left", seconds(left)), Tone::Runs),
            None => ("runs".into(), Tone::Runs),
        },
        "waiting" if usage.pending_limit.is_some() => ("waits for memory".into(), Tone::Waits),
        "waiting" => match time(gpu.and_then(|gpu| gpu.expected_starts.as_ref())) {
            Some(start) => (format!("waits, {}", about(start)), Tone::Waits),
            None => ("waits".into(), Tone::Waits),
        },
        "revoking" => ("ends its turn".into(), Tone::Runs),
        "stuck" | "undrainable" => ("work does not end".into(), Tone::Bad),
        other => (printable(other), Tone::Plain),
    }
}
