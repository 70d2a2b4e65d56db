//! Counts the instructions that a program's first thread executes in user mode. The module
//! single-steps the thread with `ptrace(2)`, so the count is reproducible under any load. A system
//! call counts as one instruction.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

/// Runs the program to its end and counts its instructions. The program's output is discarded.
///
/// # Errors
/// The program cannot be started or traced, or it fails.
pub fn instructions(command: &mut Command) -> io::Result<u64> {
    Ok(stepped(command, None)?.iter().sum())
}

/// Runs the program to its end, and counts the instructions between the `SIGUSR1` signals that it
/// sends itself. The signals are not delivered. The program runs at full speed until the first
/// signal.
///
/// # Errors
/// As for [`instructions`].
pub fn between_signals(command: &mut Command) -> io::Result<Vec<u64>> {
    let mut counts = stepped(command, Some(libc::SIGUSR1))?;
    counts.pop(); // the instructions after the last signal
    Ok(counts.split_off(1.min(counts.len())))
}

/// Counts the instructions up to each signal. The first count is for the instructions before the
/// first signal, and is 0 with `signal_between`.
fn stepped(command: &mut Command, signal_between: Option<i32>) -> io::Result<Vec<u64>> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: both calls are async-signal-safe. `ADDR_NO_RANDOMIZE` makes addresses, and so hash
    // chains, reproducible.
    unsafe {
        command.pre_exec(|| {
            libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong);
            match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
    };
    let child = command.spawn()?;
    let pid = child.id() as libc::pid_t;
    let mut counts = vec![0];
    let mut request = if signal_between.is_some() { libc::PTRACE_CONT } else { libc::PTRACE_SINGLESTEP };
    loop {
        let mut status = 0;
        // SAFETY: `status` is a valid place. The child belongs to this process and is traced by
        // this thread.
        unsafe {
            if libc::waitpid(pid, &mut status, 0) != pid {
                return Err(io::Error::last_os_error());
            }
            if libc::WIFEXITED(status) {
                return match libc::WEXITSTATUS(status) {
                    0 => Ok(counts),
                    code => Err(io::Error::other(format!("the program ended with {code}"))),
                };
            }
            if libc::WIFSIGNALED(status) {
                return Err(io::Error::other(format!("signal {} ended the program", libc::WTERMSIG(status))));
            }
            let signal = match libc::WSTOPSIG(status) {
                libc::SIGTRAP => 0,
                signal if Some(signal) == signal_between => {
                    counts.push(0);
                    request = libc::PTRACE_SINGLESTEP;
                    0
                }
                other => other,
            };
            if libc::ptrace(request, pid, 0, signal) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        if let Some(count) = counts.last_mut().filter(|_| request == libc::PTRACE_SINGLESTEP) {
            *count += 1;
        }
    }
}
