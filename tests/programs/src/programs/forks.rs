//! Forks children from a program with a context. One child exits, one uses CUDA, and one executes
//! another program. None of them may disturb the parent.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, cu},
    report::Report,
};
use std::{env, process::Command};

const NOT_INITIALIZED: u32 = 3;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "16M"), args.size("rounds", "10"));
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, memory as usize)?;
    gpu.fill(buffer.at, buffer.count(), 1, 0)?;
    for round in 0..rounds {
        gpu.add(buffer.at, buffer.count(), 1, 0)?;
        let code = match round % 3 {
            0 => child(|| 0)?,
            1 => child(|| {
                let mut at = 0;
                cu!(cuMemAlloc_v2(&mut at, 4096)).err().map_or(0, |e| i32::from(e.code != NOT_INITIALIZED))
            })?,
            _ => {
                let status = Command::new(env::current_exe()?).args(["account", "--mem", "2M"]).output()?.status;
                status.code().unwrap_or(-1)
            }
        };
        expect("the child's exit status", code, 0)?;
        gpu.synchronise()?;
    }
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * (1 + rounds))?;
    report.integer("children", rounds);
    Ok(())
}

/// Runs `f` in a forked child, which then exits as programs do. Returns the child's exit status.
fn child(f: impl FnOnce() -> i32) -> Result<i32, std::io::Error> {
    // SAFETY: only this thread continues in the child, and `f` takes no lock that another thread
    // could hold.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            let code = f();
            // SAFETY: `exit` ends the child after its exit handlers.
            unsafe { libc::exit(code) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` is a live value.
            match unsafe { libc::waitpid(pid, &mut status, 0) } {
                -1 => Err(std::io::Error::last_os_error()),
                _ if libc::WIFEXITED(status) => Ok(libc::WEXITSTATUS(status)),
                _ => Ok(-1),
            }
        }
    }
}
