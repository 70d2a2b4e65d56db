//! Counts the instructions that a program's first thread executes in user mode, one by one, by `ptrace(2)`: the same count
//! every time, whatever else the machine does. Of its system calls only the instruction counts.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

/// Runs the program to its end. Its output is thrown away.
pub fn instructions(command: &mut Command) -> io::Result<u64> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: both calls are async-signal-safe. Addresses are the same in each run, and so are hash chains and the like.
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
    let mut count = 0;
    loop {
        let mut status = 0;
        // SAFETY: a valid place; the child is this process's own and traced by this thread.
        unsafe {
            if libc::waitpid(pid, &mut status, 0) != pid {
                return Err(io::Error::last_os_error());
            }
            if libc::WIFEXITED(status) {
                return match libc::WEXITSTATUS(status) {
                    0 => Ok(count),
                    code => Err(io::Error::other(format!("the program ended with {code}"))),
                };
            }
            if libc::WIFSIGNALED(status) {
                return Err(io::Error::other(format!("signal {} ended the program", libc::WTERMSIG(status))));
            }
            let signal = match libc::WSTOPSIG(status) {
                libc::SIGTRAP => 0,
                other => other,
            };
            if libc::ptrace(libc::PTRACE_SINGLESTEP, pid, 0, signal) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        count += 1;
    }
}
