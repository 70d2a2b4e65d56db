//! Kinds of cards, with the hosts that they are in.

use std::os::unix::process::CommandExt;
use std::process::Command;

const GIB: u64 = 1 << 30;

/// `NVSHARE_TEST_CARD` names the one that tests run on which do not choose.
const VARIABLE: &str = "NVSHARE_TEST_CARD";

/// What a machine is like beside the size of its GPU, to which everything is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Card {
    /// As the simulator is unless told: NVML that supports all that is known there, a link of 1 GiB/s, and the host that there is.
    Simulated,
    /// A consumer card in a desktop computer.
    Consumer,
}

/// The consumer card [24 GiB, PCIe 4 ×16], and its host with dual-channel DDR4. Bytes, and bytes a second.
const MEMORY: u64 = 24 * GIB;
const LINK: u64 = 25 * GIB;
const BOTH_WAYS: u64 = 35 * GIB;
const HOST_MEMORY: u64 = 64_000_000_000;
const CORES: usize = 6;
/// What the scheduler's default leaves of host memory for what is swapped out, in percent.
const SWAP_PERCENT: u64 = 80;

impl Card {
    pub fn of_environment() -> Self {
        match std::env::var(VARIABLE).as_deref() {
            Err(_) | Ok("simulated") => Self::Simulated,
            Ok("consumer") => Self::Consumer,
            Ok(other) => panic!("{VARIABLE}={other}: want simulated or consumer"),
        }
    }

    /// How many times as long programs may take whose memory moves at each turn of a second, which is most of the turn on a
    /// slow link.
    pub fn slowness(self) -> u32 {
        match self {
            Self::Simulated => 1,
            Self::Consumer => 4,
        }
    }

    /// Host memory for what is swapped out, in bytes, of a machine with a GPU of so many; `None` for what the host allows.
    pub(super) fn swap_max(self, memory: u64) -> Option<String> {
        (self == Self::Consumer).then(|| scaled(HOST_MEMORY * SWAP_PERCENT / 100, memory).to_string())
    }

    /// Has a process see a machine with that card.
    pub(super) fn apply(self, memory: u64, command: &mut Command) {
        if self != Self::Consumer {
            return;
        }
        command.env("CUDA_SIM_LINK_BANDWIDTH", scaled(LINK, memory).to_string());
        command.env("CUDA_SIM_HOST_BANDWIDTH", scaled(BOTH_WAYS, memory).to_string());
        command.env("CUDA_SIM_NVML", "memory");
        // SAFETY: what runs in the child before it becomes another program only makes system calls.
        unsafe { command.pre_exec(stay_on_cores) };
    }
}

fn scaled(value: u64, memory: u64) -> u64 {
    (u128::from(value) * u128::from(memory) / u128::from(MEMORY)) as u64
}

/// Leaves this process no more processors than the host has. A machine that has fewer is what it is.
fn stay_on_cores() -> std::io::Result<()> {
    // SAFETY: plain system calls on a set that lives; zeros are an empty one.
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
