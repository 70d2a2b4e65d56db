//! Runs work in a detached process. The detached process is a child neither of this process nor of
//! the program that this process executes next.

use std::io;

/// Runs `work` in a new process that inherits only standard error. Returns once the new process is
/// no longer a child of this process. The new process exits after `work`.
///
/// # Errors
/// The process cannot be created, or this process has other threads. Locks that other threads hold
/// would stay locked in the new process forever.
pub fn run(work: impl FnOnce()) -> io::Result<()> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("there are other threads"));
    }
    // SAFETY: this thread is the only one, so the copy contains no lock or half-done change of
    // another thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: this process is a copy with one thread. This copy exits immediately after the
            // fork, so that init or a subreaper becomes the parent of the new process.
            if unsafe { libc::fork() } == 0 {
                let is_quiet = leave_descriptors();
                if is_quiet.is_ok() {
                    work();
                }
            }
            // SAFETY: `_exit` takes no pointers. `_exit` skips the exit handlers, which belong to
            // the original process.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `status` outlives the call.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1 {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
            Ok(())
        }
    }
}

/// Closes all descriptors except standard error. When the program ends, readers of the program's
/// output then see end of file, and the program's file locks are released.
fn leave_descriptors() -> io::Result<()> {
    // SAFETY: these system calls only change descriptors, and `work` uses none of the closed ones.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null < 0 || libc::dup2(null, 0) < 0 || libc::dup2(null, 1) < 0 {
            return Err(io::Error::last_os_error());
        }
        match libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
