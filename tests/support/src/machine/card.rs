//! Kinds of cards and their hosts.

use std::os::unix::process::CommandExt;
use std::process::Command;

const GIB: u64 = 1 << 30;

/// The variable that selects the card of tests that choose none.
const VARIABLE: &str = "NVSHARE_TEST_CARD";

/// The properties of a machine, scaled to the size of its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Card {
    /// The simulator's defaults: NVML with all supported features, a link of 1 GiB/s, and the real
    /// host.
    Simulated,
    /// A consumer card in a desktop computer.
    Consumer,
}

/// The consumer card [24 GiB, PCIe 4 ×16] and its host with dual-channel DDR4. Sizes are in bytes,
/// and rates in bytes per second.
const MEMORY: u64 = 24 * GIB;
const LINK: u64 = 25 * GIB;
const BOTH_WAYS: u64 = 35 * GIB;
const HOST_MEMORY: u64 = 64_000_000_000;
const CORES: usize = 6;
/// The scheduler's default part of host memory for swapped memory, in percent.
const SWAP_PERCENT: u64 = 80;

impl Card {
    pub fn of_environment() -> Self {
        match std::env::var(VARIABLE).as_deref() {
            Err(_) | Ok("simulated") => Self::Simulated,
            Ok("consumer") => Self::Consumer,
            Ok(other) => panic!("{VARIABLE}={other}: want simulated or consumer"),
        }
    }

    /// The factor by which programs may be slower if their memory moves at each turn of one second.
    /// On a slow link, moving the memory takes most of the turn.
    pub fn slowness(self) -> u32 {
        match self {
            Self::Simulated => 1,
            Self::Consumer => 4,
        }
    }

    /// The limit of host memory for swapped memory on a machine with a GPU of `memory` bytes.
    /// `None` means the host's own limit.
    pub(super) fn swap_max(self, memory: u64) -> Option<String> {
        (self == Self::Consumer).then(|| scaled(HOST_MEMORY * SWAP_PERCENT / 100, memory).to_string())
    }

    /// Sets the environment of a process for a machine with this card.
    pub(super) fn apply(self, memory: u64, command: &mut Command) {
        if self != Self::Consumer {
            return;
        }
        command.env("CUDA_SIM_LINK_BANDWIDTH", scaled(LINK, memory).to_string());
        command.env("CUDA_SIM_HOST_BANDWIDTH", scaled(BOTH_WAYS, memory).to_string());
        command.env("CUDA_SIM_NVML", "memory");
        // SAFETY: `stay_on_cores` makes only system calls, which are async-signal-safe.
        unsafe { command.pre_exec(stay_on_cores) };
    }
}

fn scaled(value: u64, memory: u64) -> u64 {
    (u128::from(value) * u128::from(memory) / u128::from(MEMORY)) as u64
}

/// Limits this process to as many processors as the card's host has. On a machine with fewer
/// processors, the process uses all of them.
fn stay_on_cores() -> std::io::Result<()> {
    // SAFETY: the system calls access only `set`, which outlives them. All zeros is a valid, empty
    // set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        if libc::sched_getaffinity(0, size, &raw mut set) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let allowed = (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).skip(CORES);
        let mut fewer = set;
        allowed.for_each(|cpu| libc::CPU_CLR(cpu, &mut fewer));
        if libc::sched_setaffinity(0, size, &raw const fewer) != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}
