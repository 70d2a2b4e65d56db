//! The sizes of the demo: the programs' memory, and the memory that the scheduler keeps free.
//! Checks that this machine is large enough.

use std::{fs, time::Duration};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// Host memory that remains for other programs of the machine, in bytes.
const HOST_RESERVE: u64 = 2 * GIB;
/// The percentage of the available memory that each program needs, so that one program fits but two
/// don't.
const SHARE_PERCENT: u64 = 65;

/// The parameters of a demo.
#[derive(Debug)]
pub struct Plan {
    /// Bytes that each program needs.
    pub memory: u64,
    /// Bytes available for both programs.
    pub room: u64,
    reserve: u64,
    context: u64,
    rounds: u64,
    /// The number of passes over all memory in a round. One more pass at the start of the round is
    /// not included, nor are the two passes that undo the round for the final check.
    passes: u64,
}

impl Plan {
    /// A plan for a GPU of 1 GiB, on which each program needs 700 MiB.
    pub fn simulated() -> Plan {
        let (reserve, context) = (32 * MIB, 16 * MIB);
        Plan { memory: 700 * MIB, room: GIB - reserve - 2 * context, reserve, context, rounds: 3, passes: 1 }
    }

    /// A plan for a GPU with `free` free bytes and a host with `host` available bytes.
    pub fn real(free: u64, host: u64) -> Result<Plan, String> {
        let (reserve, context) = (512 * MIB, 600 * MIB);
        let room = free.saturating_sub(reserve + 2 * context);
        if room < GIB {
            return Err(format!("only {} of the GPU are free: the demo needs 3 GiB", mib(free)));
        }
        let memory = room * SHARE_PERCENT / 100 / (8 * MIB) * (8 * MIB);
        // During a hand-over, both programs' memory may be in host memory.
        let needed = 2 * memory + HOST_RESERVE;
        if needed > host {
            return Err(format!(
                "two programs that fill this GPU need {} of host memory to move to, and {} are available: \
                 DEMO_LEAVE=16G has a third program take the rest of the GPU",
                mib(needed),
                mib(host)
            ));
        }
        Ok(Plan { memory, room, reserve, context, rounds: 4, passes: 8 })
    }

    /// The command line of program `i`, after `cuda-program`.
    pub fn arguments(&self, i: usize) -> Vec<String> {
        let options = [("mem", self.memory), ("chunks", 4), ("rounds", self.rounds), ("reps", self.passes)];
        let options = options.into_iter().chain([("seed", i as u64 + 1)]);
        let words = options.flat_map(|(name, value)| [format!("--{name}"), value.to_string()]);
        ["mix".to_owned()].into_iter().chain(words).collect()
    }

    /// Sets the number of rounds so that each program works for about `wanted`. `trial` is the time
    /// that one program takes for all rounds of this plan.
    pub fn work_for(&mut self, wanted: Duration, trial: Duration) {
        let round = trial.as_secs_f64() / self.rounds as f64;
        self.rounds = (wanted.as_secs_f64() / round.max(1e-4)).clamp(4.0, 10_000.0) as u64;
    }

    pub fn config(&self) -> String {
        let (reserve, context) = (self.reserve / MIB, self.context / MIB);
        format!("time-quantum = \"1s\"\n\n[memory]\nreserve = \"{reserve}M\"\ncontext = \"{context}M\"\n")
    }
}

/// Formats bytes in MiB or larger units.
pub fn mib(bytes: u64) -> String {
    match bytes {
        0..GIB => format!("{} MiB", bytes.div_ceil(MIB)),
        _ => format!("{:.1} GiB", bytes as f64 / GIB as f64),
    }
}

/// Parses a size such as `16G` or `512M`.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let unit = match unit {
        "G" | "g" | "GiB" => GIB,
        "M" | "m" | "MiB" => MIB,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Available host memory, within the limit of this process's cgroup.
pub fn host_available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse().ok());
    let machine = kib.map_or(0, |kib: u64| kib * 1024);
    let read =
        |name: &str| -> Option<u64> { fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok() };
    match (read("memory.max"), read("memory.current")) {
        (Some(max), Some(current)) => machine.min(max.saturating_sub(current)),
        _ => machine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_program_fits_but_both_do_not() {
        for plan in [Plan::simulated(), Plan::real(16 * GIB, 64 * GIB).expect("there is room")] {
            assert!(plan.memory < plan.room && plan.room < 2 * plan.memory, "{plan:?}");
        }
    }

    #[test]
    fn a_plan_beyond_host_memory_is_refused() {
        assert!(Plan::real(140 * GIB, 128 * GIB).is_err_and(|why| why.contains("DEMO_LEAVE")));
        assert!(Plan::real(GIB, 128 * GIB).is_err());
    }

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(parse("16G"), Some(16 * GIB));
        assert_eq!(parse("512M"), Some(512 * MIB));
        assert_eq!((parse(""), parse("16"), parse("G")), (None, None, None));
    }
}
